"""Recognition of errors that mean out of memory: by type if there is a specific type, otherwise by message.

A *family* is a kind of error that always means out of memory. A *disguise* is an error that a library also raises for
other reasons. It means out of memory only if the device is nearly full, which the caller must check.

Sources of the messages:

- torch 0.1 to 2.13 (CUDA, HIP, XPU, MPS and CPU allocators) and its DataLoader;
- status names of cuBLAS, cuDNN, NCCL and oneDNN;
- glibc, numpy, pyarrow, Rust's standard library, the Linux OOM killer, Kubernetes, Slurm and Ray;
- the parts of messages collected by torch-max-mem (https://github.com/mberr/torch-max-mem/issues/45).

Not covered: the exit status of a killed process (see `cgroup`), and allocators of languages other than Python, C++ and
Rust. Needs no torch.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from decimal import Decimal

# Checked in this order: specific messages before general messages that they contain.
_FAMILIES = {
    "cuda-async": r"would exceed allowed memory\. \(out of memory\)|cudaMallocAsync.*out of memory",
    "hip": r"HIP out of memory|HIP error: out of memory|hipErrorOutOfMemory|rocblas_status_memory_error"
    r"|(?:HIPBLAS|MIOPEN)_STATUS_ALLOC_FAILED|miopenStatusAllocFailed",
    "xpu": r"XPU out of memory|UR_RESULT_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY",
    "mps": r"MPS backend out of memory",
    "cuda": r"CUDA out of memory",
    "nccl": r"NCCL[^\n]*out of memory|Cuda failure (?:2 )?'out of memory'",
    "cublas": r"CUBLAS_STATUS_ALLOC_FAILED",
    "cudnn": r"CUDNN_STATUS_ALLOC_FAILED|Unable to find a valid cuDNN algorithm",
    "cuda-driver": r"CUDA (?:driver )?error: out of memory|cuda runtime error \(2\)|cudaErrorMemoryAllocation"
    r"|CUDA_ERROR_OUT_OF_MEMORY|handles_\.at\(i\) INTERNAL ASSERT FAILED[^\n]*CUDACachingAllocator",
    "cpu-allocator": r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)",
    "shared-memory": r"killed by signal: Bus error|insufficient shared memory|unable to allocate shared memory"
    r"|</?torch_[^>\n]*>[^\n]*(?:No space left on device|Cannot allocate memory)|No space left on device: '/dev/shm/",
    "worker-killed": r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal: Killed|exited unexpectedly)",
    "bad-alloc": r"std::bad_alloc",
    "rust": r"memory allocation of \d+ bytes failed",
    "arrow": r"ArrowMemoryError|\b(?:[mc]alloc|realloc|posix_memalign) of size \d+ failed",
    "memory-error": r"\bMemoryError\b|ArrayMemoryError|Unable to allocate [\d.]+ \w+ for an array",
    "os": r"Cannot allocate memory|\[Errno 12\]|: cannot map zero-fill pages",
    "oom-killer": r"OOMKilled|oom-kill|oom_kill event|[Kk]illed process \d+|out-of-memory handler"
    r"|node running low on memory",
}
_DISGUISES = {
    "cublas": r"CUBLAS_STATUS_NOT_INITIALIZED|CUBLAS_STATUS_INTERNAL_ERROR when calling .?cublas(?:Lt)?Create",
    "cudnn": r"CUDNN_STATUS_(?:INTERNAL_ERROR|NOT_INITIALIZED)|unable to find an engine to execute this computation",
    "nccl": r"NCCL[^\n]*(?:unhandled (?:cuda|system) error|internal error)|nccl(?:UnhandledCuda|System|Internal)Error",
    "cuda-driver": r"CUDA driver error: device not ready",
    "xpu": r"UR_RESULT_ERROR_OUT_OF_RESOURCES",
    "onednn": r"could not (?:create a primitive|create a memory object|execute a primitive)",
    "os": r"can't start new thread|ThreadPoolBuildError",
    # CPython 3.11 and later raise this error if there is no memory for a call's frame; a faulty extension also raises
    # it.
    "memory-error": r"error return without exception set|returned NULL without setting an exception",
    "worker-killed": r"DataLoader worker \(pid \d+\) is killed by signal: Aborted",
}
# Errors that a retry with less memory cannot fix, although a message above may appear in the same text.
_OTHER_FAULTS = re.compile(
    r"illegal memory access|device-side assert triggered|static TLS block|no kernel image|invalid device ordinal"
    r"|Too many open files|killed by signal: Segmentation fault"
)
_FAMILY_PATTERNS = {family: re.compile(pattern) for family, pattern in _FAMILIES.items()}
_DISGUISE_PATTERNS = {family: re.compile(pattern) for family, pattern in _DISGUISES.items()}

_TYPES_WITH_TEXTS = (RuntimeError, OSError, ImportError, SystemError)  # ImportError: a library cannot be mapped

_SIZE = r"(\d+(?:\.\d+)?) ?([KMGTPE]i?B|[Bb]ytes)"
_REQUESTS = re.compile(
    rf"(?:[Tt]ried to allocate|Requested\s*:|Unable to allocate|unable to mmap|memory allocation of) {_SIZE}"
    r"|(?:alloc|posix_memalign) of size (?P<bytes>\d+) failed"
)


def oom_family(error: BaseException) -> str | None:
    """Return the family of an error that certainly means out of memory; ``None`` for any other error.

    The explicit causes of the error (``raise ... from``, ``__cause__``) are searched too, but not its ``__context__``.
    Messages are searched only in types that carry such messages: a ``ValueError`` about "out of memory" is not
    recognized.
    """
    return _first_in_chain(error, _family_of_one)


def disguised_family(error: BaseException) -> str | None:
    """Return the family of an error that is a disguise (see the module); ``None`` for any other error.

    Such an error means out of memory only if the device is nearly full, which the caller must check.
    """
    return _first_in_chain(error, _disguise_of_one)


def oom_family_on(error: BaseException, is_nearly_full: Callable[[], bool]) -> str | None:
    """Return the family of an out-of-memory error; ``None`` for any other error.

    A disguise counts as an out-of-memory error if the device is nearly full.
    """
    family = oom_family(error)
    if family is None and (disguise := disguised_family(error)) is not None and is_nearly_full():
        return disguise
    return family


def family_of_text(text: str) -> str | None:
    """Return the family of the out-of-memory error in a message or a part of a log; ``None`` if it has none."""
    return None if _OTHER_FAULTS.search(text) else _first_match(_FAMILY_PATTERNS, text)


def requested_bytes(text: str) -> int | None:
    """Return the size in bytes of the first failed allocation in a text; ``None`` if the text states no size.

    torch, numpy and Metal print binary units, even if they write "GB". Sizes of 2^63 or more are ignored, because some
    drivers print a negative number as unsigned.
    """
    match = _REQUESTS.search(text)
    if match is None:
        return None
    if match["bytes"] is not None:
        number, exponent = match["bytes"], 0
    else:
        number, exponent = match[1], 0 if match[2].lower() == "bytes" else "KMGTPE".index(match[2][0]) + 1
    num_bytes = round(Decimal(number) * 1024**exponent)
    return num_bytes if num_bytes < 1 << 63 else None


def _first_in_chain(error: BaseException, family_of: Callable[[BaseException], str | None]) -> str | None:
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain += [cause, *(cause.exceptions if isinstance(cause, BaseExceptionGroup) else ())]
        cause = cause.__cause__
    if any(_OTHER_FAULTS.search(str(one)) for one in chain):
        return None
    return next(filter(None, map(family_of, chain)), None)


def _family_of_one(error: BaseException) -> str | None:
    if _is_torch_out_of_memory(error):
        return family_of_text(str(error)) or "cuda"
    if isinstance(error, MemoryError):
        return family_of_text(str(error)) or "memory-error"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "os"
    return family_of_text(str(error)) if _has_such_texts(error) else None


def _disguise_of_one(error: BaseException) -> str | None:
    return _first_match(_DISGUISE_PATTERNS, str(error)) if _has_such_texts(error) else None


def _has_such_texts(error: BaseException) -> bool:
    # Compared by name: the exception for a Rust panic cannot be imported from any module.
    return isinstance(error, _TYPES_WITH_TEXTS) or type(error).__name__ == "PanicException"


def _is_torch_out_of_memory(error: BaseException) -> bool:
    # Compared by name, so that watching a process does not need torch.
    return any(
        kind.__name__ == "OutOfMemoryError" and kind.__module__.startswith("torch") for kind in type(error).__mro__
    )


def _first_match(patterns: dict[str, re.Pattern[str]], text: str) -> str | None:
    return next((family for family, pattern in patterns.items() if pattern.search(text)), None)


_NOT_THE_USERS = re.compile(r"site-packages|dist-packages|[/\\]lib(?:64)?[/\\]python\d|^<frozen|^/pytorch/")


def is_users(path: str) -> bool:
    """Return whether a source file is user code, that is, outside installed packages and the standard library."""
    return not _NOT_THE_USERS.search(path)
