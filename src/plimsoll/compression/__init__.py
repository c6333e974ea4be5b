"""Smaller models: one module per compression method, the search for a target size, and recovery training."""
