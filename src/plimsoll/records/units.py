"""Conversion of bytes and seconds from and to text. All sizes in input and output use these functions.

Bytes are ``int`` everywhere. Text shows them in binary units with one decimal ("3.4 GiB"). "GB" is decimal (10^9) and
"GiB" binary (2^30), as in IEC 80000-13. A number without a unit is in bytes. Units go up to PB and PiB, in upper or
lower case. Sizes go up to 2^63 - 1 bytes, the kernel's maximum.
"""

import re
from decimal import Decimal

from plimsoll.errors import InputError

_BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "pb": 10**15,
    **{name.lower(): size for name, size in _BINARY.items()},
}
_UNITS_SHOWN = "B, KiB, MiB, GiB, TiB, PiB, kB, MB, GB, TB or PB"
_MOST_BYTES = (1 << 63) - 1
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Parse a size such as ``"2GiB"``, ``"1.5 GB"``, ``"800MiB"`` or a number of bytes.

    Raises:
        InputError: if the text is not a size of 1 to 2^63 - 1 bytes, or has an unknown unit.
    """
    match = _SIZE.fullmatch(str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise InputError(
            f"cannot read {text!r} as a size in bytes: write a number and a unit ({_UNITS_SHOWN}), for example 2GiB or "
            "800MiB"
        )
    num_bytes = int(Decimal(match[1]) * _UNITS[match[2].lower()])
    if num_bytes <= 0:
        raise InputError(f"a size must be more than 0 bytes, got {text!r}: write for example 2GiB or 800MiB")
    if num_bytes > _MOST_BYTES:
        raise InputError(f"a size must be less than 8192 PiB, got {text!r}: write for example 2GiB or 800MiB")
    return num_bytes


def format_bytes(num_bytes: int | None) -> str:
    """Format a number of bytes: ``3_650_722_202`` becomes ``"3.4 GiB"``; ``None`` becomes ``"unknown"``."""
    if num_bytes is None:
        return "unknown"
    sign, size = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    for name, unit in reversed(_BINARY.items()):
        if size * 1024 >= unit * 1023.95:  # otherwise the smaller unit would round to "1024.0"
            return f"{sign}{size / unit:.1f} {name}"
    return f"{sign}{size} B"


def format_share(part: float, whole: float) -> str:
    """Format a share in percent with one decimal. ``"100.0%"`` and ``"0.0%"`` mean exactly all and nothing.

    Other shares that would round to these become ``"99.9%"`` and ``"0.1%"``.
    """
    if not whole or not 0 < part < whole:
        return f"{part / (whole or 1):.1%}"
    return f"{min(max(part / whole, 0.001), 0.999):.1%}"


def format_seconds(seconds: float | None) -> str:
    """Format a duration: ``"850 ms"``, ``"12.3 s"``, ``"4 min 05 s"``, ``"3 h 07 min"``; ``None`` is ``"unknown"``."""
    if seconds is None:
        return "unknown"
    if round(seconds * 1000) < 1000:
        return f"{seconds * 1000:.0f} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
