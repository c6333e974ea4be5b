"""A slow and simple reader of word vectors in lines, and small files with all kinds of faults."""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

PACKINGS = ("", "gzip", "zip")


def slow_lines(raw: bytes, dimension: int, separator: bytes = b" ") -> list[tuple[bytes, bytes | str]]:
    """Return each line's word and the bytes of its vector, or the kind of its fault."""
    lines = raw.split(b"\n")
    found: list[tuple[bytes, bytes | str]] = []
    for line in lines if lines[-1] else lines[:-1]:
        fields = line.rstrip(b" \t\r").split(separator)
        word, texts = separator.join(fields[:-dimension]), fields[-dimension:]
        more = fields[1:-dimension]  # the fields between the first field and the vector
        if more and all(is_number(field) for field in more):
            found.append((b"", "dimension"))
            continue
        if len(fields) <= dimension:
            is_torn = bool(lines[-1]) and len(found) == len(lines) - 1
            found.append((b"", "truncated" if is_torn else "dimension"))
            continue
        try:
            with np.errstate(over="ignore"):
                vector = np.array([np.float32(text.decode("ascii")) for text in texts], np.float32)
        except ValueError:
            found.append((word, "number"))
            continue
        found.append((word, vector.tobytes() if np.isfinite(vector).all() else "finite"))
    return found


def is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def first_vectors(lines: Iterable[tuple[bytes, bytes | str]]) -> dict[bytes, bytes]:
    """Return the vector of each word: the first usable one."""
    vectors: dict[bytes, bytes] = {}
    for word, vector in lines:
        if isinstance(vector, bytes):
            vectors.setdefault(word, vector)
    return vectors


def is_utf8(word: bytes) -> bool:
    return word.decode(errors="ignore").encode() == word


def packed(path: Path, raw: bytes, packing: str = "") -> Path:
    """Write a file as it is, or as a gzip file or the only file of a zip archive."""
    if packing == "zip":
        path = path.with_name(path.name + ".zip")
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("inside.txt", raw)
    elif packing == "gzip":
        path = path.with_name(path.name + ".gz")
        path.write_bytes(gzip.compress(raw, 1))
    else:
        path.write_bytes(raw)
    return path


# Words in real files that readers often get wrong: Unicode line ends, spaces, empty words, words like numbers, bytes
# that are not UTF-8, and words with equal first eight bytes.
HOSTILE_WORDS = [
    *(b"", b" ", b". . .", b"at name@domain.com", b"a b", b"a", b" a", b"a ", b"\xc2\x85", b"x\xe2\x80\xa8y"),
    *(b"\xc2\xa0", b"\xff\xfe", b"\r", b"\tx", b"a\tb", b"\x00", b"1", b"0.5", b"nan", b"1 2"),
    *(b"<unk>", b"The", b"the"),
    *(b"sevenle", b"eightlet", b"eightlett", b"eightlette", b"eightletters", b"eightletters more", b"w" * 700),
]  # fmt: skip
HOSTILE_NUMBERS = [
    *(b"0", b"-0", b"-0.0", b"1", b"+1", b".5", b"5.", b"1e5", b"-1.5E-05", b"1e-45", b"1e-400", b"3.4028235e38"),
    *(b"0.1", b"0.30000001192092896", b"16777217", b"1" * 60, b"0." + b"3" * 60, b"1_0"),
    b"1.00000005960464477539062501",
]  # fmt: skip
NOT_NUMBERS = [
    *(b"nan", b"NaN", b"-nan", b"inf", b"-Infinity", b"1e39", b"1e400"),
    *(b"x", b"1e", b"0x1p3", b"1,5", b"--1", b"\xc2\xb2", b"_1", b"1__0", b"."),
]  # fmt: skip


def numbers() -> st.SearchStrategy[bytes]:
    floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
    shown = st.sampled_from(["{!r}", "{:.5f}", "{:.8g}", "{:e}", "{:+.3E}"])
    return st.one_of(
        st.sampled_from(HOSTILE_NUMBERS), st.builds(lambda form, value: form.format(value).encode(), shown, floats)
    )


def words() -> st.SearchStrategy[bytes]:
    drawn = st.one_of(st.text(max_size=12).map(lambda text: text.encode()), st.binary(max_size=12))
    return st.one_of(st.sampled_from(HOSTILE_WORDS), drawn.map(lambda word: word.replace(b"\n", b"")))


@st.composite
def files(draw: st.DrawFn, dimension: int, separator: bytes = b" ") -> bytes:
    """Draw a file of lines, most of them valid."""
    lines = []
    for word in draw(st.lists(words(), min_size=1, max_size=12)):
        texts = draw(st.lists(numbers(), min_size=dimension, max_size=dimension))
        fault = draw(st.sampled_from(["", "", "", "", "short", "long", "number", "empty field", "blank"]))
        if fault == "short":
            texts.pop()
        elif fault == "long":
            texts.append(b"1.5")
        elif fault == "number":
            texts[draw(st.integers(0, dimension - 1))] = draw(st.sampled_from(NOT_NUMBERS))
        elif fault == "empty field":
            texts[draw(st.integers(0, dimension - 1))] = b""
        end = draw(st.sampled_from([b"\n", b"\n", b"\n", b"\r\n", b" \n", b" \r\n", b"  \n", b"\t\n"]))
        lines.append((b"" if fault == "blank" else separator.join([word, *texts])) + end)
    if draw(st.booleans()):
        lines += draw(st.lists(st.sampled_from(lines), max_size=3))  # duplicates
    raw = b"".join(lines)
    return raw.removesuffix(b"\n") if draw(st.booleans()) else raw
