"""Saving the state that a pass may change, besides the gradients, and restoring it after an error."""
