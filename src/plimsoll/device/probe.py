"""Facts about all devices of this machine, and the versions of the software that uses them."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from plimsoll.device.base import Backend, backend_for
from plimsoll.device.cuda import nvml
from plimsoll.records.device import Machine


def probe_machine() -> Machine:
    """Describe the CPU and every CUDA device that this process can see."""
    import torch

    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    backends: list[Backend] = [backend_for(name) for name in names]
    return Machine(devices=tuple(backend.probe() for backend in backends), versions=versions())


def versions() -> dict[str, str]:
    """Return the versions of software that affects memory use, without packages that are not installed."""
    import torch

    found: dict[str, str | None] = {
        "plimsoll": _installed("torch-plimsoll"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _installed("transformers"),
        "cuda": torch.version.cuda,
        "driver": nvml.driver_version(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
    }
    return {name: version for name, version in found.items() if version}


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
