"""Weights of models: files of them read piece by piece, and what makes them smaller."""
