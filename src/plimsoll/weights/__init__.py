"""Weights of models: files of them read tensor by tensor, and what makes them smaller."""
