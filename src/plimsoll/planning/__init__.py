"""Predict what a training needs, and choose the fastest techniques that fit a budget."""
