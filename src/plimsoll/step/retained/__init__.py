"""Graphs and tensors that user code retains from step to step."""
