"""The CUDA backend: the caching allocator, NVML, CUDA graphs, and GPUs known by name."""
