"""A pickle of plain data, read as a stream; nothing in it is imported, called or built.

Known are the operations that dicts with names as keys, lists, tuples, numbers, strings, bytes, ``True``, ``False`` and
``None`` are written with: by Python's pickler with the protocols 2 to 5, and by torch's own in C++. Any other operation
is refused before anything is done, so that a hostile file runs no code. Time and memory are bounded by its length:
a number has up to 16 bytes, a string up to 16 MiB, what it names to be used again must be there, a key is a string (so
none is hashed for long), and nothing here goes down into what is nested. A file of nothing but empty containers takes
about 100 times its length, as they do in Python.

`Sealing` makes it small: a container that is complete may be replaced, wherever it is used again, by something that
takes less memory. Does NOT read the protocols 0 and 1, which are text, nor objects of any class.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from typing import Any, BinaryIO, NoReturn, Protocol

from plimsoll.errors import InputError

_CHUNK_BYTES = 1 << 20
_MARGIN_BYTES = 64  # the longest operation with a number in it has 18
_MOST_BYTES_OF_NUMBER = 16
_MOST_BYTES_OF_STRING = 16 << 20

_CONSTANTS = {pickle.NONE[0]: None, pickle.NEWTRUE[0]: True, pickle.NEWFALSE[0]: False, pickle.EMPTY_TUPLE[0]: ()}
_TUPLES = {pickle.TUPLE1[0]: 1, pickle.TUPLE2[0]: 2, pickle.TUPLE3[0]: 3}
# What is so many bytes that say how many bytes follow, which are a text or not.
_STRINGS = {
    pickle.SHORT_BINUNICODE[0]: (1, True),
    pickle.BINUNICODE[0]: (4, True),
    pickle.BINUNICODE8[0]: (8, True),
    pickle.SHORT_BINBYTES[0]: (1, False),
    pickle.BINBYTES[0]: (4, False),
    pickle.BINBYTES8[0]: (8, False),
}
_PUTS = {pickle.BINPUT[0]: 1, pickle.LONG_BINPUT[0]: 4}

_MEMOIZE, _MARK, _STOP = pickle.MEMOIZE[0], pickle.MARK[0], pickle.STOP[0]
_BINGET, _LONG_BINGET = pickle.BINGET[0], pickle.LONG_BINGET[0]
_EMPTY_DICT, _EMPTY_LIST, _TUPLE = pickle.EMPTY_DICT[0], pickle.EMPTY_LIST[0], pickle.TUPLE[0]
_SETITEM, _SETITEMS, _APPEND, _APPENDS = pickle.SETITEM[0], pickle.SETITEMS[0], pickle.APPEND[0], pickle.APPENDS[0]
_BININT, _BININT1, _BININT2 = pickle.BININT[0], pickle.BININT1[0], pickle.BININT2[0]
_LONG1, _BINFLOAT = pickle.LONG1[0], pickle.BINFLOAT[0]
_PROTO, _FRAME = pickle.PROTO[0], pickle.FRAME[0]
_NAMES = {operation.code: operation.name for operation in pickletools.opcodes}


class Sealed:
    """What has taken the place of a container; what would be put into that one later is left out."""

    __slots__ = ()


class Sealing(Protocol):
    """What replaces a container after something was put into it; it returns the container itself to leave it."""

    def of_dict(self, container: dict[str, Any]) -> Any:
        """Return what stands for a dict."""

    def of_list(self, container: list[Any]) -> Any:
        """Return what stands for a list."""


def load_plain(file: BinaryIO, name: str, sealing: Sealing) -> Any:
    """Read the one object of a pickle.

    Args:
        file: of bytes; it need not be seekable.
        name: what it is called, for messages.
        sealing: what to replace.

    Raises:
        InputError: if it is no such pickle, is torn or holds anything but plain data.
    """
    machine = _Machine(file, name, sealing)
    try:
        return machine.run()
    except IndexError:
        raise InputError(
            f"{name} is torn or damaged within its first {machine.num_read:,} bytes: write the snapshot again"
        ) from None


class _Machine:
    """The stack and the numbered objects ("memo") of a pickle, as its operations leave them.

    An ``IndexError`` says that something an operation needs is not there: a byte, an object, a mark, a container.
    """

    def __init__(self, file: BinaryIO, name: str, sealing: Sealing) -> None:
        self.num_read = 0
        self._file, self._name, self._sealing = file, name, sealing
        self._data, self._at = b"", 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._slots: dict[int, int] = {}

    def run(self) -> Any:  # noqa: PLR0912 -- a branch for each frequent operation
        """Do one operation after the other; the frequent ones are done here."""
        stack, memo = self._stack, self._memo
        data, at, safe = b"", 0, -1
        while True:
            if at > safe:
                data, at = self._more(data, at)
                safe = len(data) - (_MARGIN_BYTES if len(data) > _MARGIN_BYTES else 1)
            code = data[at]
            at += 1
            if code == _BINGET:
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
            elif code == _MEMOIZE:
                self._put(len(memo))
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
            elif code == _STOP:
                return self._result(data, at)
            else:
                self._data, self._at = data, at
                self._seldom(code)
                at = self._at

    def _seldom(self, code: int) -> None:
        stack = self._stack
        if code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code in _STRINGS:
            self._string(*_STRINGS[code])
        elif code in _PUTS:
            self._put(int.from_bytes(self._take(_PUTS[code]), "little"))
        elif code in _TUPLES:
            stack[-_TUPLES[code] :] = [tuple(self._top(_TUPLES[code]))]
        elif code == _TUPLE:
            stack.append(tuple(self._above_mark()))
        elif code == _BINFLOAT:
            stack.append(struct.unpack(">d", self._take(8))[0])
        elif code == _SETITEM:
            pair = self._top(2)
            del stack[-2:]
            self._set_items(pair)
        elif code == _APPEND:
            self._append([stack.pop()])
        elif code == _PROTO:
            self._take(1)
        elif code == _FRAME:
            self._take(8)
        else:
            self._refuse(code)

    def _more(self, data: bytes, at: int) -> tuple[bytes, int]:
        """The rest of what was read and the next piece, more than one operation needs or all there is."""
        if at > len(data):
            raise IndexError
        rest = data[at:]
        while len(rest) <= _MARGIN_BYTES and (piece := self._file.read(_CHUNK_BYTES)):
            self.num_read += len(piece)
            rest += piece
        return rest, 0

    def _take(self, num_bytes: int) -> bytes:
        taken = self._data[self._at : self._at + num_bytes]
        self._at += len(taken)
        if len(taken) < num_bytes:
            piece = self._file.read(num_bytes - len(taken))
            self.num_read += len(piece)
            taken += piece
        if len(taken) < num_bytes:
            raise IndexError
        return taken

    def _top(self, number: int) -> list[Any]:
        if len(self._stack) < number:
            raise IndexError
        return self._stack[-number:]

    def _above_mark(self) -> list[Any]:
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    def _string(self, length_bytes: int, is_text: bool) -> None:
        length = int.from_bytes(self._take(length_bytes), "little")
        if length > _MOST_BYTES_OF_STRING:
            raise InputError(
                f"{self._name} says that a string of {length:,} bytes follows, and none of a snapshot is longer than "
                f"{_MOST_BYTES_OF_STRING:,}: give a file that torch.cuda.memory._dump_snapshot wrote"
            )
        content = self._take(length)
        self._stack.append(content.decode(errors="replace") if is_text else content)

    def _put(self, index: int) -> None:
        if index != len(self._memo):
            raise IndexError
        top = self._stack[-1]
        if type(top) in (dict, list):
            self._slots[id(top)] = index
        self._memo.append(top)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        keys = items[::2]
        if len(items) % 2 or not set(map(type, keys)) <= {str}:
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

    def _result(self, data: bytes, at: int) -> Any:
        if at > len(data) or len(self._stack) != 1 or self._marks:
            raise IndexError
        return self._stack[0]

    def _refuse(self, code: int) -> NoReturn:
        operation = _NAMES.get(chr(code), f"byte {code:#04x}")
        raise InputError(
            f"{self._name} is no pickle of plain data: its operation {operation} is none that a memory snapshot needs, "
            "and may run code, so it was not opened; give a file that torch.cuda.memory._dump_snapshot wrote"
        )
