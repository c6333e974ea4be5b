"""Text files, indexed in place or converted once, with random access."""
