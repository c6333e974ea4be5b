"""The dry run of a training: the real step on fake tensors. Nothing is computed, and every allocation is recorded."""
