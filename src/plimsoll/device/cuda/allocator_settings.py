"""Settings of torch's CUDA allocator, changed in a running process unless there is a reason against it.

Segments that can grow in place (``expandable_segments``) leave no gaps between segments. Gaps are the main cause of
fragmentation. Settings are changed by ``torch._C._accelerator_setAllocatorSettings`` (torch 2.9 or newer) or by
``torch.cuda.memory._set_allocator_settings``. Only memory reserved later uses the new setting.

Does NOT affect other processes or ``cudaMallocAsync``. `clash` needs no torch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables with the user's allocator settings, in torch's order: only the first that is set counts."""

GROWING = "expandable_segments"
_LEAKS = "with expandable segments it leaks: 14,060 MiB reserved for 266 allocated after 100 cycles (pytorch#193400)"


def text_of(environment: Mapping[str, str]) -> str:
    """Return the user's allocator settings from the environment, without spaces; "" if no variable is set."""
    text = next((environment[name] for name in VARIABLES if name in environment), "")
    return re.sub(r"\s", "", text)


def clash(environment: Mapping[str, str] = os.environ, platform: str = sys.platform) -> str | None:
    """Return the reason why segments cannot be made expandable in this process; ``None`` if they can.

    Settings of the user always win.
    """
    text = text_of(environment)
    if f"{GROWING}:" in text:
        return f"the environment sets {text} already"
    if "max_split_size_mb:" in text:
        return f"the environment sets {text}, and {_LEAKS}"
    if "backend:" in text and "backend:native" not in text:
        return f"the environment sets {text}, which is another allocator"
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in environment:
        return "PYTORCH_NO_CUDA_MEMORY_CACHING is set, so there are no segments"
    if not platform.startswith("linux"):
        return f"torch has no expandable segments on {platform}"
    return None


def set_up(settings: str) -> None:
    """Apply allocator settings, such as ``expandable_segments:True``, to this process."""
    import torch

    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if setter is None:
        setter = torch.cuda.memory._set_allocator_settings
    setter(settings)
