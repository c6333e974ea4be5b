"""The CPU backend: private memory, its limit, and the C library's heap."""
