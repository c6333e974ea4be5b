"""Control over state that oneDNN retains: cached kernels (`keep_few_kernels`) and an error flag (`clear_error`).

Not covered: systems other than Linux on x86-64, and libraries without a symbol table, for which nothing is done. The
error flag is cleared only in the calling thread. Sources: elf(5), dl_iterate_phdr(3).
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

# oneDNN compiles a kernel for each new shape and caches 1,024 of them, and so does torch's layer above it. See
# https://uxlfoundation.github.io/oneDNN/dev_guide_primitive_cache.html for details. In bfloat16, the kernels of an LSTM
# for 64 text lengths take 50 MiB of private memory and 776 MiB of addresses. GPT-2, with over 400 shapes, takes 600 MiB
# of memory. 32 kernels are more than a step of one shape needs. If every step has another shape, a cache of 32 costs no
# measurable time (docs/LOG.md, 2026-11-23).
_KEPT = "32"
_CAPACITY, _OLD_CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"
_CAPACITY_ABOVE = "LRU_CACHE_CAPACITY"  # for ideep, torch's layer above oneDNN

# Xbyak, the assembler of oneDNN, stores an error in this thread-local variable and never clears it
# (https://github.com/uxlfoundation/oneDNN/pull/5907, fixed in August 2026; torch 2.13 has the bug). After one failed
# allocation of a code buffer, every new shape fails with "could not create a primitive", however much memory is free.
# Smaller micro-batches would fail as well. There is no API to clear it, only a symbol.
_SYMBOL = b"_ZZN5Xbyak5local11GetErrorRefEvE3err\0"  # Xbyak::local::GetErrorRef()::err, a thread-local int
_SYMBOL_TABLE, _THREAD_LOCAL = 2, 6  # SHT_SYMTAB, STT_TLS
_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, alignment, entry size
_BLOCK_BYTES = 1 << 20
_ENTRY = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size


class _Module(ctypes.Structure):
    # dl_phdr_info: the loader's view of a library in this thread
    _fields_ = (
        ("address", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("headers", ctypes.c_void_p),
        ("num_headers", ctypes.c_uint16),
        ("num_added", ctypes.c_ulonglong),
        ("num_removed", ctypes.c_ulonglong),
        ("thread_local_id", ctypes.c_size_t),
        ("thread_local_data", ctypes.c_void_p),
    )


_SEEN: dict[bytes, int] = {}  # address of each library's thread-local data in this thread


def _note_library(module: ctypes._Pointer[_Module], _num_bytes: int, _data: int | None) -> int:
    if module.contents.name and module.contents.thread_local_data:
        _SEEN[module.contents.name] = module.contents.thread_local_data
    return 0


# Created at import, while memory is available: a C callback needs a page of its own.
_VISIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Module), ctypes.c_size_t, ctypes.c_void_p)(_note_library)


def keep_few_kernels() -> None:
    """Limit the number of kernels that oneDNN caches, unless the user's environment sets a limit.

    oneDNN reads the environment once, when it is first used. Later calls only affect processes that this one starts.
    The environment variables that this function sets stay set, because the effect cannot be undone.
    """
    if _OLD_CAPACITY not in os.environ:
        os.environ.setdefault(_CAPACITY, _KEPT)
    os.environ.setdefault(_CAPACITY_ABOVE, _KEPT)


def prepare_for(model: nn.Module) -> None:
    """Compile the kernels that oneDNN shares between all LSTMs, if a model has an LSTM in float32 on the CPU.

    If memory ran out while they are compiled later, all further LSTMs of the process could fail.
    """
    from torch import nn

    layers = (module for module in model.modules() if isinstance(module, nn.LSTM))
    if any(_is_real(weight) for layer in layers for weight in layer.parameters()):
        _compile_products()


def _is_real(weight: Tensor) -> bool:
    from torch import float32
    from torch._subclasses.fake_tensor import FakeTensor

    return weight.dtype == float32 and weight.is_cpu and not isinstance(weight, FakeTensor)


@functools.cache
def _compile_products() -> None:
    """Compile oneDNN's matrix products, by running a small LSTM forward and backward.

    This draws no random numbers.
    """
    import torch

    # oneDNN's float32 matrix product compiles its kernels only in its first call (``std::call_once`` in
    # ``src/cpu/x64/gemm/gemm_info.cpp``). If that call runs out of memory, later LSTMs of the process fail with "could
    # not execute a primitive" or compute different results, or the process dies. The call takes 4 MiB, as would the
    # first step of an LSTM.
    keep_few_kernels()
    size, num_gates = 8, 4  # a size of 1 would multiply vectors, which compiles fewer kernels
    with torch.inference_mode(False), torch.enable_grad():
        shapes = (num_gates * size, size), (num_gates * size, size), (num_gates * size,), (num_gates * size,)
        weights = [torch.zeros(shape, requires_grad=True) for shape in shapes]
        state = torch.zeros(1, 1, size), torch.zeros(1, 1, size)
        outputs = torch.lstm(torch.zeros(1, 4, size), state, weights, True, 1, 0.0, True, False, True)
        outputs[0].sum().backward()  # type: ignore[no-untyped-call]


def clear_error() -> bool:
    """Clear oneDNN's error flag in this thread, so that it can compile kernels again; return whether it was set."""
    error = _noted_error()
    if error is None or error.value == 0:
        return False
    error.value = 0
    return True


def _noted_error() -> ctypes.c_int | None:
    """Return oneDNN's error variable of this thread.

    ``None`` if the variable cannot be found, or the thread does not use it yet.
    """
    library = _library()
    offset = None if library is None else _offset_in_thread(library)
    if library is None or offset is None:
        return None
    _SEEN.clear()
    ctypes.CDLL(None).dl_iterate_phdr(_VISIT, None)
    data = _SEEN.get(str(library).encode())
    return ctypes.c_int.from_address(data + offset) if data else None


def _library() -> Path | None:
    """Return the path under which torch's library with oneDNN was loaded; ``None`` if torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None or torch.__file__ is None:
        return None
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return library if library.exists() else None


@functools.cache
def _offset_in_thread(library: Path) -> int | None:
    """Return the offset in bytes of Xbyak's error variable (`_SYMBOL`) in the library's thread-local data.

    ``None`` if the variable is not found.
    """
    try:
        with library.open("rb") as file:
            return _value_of(_SYMBOL, file.fileno())
    except OSError:
        return None


def _value_of(symbol: bytes, file: int) -> int | None:
    """Return the value of the symbol of a thread-local ``int``, which is its offset; ``None`` if it is not found.

    Args:
        symbol: name of the variable.
        file: descriptor of a 64-bit little-endian ELF library.
    """
    header = os.pread(file, 64, 0)
    if header[:6] != b"\x7fELF\x02\x01":
        return None
    (table_start,), (num_sections,) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<H", header, 60)
    sections = [*_SECTION.iter_unpack(os.pread(file, num_sections * _SECTION.size, table_start))]
    for _, kind, _, _, start, num_bytes, link, _, _, _ in sections:
        if kind == _SYMBOL_TABLE:
            names_start, names_bytes = sections[link][4:6]
            name = next(_places_of(symbol, file, names_start, names_bytes), None)
            places = () if name is None else _places_of(struct.pack("<I", name), file, start, num_bytes)
            for place in places:
                _, info, _, _, value, size_bytes = _ENTRY.unpack(os.pread(file, _ENTRY.size, start + place))
                is_entry = place % _ENTRY.size == 0 and size_bytes == ctypes.sizeof(ctypes.c_int)
                if is_entry and info & 15 == _THREAD_LOCAL:
                    return int(value)
    return None


def _places_of(wanted: bytes, file: int, start: int, num_bytes: int) -> Iterator[int]:
    """Yield the offsets of a byte string in a part of a file, relative to its start.

    The file is read in blocks, because pages of a mapping would count toward this process's peak.
    """
    for offset in range(0, num_bytes, _BLOCK_BYTES):
        block = os.pread(file, min(_BLOCK_BYTES + len(wanted) - 1, num_bytes - offset), start + offset)
        place = block.find(wanted)
        while place >= 0:
            yield offset + place
            place = block.find(wanted, place + 1)
