"""Prediction and measurement of the memory of a training run."""
