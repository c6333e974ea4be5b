"""How allocators turn the bytes that tensors ask for into the bytes a device gives away."""
