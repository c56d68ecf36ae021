"""Routing of tokens to the experts of a mixture: the choice, sorting rows by expert, and their weighted sums."""
