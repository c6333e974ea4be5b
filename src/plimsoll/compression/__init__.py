"""Smaller models: one module per method, the search for a target size, and the training that recovers quality."""
