"""How each allocator counts, rounds and keeps what is asked of it."""
