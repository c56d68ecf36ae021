"""The parts of a model that can be quantised: linear layers and similar ones, and mixtures of experts."""
