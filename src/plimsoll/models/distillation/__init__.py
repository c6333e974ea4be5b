"""A student that learns from a teacher: its loss, a few positions at a time, and the model that teaches it."""
