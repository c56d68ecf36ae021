"""What a model consists of, for those who quantise it: linear layers and their look-alikes, and mixtures of experts."""
