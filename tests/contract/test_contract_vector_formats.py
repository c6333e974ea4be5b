"""The contract of word vector formats, for each module of `plimsoll.embeddings.formats`."""

import gzip
import pickle
import pkgutil
import shutil
import zipfile
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import safetensors.numpy

from plimsoll.embeddings import formats
from plimsoll.embeddings.faults import FaultList
from plimsoll.embeddings.formats import Block
from plimsoll.embeddings.inspect import every_row, look_at
from plimsoll.embeddings.opening import FORMATS, open_file, read_parts
from plimsoll.embeddings.table import TableWriter
from plimsoll.errors import EmbeddingError
from vector_files import RECORDED, expected

PAGES = Path(__file__).parents[2] / "docs" / "embeddings"
NAMES = [module.name for module in pkgutil.iter_modules(formats.__path__) if not module.ispkg]

# Words that all formats can store, and numbers of all magnitudes.
WORDS = ["the", "été", "U.S.", "\U0001f600", "a\u2028b", "-", "0.5", "w" * 40, "The"]
MATRIX = (np.random.default_rng(0).normal(size=(len(WORDS), 4)) * 10.0 ** np.arange(-3, 1)).astype(np.float32)


class Example(NamedTuple):
    """A small file and its contents."""

    path: Path
    words: list[bytes] = [word.encode() for word in WORDS]
    matrix: np.ndarray = MATRIX


def glove(folder: Path) -> Example:
    (folder / "x.txt").write_bytes(lines())
    return Example(folder / "x.txt")


def word2vec_text(folder: Path) -> Example:
    (folder / "x.vec").write_bytes(f"{len(WORDS)} {MATRIX.shape[1]}\n".encode() + lines())
    return Example(folder / "x.vec")


def lines() -> bytes:
    rows = zip(WORDS, MATRIX, strict=True)
    return "".join(f"{word} {' '.join(f'{number:.9g}' for number in row)}\n" for word, row in rows).encode()


def word2vec_binary(folder: Path) -> Example:
    rows = zip(WORDS, MATRIX, strict=True)
    records = [word.encode() + b" " + row.astype("<f4").tobytes() + b"\n" for word, row in rows]
    (folder / "x.bin").write_bytes(b"%d %d\n" % MATRIX.shape + b"".join(records))
    return Example(folder / "x.bin")


def fasttext_bin(folder: Path) -> Example:
    return recorded(folder, "words.bin")


def gensim(folder: Path) -> Example:
    return recorded(folder, "inside.kv")


def recorded(folder: Path, name: str) -> Example:
    shutil.copy(RECORDED / name, folder)
    return Example(folder / name, *expected(name))


def npy(folder: Path) -> Example:
    np.save(folder / "x.npy", MATRIX)
    (folder / "x.txt").write_bytes("".join(f"{word}\n" for word in WORDS).encode())
    return Example(folder / "x.npy")


def table(folder: Path) -> Example:
    with TableWriter(folder / "x.safetensors", MATRIX.shape[1], "float32") as writer:
        writer.add([word.encode() for word in WORDS], MATRIX)
    return Example(folder / "x.safetensors")


# How a small file of each format is made, in its own folder, because a format may need further files. Add a format here
# together with its module.
EXAMPLES: dict[str, Callable[[Path], Example]] = {
    "glove": glove,
    "word2vec_text": word2vec_text,
    "word2vec_binary": word2vec_binary,
    "fasttext_bin": fasttext_bin,
    "gensim": gensim,
    "npy": npy,
    "table": table,
}
# Formats of lines: if the last line has no line break, digits may be missing, ...
OF_LINES = {"glove", "word2vec_text"}
# ... and without a promised number of words, lines may be missing, too.
WITHOUT_END = {"glove"}

MOST_CUTS = 300


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    assert request.param in EXAMPLES, f"write a small file of the format {request.param} in EXAMPLES of {__file__}"
    return request.param


@pytest.fixture
def example(name: str, tmp_path: Path) -> Example:
    folder = tmp_path / "example"
    folder.mkdir()
    return EXAMPLES[name](folder)


def blocks(path: Path, wanted: Collection[bytes] | None = None) -> Iterator[Block]:
    for part in open_file(path).vectors.parts(wanted):
        yield part()


def read(path: Path, wanted: Collection[bytes] | None = None) -> tuple[list[bytes], np.ndarray, int]:
    """Return words, vectors and the number of words in the file, none of which may be faulty."""
    words, rows, num_words = [], [], 0
    for block in blocks(path, wanted):
        read = block.rows(np.arange(len(block.words)))
        assert (block.faults, read.faults) == ((), ())
        assert read.matrix.dtype == np.float32
        assert block.places.tolist() == sorted({*block.places.tolist()})
        assert all(0 <= place < block.num_words for place in block.places.tolist())
        words += block.words
        rows.append(read.matrix)
        num_words += block.num_words
    return words, np.concatenate(rows), num_words


def alone(example: Example) -> bool:
    """Return whether the example consists of one file."""
    return len(list(example.path.parent.iterdir())) == 1


def test_every_format_is_registered_and_has_a_page(name: str):
    assert set(FORMATS) == set(NAMES), "list the format in plimsoll.embeddings.opening.FORMATS"
    assert FORMATS[name].__name__ == f"{formats.__name__}.{name}"
    assert [module.TITLE for module in FORMATS.values()].count(FORMATS[name].TITLE) == 1
    assert (PAGES / f"{name}.md").is_file(), f"write docs/embeddings/{name}.md"


def test_a_file_is_told_by_its_content(example: Example, name: str):
    assert open_file(example.path).format == name
    assert open_file(example.path).title == FORMATS[name].TITLE
    if alone(example):
        for suffix in ("", ".txt", ".vec", ".bin", ".npy", ".kv", ".safetensors", ".zip", ".gz"):
            path = example.path.with_name(f"renamed{suffix}")
            shutil.copy(example.path, path)
            assert open_file(path).format == name


@pytest.mark.parametrize(
    "raw",
    [
        b"It was the best of times,\nit was the worst of times,\n" * 9,
        b'{"the": [0.1, 0.2]}\n',
        b"text,label\nfine,1\n",
        bytes(range(256)) * 9,
        bytes(9),
        b"\x89PNG\r\n\x1a\n" + bytes(range(99)),
        b"\x7fELF\x02\x01\x01" + bytes(99),
        pickle.dumps({"weight": [1.0, 2.0]}),
        safetensors.numpy.save({"weight": np.ones((2, 2), np.float32)}),
        b"x",
        b"\n",
    ],
)
def test_what_is_no_file_of_vectors_is_an_error_that_lists_what_is(tmp_path: Path, raw: bytes):
    (tmp_path / "vectors").write_bytes(raw)
    with pytest.raises(EmbeddingError, match=r"vectors .*: (give|name|load|convert|save|export)") as raised:
        open_file(tmp_path / "vectors")
    if "known format" in str(raised.value):
        assert all(module.TITLE in str(raised.value) for module in FORMATS.values())


def test_all_words_come_in_their_order_with_their_rows(example: Example):
    words, rows, num_words = read(example.path)
    assert words == example.words
    assert rows.tobytes() == example.matrix.tobytes()
    assert num_words == len(words)
    opened = open_file(example.path).vectors
    assert opened.dimension == example.matrix.shape[1]
    assert opened.num_promised in {None, len(words)}
    assert opened.first_number >= 1


def test_wanted_words_come_with_their_rows_and_all_are_counted(example: Example):
    indexes = [1, 2, len(example.words) - 1]
    wanted = [example.words[index] for index in indexes]
    absent = {b"absent", b"", *(word[:8] + b"x" for word in example.words), *(word[:1] for word in example.words)}
    absent -= {*example.words}
    for words in (frozenset([*wanted, *absent]), dict.fromkeys([*wanted, *absent]).keys(), [*wanted, *absent]):
        found, rows, num_words = read(example.path, words)
        kept = [index for index, word in enumerate(found) if word in wanted]
        assert {*found} <= {*wanted}  # the others may be left out
        assert [found[index] for index in kept] == wanted
        assert rows[kept].tobytes() == example.matrix[indexes].tobytes()
        assert num_words == len(example.words)
    assert read(example.path, frozenset([b"absent"]))[0] == []


def test_rows_are_given_in_any_order(example: Example):
    block = next(blocks(example.path))
    expected = example.matrix[: len(block.words)]
    for indexes in ([], [0], [*range(len(block.words))][::-1], [2, 0]):
        rows = block.rows(np.array(indexes, np.int64))
        assert rows.matrix.tobytes() == expected[indexes].tobytes()
        assert rows.matrix.shape == (len(indexes), expected.shape[1])


def test_the_share_read_ends_at_one(example: Example):
    vectors = open_file(example.path).vectors
    shares = [vectors.share_read() for _ in vectors.parts(None)]
    assert shares == sorted(shares)
    assert vectors.share_read() == 1


def test_other_words_are_built_or_not(example: Example):
    built = open_file(example.path).vectors.build([b"absent", b""])
    if built is not None:
        is_built, rows = built
        assert (is_built.dtype, rows.dtype, rows.shape) == (np.bool_, np.float32, (2, example.matrix.shape[1]))


@pytest.mark.parametrize("packing", ["gzip", "zip"])
def test_a_packed_file_is_read_in_place(example: Example, name: str, packing: str):
    if not alone(example):
        pytest.skip("a file that has others beside it is not packed alone")
    path = example.path.with_name("packed")
    if packing == "gzip":
        path.write_bytes(gzip.compress(example.path.read_bytes()))
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(example.path, "inside")
    assert open_file(path).format == name
    words, rows, _ = read(path)
    assert words == example.words
    assert rows.tobytes() == example.matrix.tobytes()


def usable(path: Path) -> tuple[list[tuple[bytes, bytes]], int]:
    """Return the usable words with their vectors, and the number of faults."""
    opened = open_file(path)
    faults = FaultList(opened, strict=False)
    found = []
    for block, (indexes, rows), _ in read_parts(opened.vectors, None, every_row):
        faults.add(block, indexes, rows)
        wrong = {fault.at for fault in rows.faults}
        pairs = enumerate(zip(block.words, rows.matrix, strict=True))
        found += [(word, row.tobytes()) for index, (word, row) in pairs if index not in wrong]
    faults.end()
    return found, sum(fault.count for fault in faults.counts())


def places(num_bytes: int, generator: np.random.Generator) -> list[int]:
    """Return all positions in a file, or for a large file some, including those near its start and end."""
    if num_bytes <= MOST_CUTS:
        return [*range(num_bytes)]
    ends = MOST_CUTS // 4
    between = generator.choice(np.arange(ends, num_bytes - ends), MOST_CUTS - 2 * ends, replace=False)
    return [*range(ends), *sorted(between.tolist()), *range(num_bytes - ends, num_bytes)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_packed", [False, True], ids=["", "gzip"])
def test_a_file_that_is_cut_anywhere_says_so_and_gives_no_wrong_numbers(example: Example, name: str, is_packed: bool):
    if is_packed and not alone(example):
        pytest.skip("a file that has others beside it is not packed alone")
    plain = example.path.read_bytes()
    raw = gzip.compress(plain) if is_packed else plain
    right = dict(zip(example.words, [row.tobytes() for row in example.matrix], strict=True))
    first_cut = plain.index(b"\n") + 1 if name in WITHOUT_END and not is_packed else 0
    for kept in places(len(raw), np.random.default_rng(0)):
        if kept < first_cut:
            continue  # in a file of one line the number of columns is unknown
        example.path.write_bytes(raw[:kept])
        try:
            found, num_faults = usable(example.path)
        except EmbeddingError:
            continue
        may_lack_digits = name in OF_LINES and not is_packed and raw[kept - 1 : kept] != b"\n"
        if may_lack_digits and found and found[-1] not in right.items():
            num_faults += 1
            found.pop()
        assert {*found} <= {*right.items()}, f"{kept} of {len(raw)} bytes give other words"
        is_known = num_faults > 0 or len(found) == len(right)
        assert is_known or (name in WITHOUT_END and not is_packed), f"{kept} of {len(raw)} bytes are taken for all"


def test_a_file_that_is_damaged_anywhere_is_read_or_an_error_of_ours(example: Example):
    raw = example.path.read_bytes()
    generator = np.random.default_rng(1)
    for place in places(len(raw), generator):
        damaged = bytearray(raw)
        damaged[place] = int(generator.integers(256))
        example.path.write_bytes(damaged)
        with suppress(EmbeddingError):
            look_at(example.path)
