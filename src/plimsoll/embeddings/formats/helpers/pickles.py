"""What a pickle describes, without making any of it: nothing is imported or called, whatever the file says.

https://docs.python.org/3/library/pickletools.html, protocols 2 to 5, the operations that Python's own pickles have.
Objects, classes and calls become `Thing`, which holds what the pickle says of them. Texts are their UTF-8 bytes; large
bytes are places in the file (`Span`). Nothing is as large as the file claims before it has been read, nothing is
recursive, and of each dictionary only the asked keys are kept, so that a vocabulary does not fill the memory. It does
NOT cover protocols 0 and 1, persistent objects, registered extensions and buffers out of band.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from plimsoll.errors import EmbeddingError

_LARGE_BYTES = 64 << 10


class Span(NamedTuple):
    """Bytes of the file."""

    begin: int
    end: int


@dataclass(slots=True, eq=False, repr=False)
class Thing:
    """A class (``args`` is ``None``), or what a class or function would return; ``state`` is what it would be given."""

    name: bytes
    args: Any = None
    state: Any = field(default=None)


class BrokenPickle(Exception):
    """The bytes are no pickle, or one with operations that are not covered."""


def described(raw: Any, keys: Collection[bytes], name: str) -> Any:
    """Return what a pickle describes.

    Args:
        raw: bytes, or a map of the file.
        keys: of dictionaries, what is kept.
        name: of the file, for messages.

    Raises:
        EmbeddingError: if it is no whole pickle of the protocols 2 to 5.
    """
    machine = _Machine(raw, keys)
    try:
        return machine.run()
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error, BrokenPickle) as error:
        raise EmbeddingError(
            f"{name} is no whole pickle of the protocols 2 to 5 ({type(error).__name__} after byte {machine.place} of "
            f"{len(raw)}: {error}): download it again, or save it anew with gensim 4"
        ) from None


_CONSTANTS: dict[int, Any] = {ord("N"): None, 0x88: True, 0x89: False, ord(")"): ()}
# Operations that are followed by a length of so many bytes and by what is that long.
_SIZED = {
    ord("X"): 4, 0x8C: 1, 0x8D: 8, ord("T"): 4, ord("U"): 1, ord("B"): 4, ord("C"): 1, 0x8E: 8, 0x96: 8,
}  # fmt: skip
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_NUMBERS = {ord("M"): struct.Struct("<H"), ord("G"): struct.Struct(">d")}
_SHORT_TEXT, _TEXT, _MEMOIZE, _LONG_PUT = 0x8C, ord("X"), 0x94, ord("r")
_GET, _LONG_GET, _BYTE, _INTEGER = ord("h"), ord("j"), ord("K"), ord("J")


class _Machine:
    """Reads operations one after the other, with a stack and a memo, as Python's own does."""

    def __init__(self, raw: Any, keys: Collection[bytes]) -> None:
        self._raw, self._keys, self.place = raw, keys, 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._operations = self._table()

    def run(self) -> Any:
        """Follow the operations up to the end of the pickle; the most frequent ones, in a vocabulary, are here."""
        raw, stack, memo, operations = self._raw, self._stack, self._memo, self._operations
        push, integer, index = stack.append, struct.Struct("<i").unpack_from, struct.Struct("<I").unpack_from
        place = 0
        while True:
            operation = raw[place]
            place += 1
            if operation == _SHORT_TEXT:
                begin = place + 1
                place = begin + raw[place]
                push(raw[begin:place])
            elif operation == _MEMOIZE:
                memo.append(stack[-1])
            elif operation == _LONG_GET:
                (number,) = index(raw, place)
                push(memo[number])
                place += 4
            elif operation == _INTEGER:
                stack += integer(raw, place)
                place += 4
            elif operation == _LONG_PUT and index(raw, place)[0] == len(memo):
                memo.append(stack[-1])
                place += 4
            elif operation == _TEXT and index(raw, place)[0] <= _LARGE_BYTES:
                begin = place + 4
                place = begin + index(raw, place)[0]
                push(raw[begin:place])
            elif operation == _GET:
                push(memo[raw[place]])
                place += 1
            elif operation == _BYTE:
                push(raw[place])
                place += 1
            elif operation == ord("."):
                self.place = place
                return stack[-1]
            else:
                self.place = place
                if operation not in operations:
                    raise BrokenPickle(f"operation {bytes([operation])!r} is not covered")
                operations[operation](operation)
                place = self.place

    def _table(self) -> dict[int, Callable[[int], None]]:
        table: dict[int, Callable[[int], None]] = {
            0x80: self._protocol,
            0x95: lambda _: self._frame(),
            ord("("): lambda _: self._marks.append(len(self._stack)),
            ord("0"): lambda _: self._drop(),
            ord("1"): lambda _: self._drop_to_mark(),
            ord("2"): lambda _: self._stack.append(self._stack[-1]),
            0x8A: lambda _: self._long(1),
            0x8B: lambda _: self._long(4),
            ord("q"): lambda _: self._put(1),
            ord("r"): lambda _: self._put(4),
            ord("]"): lambda _: self._stack.append([]),
            ord("}"): lambda _: self._stack.append({}),
            0x8F: lambda _: self._stack.append([]),
            ord("t"): lambda _: self._stack.append(tuple(self._to_mark())),
            ord("l"): lambda _: self._stack.append(self._to_mark()),
            0x91: lambda _: self._stack.append(self._to_mark()),
            ord("d"): lambda _: self._new_dictionary(),
            ord("a"): lambda _: self._add([self._stack.pop()]),
            ord("e"): lambda _: self._add(self._to_mark()),
            0x90: lambda _: self._add(self._to_mark()),
            ord("s"): lambda _: self._set(self._popped(2)),
            ord("u"): lambda _: self._set(self._to_mark()),
            ord("I"): lambda _: self._stack.append(int(self._line()[:20])),
            ord("c"): lambda _: self._stack.append(Thing(self._line() + b"." + self._line())),
            0x93: lambda _: self._stack.append(Thing(b".".join(self._popped(2)))),
            ord("R"): lambda _: self._call(),
            0x81: lambda _: self._call(),
            0x92: lambda _: self._call_with_keywords(),
            ord("b"): lambda _: self._build(),
        }  # fmt: skip
        return (
            table
            | dict.fromkeys(_CONSTANTS, lambda operation: self._stack.append(_CONSTANTS[operation]))
            | dict.fromkeys(_SIZED, self._sized)
            | dict.fromkeys(_TUPLES, lambda operation: self._stack.append(tuple(self._popped(_TUPLES[operation]))))
            | dict.fromkeys(_NUMBERS, self._number)
        )

    def _skip(self, num_bytes: int) -> Span:
        """Go on behind some bytes, which must be there."""
        begin, end = self.place, self.place + num_bytes
        if end > len(self._raw):
            raise BrokenPickle(f"it ends after {len(self._raw)} bytes, and {end} are needed")
        self.place = end
        return Span(begin, end)

    def _take(self, num_bytes: int) -> bytes:
        begin, end = self._skip(num_bytes)
        return bytes(self._raw[begin:end])

    def _protocol(self, _: int) -> None:
        if not 2 <= (number := self._take(1)[0]) <= 5:
            raise BrokenPickle(f"protocol {number} is not covered")

    def _frame(self) -> None:
        self._skip(8)

    def _sized(self, operation: int) -> None:
        span = self._skip(int.from_bytes(self._take(_SIZED[operation]), "little"))
        self._stack.append(span if span.end - span.begin > _LARGE_BYTES else self._raw[span.begin : span.end])

    def _number(self, operation: int) -> None:
        layout = _NUMBERS[operation]
        self._stack.extend(layout.unpack(self._take(layout.size)))

    def _long(self, width: int) -> None:
        raw = self._take(int.from_bytes(self._take(width), "little"))
        self._stack.append(int.from_bytes(raw[:16], "little", signed=True))

    def _line(self) -> bytes:
        end = self._raw.find(b"\n", self.place)
        if end < 0:
            raise BrokenPickle("a name has no end")
        begin, self.place = self.place, end + 1
        return bytes(self._raw[begin:end])

    def _put(self, width: int) -> None:
        number = int.from_bytes(self._take(width), "little")
        if number > self.place:  # each number before it has taken a byte
            raise BrokenPickle(f"it numbers what it has read {number}")
        self._memo += [None] * (number + 1 - len(self._memo))
        self._memo[number] = self._stack[-1]

    def _drop(self) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._stack.pop()

    def _drop_to_mark(self) -> None:
        self._to_mark()

    def _to_mark(self) -> list[Any]:
        begin = self._marks.pop()
        items = self._stack[begin:]
        del self._stack[begin:]
        return items

    def _popped(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise BrokenPickle("it takes what is not there")
        items = self._stack[-count:]
        del self._stack[-count:]
        return items

    def _add(self, items: list[Any]) -> None:
        if isinstance(self._stack[-1], list):  # a class of its own would be asked to add them: nothing is kept of it
            self._stack[-1].extend(items)

    def _set(self, items: list[Any]) -> None:
        if isinstance(self._stack[-1], dict):
            for key, value in zip(items[::2], items[1::2], strict=True):
                if isinstance(key, bytes) and key in self._keys:
                    self._stack[-1][key] = value

    def _new_dictionary(self) -> None:
        items = self._to_mark()
        self._stack.append({})
        self._set(items)

    def _call(self) -> None:
        function, args = self._popped(2)
        self._stack.append(Thing(function.name if isinstance(function, Thing) else b"", args))

    def _call_with_keywords(self) -> None:
        self._stack.pop()
        self._call()

    def _build(self) -> None:
        state = self._stack.pop()
        if isinstance(self._stack[-1], Thing):
            self._stack[-1].state = state
