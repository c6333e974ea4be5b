"""Every real error text is recognized or not, according to its label, and so is every error that can be raised here."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pyarrow
import pytest
import torch

from plimsoll.device.oom_errors import disguised_family, family_of_text, oom_family, requested_bytes

_TEXTS = Path(__file__).resolve().parents[4] / "shared" / "data" / "oom_texts"
_FAMILY_OF_KIND = {
    "bad_alloc": "bad-alloc",
    "cpu_allocator_linux": "cpu-allocator",
    "cpu_allocator_windows": "cpu-allocator",
    "cublas_alloc": "cublas",
    "cuda_allocator_new_format": "cuda",
    "cuda_allocator_old_format": "cuda",
    "cuda_mallocasync": "cuda-async",
    "cudnn": "cudnn",
    "dataloader_worker_killed": "worker-killed",
    "hip": "hip",
    "kubernetes_oomkilled": "oom-killer",
    "mps": "mps",
    "nccl": "nccl",
    "numpy_arraymemoryerror": "memory-error",
    "oom_killer_dmesg": "oom-killer",
    "python_memoryerror": "memory-error",
    "shm_bus_error": "shared-memory",
    "slurm_oom": "oom-killer",
    "xpu": "xpu",
}


def _labels():
    if not (_TEXTS / "labels.jsonl").is_file():
        return []
    return [json.loads(line) for line in (_TEXTS / "labels.jsonl").read_text().splitlines()]


@pytest.mark.skipif(not _labels(), reason=f"the collection of real texts is not at {_TEXTS}")
@pytest.mark.parametrize("label", _labels(), ids=lambda label: label["file"])
def test_a_real_text_is_read_as_its_label_says(label):
    text = (_TEXTS / label["file"]).read_text()
    assert family_of_text(text) == (_FAMILY_OF_KIND.get(label["kind"], "cuda-driver") if label["is_oom"] else None)
    assert requested_bytes(text) == label["tried_to_allocate"]


def _error_of(action):
    with pytest.raises(BaseException) as caught:  # the type of the error is under test
        action()
    return caught.value


class _DyingDataset(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


class _GreedyDataset(_DyingDataset):
    def __getitem__(self, index):
        return torch.empty(1 << 60, dtype=torch.uint8)


def _read(dataset):
    return lambda: list(torch.utils.data.DataLoader(dataset, num_workers=1, multiprocessing_context="fork"))


@pytest.mark.parametrize(
    ("family", "action"),
    [
        ("cpu-allocator", lambda: torch.empty(1 << 60, dtype=torch.uint8)),
        ("memory-error", lambda: bytearray(1 << 60)),
        ("memory-error", lambda: numpy.empty(1 << 60, dtype=numpy.uint8)),
        ("arrow", lambda: pyarrow.allocate_buffer(1 << 60)),
        ("worker-killed", _read(_DyingDataset())),
        ("cpu-allocator", _read(_GreedyDataset())),
    ],
    ids=["torch", "python", "numpy", "pyarrow", "killed worker", "error in a worker"],
)
def test_a_real_error_is_recognised(family, action):
    assert oom_family(_error_of(action)) == family


def test_the_size_of_a_real_request_is_read():
    assert requested_bytes(str(_error_of(lambda: torch.empty(1 << 60, dtype=torch.uint8)))) == 1 << 60
    assert requested_bytes(str(_error_of(lambda: pyarrow.allocate_buffer(1 << 60)))) == 1 << 60
    assert requested_bytes("memory allocation of 4096 bytes failed") == 4096


_BAD_ALLOC = """
import resource, torch
from plimsoll.device import process
from plimsoll.device.oom_errors import oom_family
resource.setrlimit(resource.RLIMIT_DATA, (process.data_bytes() + (8 << 20), resource.RLIM_INFINITY))
try:
    torch.empty(0).expand(3_000_000, 0).unbind(0)  # no data, but 3 million tensor objects made in C++
except RuntimeError as error:
    family = oom_family(error)
print(family)
"""


def test_a_real_bad_alloc_is_recognised():
    done = subprocess.run([sys.executable, "-c", _BAD_ALLOC], capture_output=True, text=True, check=True)
    assert done.stdout == "bad-alloc\n"


@pytest.mark.parametrize("kind", ["cuda", "cuda.sub"])
def test_torchs_own_type_needs_no_text(kind):
    error_type = torch.OutOfMemoryError if kind == "cuda" else type("Sub", (torch.OutOfMemoryError,), {})
    assert oom_family(error_type("no words that are known")) == "cuda"
    assert oom_family(error_type("XPU out of memory. Tried to allocate 1.00 GiB")) == "xpu"


@pytest.mark.parametrize(
    ("error", "family"),
    [
        (OSError(errno.ENOMEM, "in any language"), "os"),
        (OSError(errno.ENOSPC, "No space left on device", "/dev/shm/torch_12_34_0"), "shared-memory"),
        (RuntimeError("unable to write to file </torch_1_2_0>: No space left on device (28)"), "shared-memory"),
        (RuntimeError("CUDA driver error: out of memory"), "cuda-driver"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "cublas"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "cudnn"),
        (RuntimeError("!handles_.at(i) INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp:421"), "cuda-driver"),
        (RuntimeError("HIP error: out of memory"), "hip"),
        (RuntimeError("std::bad_alloc"), "bad-alloc"),
        (MemoryError("std::bad_alloc"), "bad-alloc"),
        (type("PanicException", (BaseException,), {})("memory allocation of 4096 bytes failed"), "rust"),
        (type("PanicException", (BaseException,), {})("index out of bounds"), None),
        (RuntimeError("slurmstepd: error: Detected 1 oom_kill event in StepId=12.0"), "oom-killer"),
        (RuntimeError("Task was killed due to the node running low on memory."), "oom-killer"),
        (OSError(errno.ENOSPC, "No space left on device", "/home/user/model.bin"), None),
        (ValueError("CUDA out of memory"), None),
        (KeyError("out of memory"), None),
        (ImportError("libgomp.so: cannot allocate memory in static TLS block"), None),
        (ImportError("libparquet.so.2600: cannot map zero-fill pages"), "os"),
        (ImportError("libx.so: failed to map segment from shared object: Cannot allocate memory"), "os"),
        (ImportError("libx.so: failed to map segment from shared object"), None),  # as on a disk mounted noexec
        (OSError("libgomp.so.1: Cannot allocate memory in static TLS block"), None),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
        (RuntimeError("CUDA error: device-side assert triggered"), None),
        (RuntimeError("CUDA error: invalid device ordinal"), None),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), None),
        (RuntimeError("DataLoader worker (pid 5) is killed by signal: Segmentation fault. "), None),
        (
            RuntimeError(
                "unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)"
            ),
            None,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
    ],
    ids=lambda value: str(value)[:50],
)
def test_type_and_text_decide_together(error, family):
    assert oom_family(error) == family


def test_a_cause_counts_and_a_context_does_not():
    def raised(error, *, from_cause):
        try:
            try:
                raise MemoryError
            except MemoryError as memory_error:
                raise error from (memory_error if from_cause else None)
        except ValueError as outer:
            return outer

    assert oom_family(raised(ValueError("bad batch"), from_cause=True)) == "memory-error"
    followed = raised(ValueError("bad batch"), from_cause=False)
    assert followed.__context__ is not None
    assert oom_family(followed) is None


def test_a_chain_that_bites_its_tail_ends():
    error = RuntimeError("shapes differ")
    error.__cause__ = error
    assert oom_family(error) is None


def test_a_crashed_worker_is_not_taken_for_a_killed_one():
    error = RuntimeError("DataLoader worker (pid(s) 5) exited unexpectedly")
    assert oom_family(error) == "worker-killed"
    error.__cause__ = RuntimeError("DataLoader worker (pid 5) is killed by signal: Segmentation fault. ")
    assert oom_family(error) is None


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", "cublas"),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", "cudnn"),
        ("NCCL error in: ProcessGroupNCCL.cpp:47, unhandled cuda error (run with NCCL_DEBUG=INFO)", "nccl"),
        ("NCCL error in: ProcessGroupNCCL.cpp:47, internal error - please report this issue", "nccl"),
        ("CUDA driver error: device not ready", "cuda-driver"),
        ("could not create a primitive", "onednn"),
        ("can't start new thread", "os"),
        ("error return without exception set", "memory-error"),
    ],
)
def test_a_disguise_is_no_certain_error(text, family):
    assert disguised_family(RuntimeError(text)) == family
    assert disguised_family(ValueError(text)) is None
    assert oom_family(RuntimeError(text)) is None


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("Tried to allocate 20.00 MiB", 20 * 1024**2),
        ("Tried to allocate 3.00 GB on private pool", 3 * 1024**3),
        ("you tried to allocate 101187584 bytes", 101187584),
        ("Requested               : 384.00 KiB", 384 * 1024),
        ("Unable to allocate 1.00 EiB for an array with shape (1152921504606846976,)", 1 << 60),
        ("Tried to allocate 17179869184.00 GiB", None),
        ("Tried to allocate more than 1EB memory.", None),
        ("std::bad_alloc", None),
    ],
)
def test_the_size_asked_for_is_read(text, num_bytes):
    assert requested_bytes(text) == num_bytes


def test_nothing_here_needs_torch():
    code = (
        "import sys, plimsoll.device.oom_errors, plimsoll.device.process, plimsoll.device.cpu.cgroup;"
        "import plimsoll.device.cpu.backend;"
        "plimsoll.device.cpu.backend.CpuBackend().probe(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
