"""Everything a pass may change besides gradients, saved before it and restored after an error."""
