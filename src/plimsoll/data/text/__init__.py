"""Files of text, indexed where they are or converted once, and read at random."""
