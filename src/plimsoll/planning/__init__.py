"""Prediction of a training's memory, and the choice of the fastest techniques that fit a budget."""
