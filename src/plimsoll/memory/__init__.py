"""How much memory a training step needs, without running it."""
