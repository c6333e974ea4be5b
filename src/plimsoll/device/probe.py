"""Every device of this machine and the versions of what drives them."""

from __future__ import annotations

import platform

from plimsoll.device import nvml
from plimsoll.device.base import Backend, backend_for
from plimsoll.records.device import Machine


def probe_machine() -> Machine:
    """Describe the CPU and every CUDA device that this process can see."""
    import torch

    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    backends: list[Backend] = [backend_for(name) for name in names]
    return Machine(devices=tuple(backend.probe() for backend in backends), versions=_versions())


def _versions() -> dict[str, str]:
    import torch

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": nvml.driver_version(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
    }
    return {name: version for name, version in found.items() if version}
