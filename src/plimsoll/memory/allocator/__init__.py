"""Simulations of allocators: the memory that they take from the system for the requests of tensors."""
