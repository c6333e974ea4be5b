"""The real training step on fake tensors: nothing is computed, every allocation is recorded."""
