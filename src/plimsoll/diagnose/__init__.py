"""Diagnoses of memory use: the objects that use it, and ways to free it."""
