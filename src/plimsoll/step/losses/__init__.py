"""Checks that the loss of a batch is the sum of the losses of its micro-batches."""
