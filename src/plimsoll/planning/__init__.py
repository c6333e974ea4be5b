"""Prediction of the memory of a training run, and choice of the fastest techniques that fit a budget."""
