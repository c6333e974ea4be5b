"""Out-of-memory messages of every form, by the name of their kind, with the numbers they state."""

MIB, GIB = 1 << 20, 1 << 30

NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 24.00 GiB "
    "of which 512.00 MiB is free. Process 7 has 1.00 GiB memory in use. Process 8 has 2.00 GiB memory in use. "
    "Including non-PyTorch memory, this process has 20.50 GiB memory in use. 20.00 GiB allowed; Of the allocated "
    "memory 16.00 GiB is allocated by PyTorch, with 1.00 GiB allocated in private pools (e.g., CUDA Graphs), and 3.00 "
    "GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=..."
)
TEXTS = {
    "cuda_allocator_new_format": (
        NEW,
        {
            "subformat": "2.9+ PYTORCH_ALLOC_CONF", "tried_to_allocate": 2 * GIB, "capacity": 24 * GIB,
            "free": 512 * MIB, "other_process": 3 * GIB, "this_process": 20 * GIB + 512 * MIB,
            "allowed_limit": 20 * GIB, "allocated_by_pytorch": 16 * GIB, "reserved_unallocated": 3 * GIB,
            "derived_reserved_unallocated": 3 * GIB, "device_index": 1,
        },
    ),
    "cuda_allocator_old_format": (
        "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 8.00 GiB total capacity; 6.00 GiB "
        "already allocated; 1.00 MiB free; 6.50 GiB allowed; 6.25 GiB reserved in total by PyTorch)",
        {
            "subformat": "1.4-1.8 reserved", "tried_to_allocate": 20 * MIB, "capacity": 8 * GIB, "free": MIB,
            "allowed_limit": 6 * GIB + 512 * MIB, "allocated_by_pytorch": 6 * GIB,
            "reserved_total": 6 * GIB + 256 * MIB, "derived_reserved_unallocated": 256 * MIB, "device_index": 0,
        },
    ),
    "cuda_mallocasync": (
        "Allocation on device 2 would exceed allowed memory. (out of memory)\nCurrently allocated     : 3.00 GiB\n"
        "Requested               : 1.00 GiB\nDevice limit            : 4.00 GiB\nFree (according to CUDA): 0 bytes\n"
        "PyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB",
        {
            "tried_to_allocate": GIB, "capacity": 4 * GIB, "free": 0, "allocated_by_pytorch": 3 * GIB,
            "device_index": 2,
        },
    ),
    "hip": ("HIP out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 2.00 GiB of which 0 bytes is "
            "free.", {"tried_to_allocate": GIB, "capacity": 2 * GIB, "free": 0, "device_index": 0}),
    "xpu": ("XPU out of memory. Tried to allocate 3.00 GiB (GPU 0; 2.00 GiB total capacity; 0 bytes already allocated; "
            "0 bytes reserved in total by PyTorch)",
            {"tried_to_allocate": 3 * GIB, "capacity": 2 * GIB, "allocated_by_pytorch": 0, "reserved_total": 0,
             "derived_reserved_unallocated": 0, "device_index": 0}),
    "mps": ("MPS backend out of memory (MPS allocated: 2.00 GB, other allocations: 1.00 GB, max allowed: 4.00 GB). "
            "Tried to allocate 1.50 GB on private pool.",
            {"tried_to_allocate": 3 * GIB // 2, "allocated_by_pytorch": 2 * GIB, "allowed_limit": 4 * GIB}),
    "nccl": ("NCCL WARN Cuda failure 2 'out of memory'", {}),
    "cublas_alloc": ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", {}),
    "cudnn": ("RuntimeError: Unable to find a valid cuDNN algorithm to run convolution", {}),
    "cuda_driver": ("cuda runtime error (2) : out of memory at THCStorage.cu:66", {"subformat": "thc_runtime_error_2"}),
    "cpu_allocator_linux": ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code "
                            "12 (Cannot allocate memory)", {"tried_to_allocate": 4096}),
    "cpu_allocator_windows": ("DefaultCPUAllocator: not enough memory: you tried to allocate 8192 bytes.",
                              {"tried_to_allocate": 8192}),
    "bad_alloc": ("terminate called after throwing an instance of 'std::bad_alloc'", {}),
    "numpy_arraymemoryerror": ("Unable to allocate 2.00 GiB for an array with shape (2, 134217728) and data type "
                               "float64",
                               {"tried_to_allocate": 2 * GIB}),
    "python_memoryerror": ("MemoryError", {}),
    "os_enomem": ("OSError: [Errno 12] Cannot allocate memory", {}),
    "dataloader_worker_killed": ("DataLoader worker (pid 12) is killed by signal: Killed.", {}),
    "shm_bus_error": ("DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that dataloader's "
                      "workers are out of shared memory.", {}),
    "oom_killer_dmesg": ("Out of memory: Killed process 12 (python) total-vm:1kB, anon-rss:1kB", {}),
    "kubernetes_oomkilled": ("Reason:       OOMKilled\n  Exit Code:    137", {}),
    "slurm_oom": ("slurmstepd: error: Detected 1 oom-kill event(s) in step 1.batch cgroup.", {}),
}  # fmt: skip
