"""The search for the fastest combination of techniques, and the model of time and memory that guides it."""
