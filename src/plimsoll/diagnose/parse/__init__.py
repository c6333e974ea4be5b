"""A parser for out-of-memory errors in any text or log: their kind, their numbers and the likely cause."""
