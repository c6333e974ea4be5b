"""Micro-batches replayed from one captured CUDA graph."""
