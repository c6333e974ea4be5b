"""The CUDA backend: the caching allocator, NVML, CUDA graphs, and a table of GPUs."""
