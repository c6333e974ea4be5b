"""Inference over every row of a file, inside a budget."""
