"""The facts that determine a prediction or plan besides the job: software, machine and environment.

Results that were computed with the same facts can be reused. The facts include:

- the content of Plimsoll's sources and of packages that ship techniques;
- name, version and installation time of every installed distribution, and Python itself;
- the processor, its memory and limits, the kernel, libc, and the environment variables that torch, its libraries
  and the allocators read.

Does NOT notice in-place edits of other installed libraries, including editable installs. Needs no torch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from plimsoll import errors
from plimsoll.device.base import backend_for

_READ_BY_LIBRARIES = (
    "ATEN_", "CUBLAS", "CUDA_", "CUDNN", "DNNL_", "GLIBC_TUNABLES", "GLOO_", "GOMP_", "HIP_", "HSA_", "KMP_", "LD_",
    "MALLOC_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "NUMPY_", "PYTHON", "PYTORCH_", "ROC",
    "TORCH_", "TORCHDYNAMO_", "TOKENIZERS_", "TRANSFORMERS_", "USE_",
)  # fmt: skip
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/nvhost-ctrl", "/dev/nvmap")
"""Device files of GPU drivers: NVIDIA, WSL, AMD, and NVIDIA Jetson boards (the last two)."""


def may_have_gpu() -> bool:
    """Return whether a GPU driver is present. Without a driver, torch cannot find a GPU."""
    return any(map(os.path.exists, _DRIVERS))


def surroundings() -> dict[str, str | int | None]:
    """Return the facts about this installation and machine that determine a prediction or plan, by name."""
    cpu = backend_for("cpu").probe()
    return {
        "plimsoll": _sources(),
        "techniques of others": _sources_of_others(tuple(sys.path)),
        "installed": _distributions(tuple(sys.path)),
        "python": sys.version,
        "processor": f"{cpu.name}, {cpu.architecture}, flags {_processor_flags()}",
        "cores": cpu.num_cores,
        "memory": cpu.hardware_bytes,
        "usable memory": cpu.capacity_bytes,
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "huge pages": _huge_pages(),
        "environment": _digest(f"{name}={os.environ[name]}" for name in sorted(os.environ) if _is_read(name)),
    }


def _is_read(name: str) -> bool:
    return name.startswith(_READ_BY_LIBRARIES)


@cache
def _sources() -> str:
    """Return a digest of every file of Plimsoll that can affect its behaviour."""
    root = Path(errors.__file__).parent
    return _content_of(root, (path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"))


@cache
def _sources_of_others(folders: tuple[str, ...]) -> str:
    """Return a digest of all modules of other packages that ship techniques.

    All modules are included, because a technique may import any of them.
    """
    entries = entry_points(group="plimsoll.techniques")
    return _digest(map(_content_of_package, sorted({entry.value.partition(":")[0].split(".")[0] for entry in entries})))


def _content_of_package(name: str) -> str:
    try:
        spec = find_spec(name)  # a top-level package is found without an import
    except (ImportError, ValueError):
        spec = None
    if spec is None:  # the error is reported when the technique is loaded
        return name
    if spec.submodule_search_locations is None:
        file = Path(spec.origin or "")
        return _content_of(file.parent, filter(Path.is_file, [file]))
    roots = map(Path, spec.submodule_search_locations)
    return _digest(_content_of(root, root.rglob("*.py")) for root in roots)


def _content_of(root: Path, paths: Iterable[Path]) -> str:
    return _digest(part for path in sorted(paths) for part in (str(path.relative_to(root)), path.read_bytes()))


@cache
def _distributions(folders: tuple[str, ...]) -> str:
    found = []
    for folder in filter(os.path.isdir, folders):
        with os.scandir(folder) as entries:
            infos = (entry for entry in entries if entry.name.endswith((".dist-info", ".egg-info", ".egg-link")))
            found += [f"{entry.name} {entry.stat().st_mtime_ns}" for entry in infos]
    return _digest(sorted(found))


def _huge_pages() -> str:
    """Return the kernel's setting for transparent huge pages, which increase memory use."""
    try:
        return _HUGE_PAGES.read_text("utf-8").strip()
    except OSError:
        return "unknown"


@cache
def _processor_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return "unknown"
    return _digest([next((line for line in lines if line.startswith(("flags", "Features"))), "")])


def _digest(parts: Iterable[str | bytes]) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else part.encode()
        hasher.update(len(content).to_bytes(8, "little") + content)
    return hasher.hexdigest()
