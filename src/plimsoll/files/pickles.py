"""Safe reader for pickles: it imports, calls and constructs nothing that a file names.

It reads protocols 2 to 5 (0 and 1 are text) as written by Python and by torch's C++ pickler. Time and memory are
bounded by the length of the file: it allocates no memory for a declared length before it has read the bytes, and does
not recurse. A file of empty containers takes about 100 times its length in memory, as these containers do in Python.
Not handled: persistent objects, registered extensions and out-of-band buffers.

Source: https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import mmap
import pickle
import pickletools
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from io import BytesIO
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

_CHUNK_BYTES = 1 << 20
_MARGIN_BYTES = 320  # the longest operation that `run` handles itself is a string of 255 bytes
_MOST_BYTES_OF_NUMBER = 16
_MOST_BYTES_OF_STRING = 16 << 20
_LARGE_BYTES = 64 << 10

_CONSTANTS = {pickle.NONE[0]: None, pickle.NEWTRUE[0]: True, pickle.NEWFALSE[0]: False, pickle.EMPTY_TUPLE[0]: ()}
_TUPLES = {pickle.TUPLE1[0]: 1, pickle.TUPLE2[0]: 2, pickle.TUPLE3[0]: 3}
# The number of bytes that encode the length.
_TEXTS = {pickle.SHORT_BINUNICODE[0]: 1, pickle.BINUNICODE[0]: 4, pickle.BINUNICODE8[0]: 8}
_BYTES = {pickle.SHORT_BINBYTES[0]: 1, pickle.BINBYTES[0]: 4, pickle.BINBYTES8[0]: 8}
_STRINGS = {
    pickle.SHORT_BINSTRING[0]: 1,
    pickle.BINSTRING[0]: 4,
    pickle.BYTEARRAY8[0]: 8,
}  # strings of Python 2, and byte arrays

# Local names for the opcodes of `run`: an attribute lookup takes as long as an operation.
_MEMOIZE, _MARK, _STOP = pickle.MEMOIZE[0], pickle.MARK[0], pickle.STOP[0]
_BINGET, _LONG_BINGET, _LONG_BINPUT = pickle.BINGET[0], pickle.LONG_BINGET[0], pickle.LONG_BINPUT[0]
_SHORT_TEXT, _TEXT = pickle.SHORT_BINUNICODE[0], pickle.BINUNICODE[0]
_EMPTY_DICT, _EMPTY_LIST = pickle.EMPTY_DICT[0], pickle.EMPTY_LIST[0]
_SETITEMS, _APPENDS = pickle.SETITEMS[0], pickle.APPENDS[0]
_BININT, _BININT1, _BININT2, _LONG1 = pickle.BININT[0], pickle.BININT1[0], pickle.BININT2[0], pickle.LONG1[0]
_NAMES = {operation.code: operation.name for operation in pickletools.opcodes}

_Operations = dict[int, Callable[[int], None]]


class BrokenPickle(Exception):
    """A pickle cannot be read. The message starts with a verb. ``is_torn``: the file may be cut off."""

    def __init__(self, what: str, is_torn: bool = False) -> None:
        super().__init__(what)
        self.is_torn = is_torn


class Sealed:
    """A replacement for a container. Items that are added to it later are discarded."""

    __slots__ = ()


class Sealing(Protocol):
    """Callbacks that may replace a container, to save memory, after items were added to it.

    A callback that returns the container itself keeps it.
    """

    def of_dict(self, container: dict[str, Any]) -> Any:
        """Return the replacement for a dict."""

    def of_list(self, container: list[Any]) -> Any:
        """Return the replacement for a list."""


class Span(NamedTuple):
    """A range of bytes in a file."""

    begin: int
    end: int


@dataclass(slots=True, eq=False, repr=False)
class Thing:
    """A stand-in for a class or function that a pickle names, or for the result of a call of it.

    ``args`` are the arguments of the call; ``None``: the class or function itself, not called.
    ``state`` is the argument with which the pickle would call ``__setstate__`` of the result, or ``None``.
    """

    name: bytes
    args: Any = None
    state: Any = None


def load_plain(file: BinaryIO, sealing: Sealing) -> Any:
    """Read a pickle of plain data: dicts with string keys, lists, tuples, numbers, strings and bytes.

    Args:
        file: a binary file, which need not be seekable.
        sealing: callbacks that may replace containers to save memory.

    Raises:
        BrokenPickle: if the file is damaged, or contains any other operation.
    """
    return _Plain(file, sealing).run()


def described(raw: bytes | mmap.mmap, keys: Collection[bytes]) -> Any:
    """Return the content of a pickle without constructing objects: classes, instances and calls become `Thing`.

    Strings are returned as UTF-8 bytes, and large byte strings as positions in the file (`Span`).

    Args:
        raw: the bytes, or a memory map of the file.
        keys: the dictionary keys to read. All others are skipped, so that a vocabulary does not fill the memory.

    Raises:
        BrokenPickle: if the bytes are not a complete pickle of protocol 2 to 5.
    """
    return _Description(raw, keys).run()


class _Machine(ABC):
    """Interpreter of pickle operations, with their stack and memo.

    An ``IndexError`` means that an operation lacks an operand: a byte, an object, a mark or a container.
    """

    decodes_texts = True
    sealable: tuple[type, ...] = ()

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._num_read = 0
        self._data, self._at = b"", 0  # the last chunk, and the position in it
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._slots: dict[int, int] = {}  # id of a container that may be sealed -> its index in the memo
        self._operations: _Operations = {
            pickle.PROTO[0]: lambda _: self._protocol(),
            pickle.FRAME[0]: lambda _: self._skip(8),
            pickle.BINPUT[0]: lambda _: self._put(self._length(1)),
            pickle.TUPLE[0]: lambda _: self._stack.append(tuple(self._above_mark())),
            pickle.BINFLOAT[0]: lambda _: self._stack.extend(struct.unpack(">d", self._take(8))),
            pickle.SETITEM[0]: lambda _: self._set_items(self._popped(2)),
            pickle.APPEND[0]: lambda _: self._append(self._popped(1)),
            **dict.fromkeys(_CONSTANTS, lambda code: self._stack.append(_CONSTANTS[code])),
            **dict.fromkeys(_TUPLES, lambda code: self._stack.append(tuple(self._popped(_TUPLES[code])))),
            **dict.fromkeys(_TEXTS, lambda code: self._string(self._length(_TEXTS[code]), is_text=True)),
            **dict.fromkeys(_BYTES, lambda code: self._string(self._length(_BYTES[code]), is_text=False)),
        }

    @property
    def place(self) -> int:
        """Position in the file, in bytes. `run` updates it only before operations that it does not handle itself."""
        return self._num_read - len(self._data) + self._at

    def run(self) -> Any:
        """Run all operations and return the object."""
        try:
            return self._run()
        except (IndexError, TypeError, ValueError) as error:
            raise BrokenPickle(f"is torn or damaged within its first {self._num_read:,} bytes", is_torn=True) from error

    # long: a branch for each frequent operation
    def _run(self) -> Any:  # noqa: PLR0912, PLR0915
        stack, memo, decodes, sealable = self._stack, self._memo, self.decodes_texts, self.sealable
        data, at, safe = b"", 0, -1
        while True:
            if at > safe:
                data, at = self._more(data, at)
                safe = len(data) - (_MARGIN_BYTES if len(data) > _MARGIN_BYTES else 1)
            code = data[at]
            at += 1
            if code == _SHORT_TEXT:
                begin = at + 1
                at = begin + data[at]
                stack.append(data[begin:at].decode(errors="replace") if decodes else data[begin:at])
            elif code == _MEMOIZE:
                if type(stack[-1]) in sealable:
                    self._slots[id(stack[-1])] = len(memo)
                memo.append(stack[-1])
            elif code == _BINGET:
                stack.append(memo[data[at]])
                at += 1
            elif code == _LONG_BINGET:
                stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif code == _BININT1:
                stack.append(data[at])
                at += 1
            elif code == _LONG1 and data[at] <= _MOST_BYTES_OF_NUMBER:
                stack.append(int.from_bytes(data[at + 1 : at + 1 + data[at]], "little", signed=True))
                at += 1 + data[at]
            elif code == _BININT2:
                stack.append(int.from_bytes(data[at : at + 2], "little"))
                at += 2
            elif code == _BININT:
                stack.append(int.from_bytes(data[at : at + 4], "little", signed=True))
                at += 4
            elif code == _TEXT and data[at + 1 : at + 4] == b"\0\0\0":
                begin = at + 4
                at = begin + data[at]
                stack.append(data[begin:at].decode(errors="replace") if decodes else data[begin:at])
            elif code == _LONG_BINPUT:
                self._put(int.from_bytes(data[at : at + 4], "little"))
                at += 4
            elif code == _MARK:
                self._marks.append(len(stack))
            elif code == _EMPTY_DICT:
                stack.append({})
            elif code == _EMPTY_LIST:
                stack.append([])
            elif code == _SETITEMS:
                self._set_items(self._above_mark())
            elif code == _APPENDS:
                self._append(self._above_mark())
            else:
                self._data, self._at = data, at
                if code == _STOP:
                    return self._result()
                if code not in self._operations:
                    operation = _NAMES.get(chr(code), f"byte {code:#04x}")
                    raise BrokenPickle(f"has the operation {operation}, which is not supported because it may run code")
                self._operations[code](code)
                data, at = self._data, self._at

    def _more(self, data: bytes, at: int) -> tuple[bytes, int]:
        """Return the unread bytes with the next chunk: enough for one operation, or the rest of the file."""
        if at > len(data):
            raise IndexError
        rest = data[at:]
        while len(rest) <= _MARGIN_BYTES and (piece := self._file.read(_CHUNK_BYTES)):
            self._num_read += len(piece)
            rest += piece
        return rest, 0

    def _take(self, num_bytes: int) -> bytes:
        taken = self._data[self._at : self._at + num_bytes]
        self._at += len(taken)
        if len(taken) < num_bytes:
            piece = self._file.read(num_bytes - len(taken))
            self._num_read += len(piece)
            taken += piece
        if len(taken) < num_bytes:
            raise IndexError
        return taken

    def _length(self, width: int) -> int:
        return int.from_bytes(self._take(width), "little")

    def _protocol(self) -> None:
        if not 2 <= (number := self._take(1)[0]) <= 5:
            raise BrokenPickle(f"uses protocol {number}, but only 2 to 5 are supported")

    def _skip(self, num_bytes: int) -> None:
        self._take(num_bytes)

    def _popped(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise IndexError
        items = self._stack[-count:]
        del self._stack[-count:]
        return items

    def _above_mark(self) -> list[Any]:
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    def _put(self, index: int) -> None:
        if index > self._num_read:  # each index before it has taken at least a byte
            raise IndexError
        top = self._stack[-1]
        if type(top) in self.sealable:
            self._slots[id(top)] = index
        self._memo += [None] * (index + 1 - len(self._memo))
        self._memo[index] = top

    @abstractmethod
    def _string(self, length: int, is_text: bool) -> None:
        """Push a string of ``length`` bytes from the file onto the stack."""

    @abstractmethod
    def _set_items(self, items: list[Any]) -> None:
        """Add alternating keys and values to the dictionary on top of the stack."""

    @abstractmethod
    def _append(self, items: list[Any]) -> None:
        """Append items to the list on top of the stack."""

    def _result(self) -> Any:
        if self._at > len(self._data) or len(self._stack) != 1 or self._marks:
            raise IndexError
        return self._stack[0]


class _Plain(_Machine):
    """The interpreter of `load_plain`."""

    sealable = (dict, list)

    def __init__(self, file: BinaryIO, sealing: Sealing) -> None:
        super().__init__(file)
        self._sealing = sealing

    def _string(self, length: int, is_text: bool) -> None:
        if length > _MOST_BYTES_OF_STRING:
            raise BrokenPickle(
                f"declares a string of {length:,} bytes; at most {_MOST_BYTES_OF_STRING:,} are supported"
            )
        content = self._take(length)
        self._stack.append(content.decode(errors="replace") if is_text else content)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        keys = items[::2]
        if len(items) % 2 or not set(map(type, keys)) <= {str}:  # other keys may be slow to hash
            raise IndexError
        if type(target) is dict:
            target.update(zip(keys, items[1::2], strict=True))
            self._replace(target, self._sealing.of_dict(target))
        elif not isinstance(target, Sealed):
            raise IndexError

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is list:
            target += items
            self._replace(target, self._sealing.of_list(target))
        elif not isinstance(target, Sealed):
            raise IndexError

    def _replace(self, container: Any, by: Any) -> None:
        if by is not container:
            self._stack[-1] = by
            slot = self._slots.pop(id(container), None)
            if slot is not None:
                self._memo[slot] = by


class _Description(_Machine):
    """The interpreter of `described`."""

    decodes_texts = False

    def __init__(self, raw: bytes | mmap.mmap, keys: Collection[bytes]) -> None:
        super().__init__(cast(BinaryIO, raw if isinstance(raw, mmap.mmap) else BytesIO(raw)))
        self._file.seek(0)
        self._num_bytes, self._keys = len(raw), keys
        self._operations |= {
            pickle.POP[0]: lambda _: self._drop(),
            pickle.POP_MARK[0]: lambda _: self._stack.extend(self._above_mark()[:0]),
            pickle.DUP[0]: lambda _: self._stack.append(self._stack[-1]),
            pickle.INT[0]: lambda _: self._stack.append(int(self._line()[:20])),
            pickle.LONG1[0]: lambda _: self._number(self._length(1)),
            pickle.LONG4[0]: lambda _: self._number(self._length(4)),
            pickle.EMPTY_SET[0]: lambda _: self._stack.append([]),
            pickle.ADDITEMS[0]: lambda _: self._append(self._above_mark()),
            pickle.LIST[0]: lambda _: self._stack.append(self._above_mark()),
            pickle.FROZENSET[0]: lambda _: self._stack.append(self._above_mark()),
            pickle.DICT[0]: lambda _: self._new_dictionary(),
            pickle.GLOBAL[0]: lambda _: self._stack.append(Thing(self._line() + b"." + self._line())),
            pickle.STACK_GLOBAL[0]: lambda _: self._stack.append(Thing(b".".join(self._popped(2)))),
            pickle.REDUCE[0]: lambda _: self._call(*self._popped(2)),
            pickle.NEWOBJ[0]: lambda _: self._call(*self._popped(2)),
            pickle.NEWOBJ_EX[0]: lambda _: self._call(*self._popped(3)),
            pickle.BUILD[0]: lambda _: self._build(*self._popped(1)),
            **dict.fromkeys(_STRINGS, lambda code: self._string(self._length(_STRINGS[code]), is_text=False)),
        }

    def _string(self, length: int, is_text: bool) -> None:
        if length <= _LARGE_BYTES:
            self._stack.append(self._take(length))
        else:
            begin = self.place
            self._skip(length)
            self._stack.append(Span(begin, begin + length))

    def _skip(self, num_bytes: int) -> None:
        end = self.place + num_bytes
        if end > self._num_bytes:
            raise IndexError
        if end > self._num_read:
            self._file.seek(end)
            self._num_read, self._data = end, b""
        self._at = len(self._data) - (self._num_read - end)

    def _line(self) -> bytes:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            piece = self._file.read(_CHUNK_BYTES)
            self._num_read += len(piece)
            self._data, self._at = self._data[self._at :] + piece, 0
            end = self._data.find(b"\n")
        if end < 0:
            raise IndexError
        begin, self._at = self._at, end + 1
        return self._data[begin:end]

    def _number(self, num_bytes: int) -> None:
        raw = self._take(min(num_bytes, _MOST_BYTES_OF_NUMBER))
        self._skip(num_bytes - len(raw))
        self._stack.append(int.from_bytes(raw, "little", signed=True))

    def _drop(self) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._stack.pop()

    def _append(self, items: list[Any]) -> None:
        if isinstance(self._stack[-1], list):  # a class would add them itself; its items are skipped
            self._stack[-1].extend(items)

    def _set_items(self, items: list[Any]) -> None:
        if isinstance(self._stack[-1], dict):
            for key, value in zip(items[::2], items[1::2], strict=True):
                if isinstance(key, bytes) and key in self._keys:
                    self._stack[-1][key] = value

    def _new_dictionary(self) -> None:
        items = self._above_mark()
        self._stack.append({})
        self._set_items(items)

    def _call(self, function: Any, args: Any, _keywords: Any = None) -> None:
        self._stack.append(Thing(function.name if isinstance(function, Thing) else b"", args))

    def _build(self, state: Any) -> None:
        if isinstance(self._stack[-1], Thing):
            self._stack[-1].state = state
