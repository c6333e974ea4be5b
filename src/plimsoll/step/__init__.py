"""The training step as a transaction: it happens once, or not at all."""
