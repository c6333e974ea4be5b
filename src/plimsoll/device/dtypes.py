"""Floating-point types of weights, by their usual names, such as ``bf16``, ``bfloat16`` or ``torch.bfloat16``.

Does NOT cover integer types, types of quantized weights, or the type in which training computes (``precision``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from plimsoll.errors import InputError

NAMED: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
"""Types by short name. `floating_type` also accepts torch's names, such as ``bfloat16``."""


def floating_type(given: torch.dtype | str, kind: type[InputError] = InputError) -> torch.dtype:
    """Return the floating-point type with a given name.

    Args:
        given: a type or its name, such as ``torch.bfloat16``, ``"bfloat16"`` or ``"bf16"``.
        kind: the class of the error to raise if ``given`` is not a floating-point type.

    Raises:
        InputError: an error of class ``kind``, if ``given`` is not a floating-point type.
    """
    known = {**NAMED, **{str(dtype).removeprefix("torch."): dtype for dtype in NAMED.values()}}
    found = known.get(given.removeprefix("torch."), given) if isinstance(given, str) else given
    if isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    raise kind(
        f"dtype {given!r} is not a floating-point type: give {', '.join(NAMED)}, or a torch type such as torch.bfloat16"
    )
