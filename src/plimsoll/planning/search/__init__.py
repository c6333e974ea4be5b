"""The search for the fastest combination of techniques, and the models of time and memory that guide it."""
