"""Simulations of allocators: the memory that an allocator requests from the system to store tensors."""
