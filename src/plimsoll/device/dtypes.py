"""The floating-point types of weights, by the names that people give them: ``bf16``, ``bfloat16``, ``torch.bfloat16``.

Does NOT cover integers and the types of quantized weights, and not what a training computes in (``precision``).
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
"""By their short names; torch's own names, such as ``bfloat16``, are understood as well."""


def floating_type(given: torch.dtype | str, kind: type[InputError] = InputError) -> torch.dtype:
    """Return a floating-point type that was given as such, or by its name.

    Args:
        given: such as ``torch.bfloat16``, ``"bfloat16"`` or ``"bf16"``.
        kind: of the error.

    Raises:
        InputError: of that kind, if it is none.
    """
    known = {**NAMED, **{str(dtype).removeprefix("torch."): dtype for dtype in NAMED.values()}}
    found = known.get(given.removeprefix("torch."), given) if isinstance(given, str) else given
    if isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    raise kind(
        f"dtype {given!r} is no floating-point type: give {', '.join(NAMED)}, or torch's own, such as torch.bfloat16"
    )
