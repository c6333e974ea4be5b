"""The rows of a vocabulary: the vector of each word, the facts about the subset, and the rows without a vector."""

import zipfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.embeddings import subsets
from plimsoll.embeddings.formats.helpers import lines as _lines
from plimsoll.embeddings.formats.helpers.sources import Source
from plimsoll.embeddings.subsets import take_subset
from plimsoll.embeddings.vocabulary import Vocabulary, of_counts
from plimsoll.embeddings.wanted import CAPITALISED, EXACT, LOWER, MISSING, NO_WORD, PADDING
from plimsoll.errors import EmbeddingError
from slow_vectors import PACKINGS, files, first_vectors, is_utf8, packed, slow_lines

RAW = b"the 1 2\nParis 3 5\nusa 5 8\n. . . 7 11\nthe 9 9\nlast -4 14\n"
FOUND = np.array([[1, 2], [3, 5], [5, 8], [7, 11], [-4, 14]], np.float64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return packed(tmp_path / "vectors", RAW)


@contextmanager
def small_parts(part_bytes: int = 20):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_lines, "_PART_BYTES", part_bytes)
        patch.setattr(_lines, "_MORE_BYTES", 16)
        patch.setattr(Source.chunks, "__defaults__", (part_bytes,))
        yield


def test_each_row_has_the_vector_of_its_word_and_how_is_said(path: Path):
    words = ["<pad>", "The", "paris", None, "USA", "absent", ". . .", "the"]
    found = take_subset(path, words, missing="zeros", padding="<pad>")
    assert found.rows.tolist() == [[0, 0], [1, 2], [3, 5], [0, 0], [5, 8], [0, 0], [7, 11], [1, 2]]
    states = [PADDING, LOWER, CAPITALISED, NO_WORD, LOWER, MISSING, EXACT, EXACT]
    assert found.table.found.tolist() == states
    assert found.table.texts() == words
    facts = found.facts
    assert (facts.num_rows, facts.num_words, facts.num_found) == (8, 6, 5)
    assert (facts.num_exact, facts.num_lower, facts.num_capitalised, facts.num_built) == (2, 2, 1, 0)
    assert facts.misses == (("absent", -1),)
    assert (facts.num_tokens, facts.num_hit_tokens) == (None, None)
    assert (facts.num_entries, facts.num_promised, facts.num_duplicates, facts.faults) == (6, None, 1, ())
    assert (facts.source, facts.source_format, facts.vocabulary) == (str(path), "GloVe text", "the words")
    assert (facts.dimension, facts.precision, facts.missing) == (2, "float32", "zeros")
    assert facts.num_bytes == found.table.path.stat().st_size
    assert found.table.padding == 0
    assert found.rows.flags.writeable is False


def test_case_can_be_kept(path: Path):
    found = take_subset(path, ["The", "paris", "the"], missing="zeros", ignore_case=False)
    assert found.table.found.tolist() == [MISSING, MISSING, EXACT]
    assert found.table.padding is None


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("part_bytes", [16, 40, 1000])
def test_how_the_file_is_packed_and_cut_changes_nothing(tmp_path: Path, packing: str, part_bytes: int):
    with small_parts(part_bytes):
        found = take_subset(packed(tmp_path / "x", RAW, packing), ["the", "last", "absent", ". . ."], seed=3)
    plain = take_subset(packed(tmp_path / "x", RAW), ["the", "last", "absent", ". . ."], seed=3)
    assert found.rows.tobytes() == plain.rows.tobytes()
    ignored = {"source", "folder", "seconds"}
    assert found.facts.model_dump(exclude=ignored) == plain.facts.model_dump(exclude=ignored)


@pytest.mark.long
@given(data=st.data(), dimension=st.sampled_from([1, 2, 3]), part_bytes=st.integers(16, 300))
@settings(max_examples=80)
def test_hostile_files_give_the_rows_that_a_slow_reader_gives(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, dimension: int, part_bytes: int
):
    good = b"".join(b"good%d" % number + b" 0.1" * dimension + b"\n" for number in range(64))
    raw = good + data.draw(files(dimension)).replace(b"\0", b"")
    lines = slow_lines(raw, dimension)
    vectors = first_vectors(lines)
    there = sorted({word.decode() for word, _ in lines if is_utf8(word)})
    words = [*{*data.draw(st.lists(st.sampled_from([*there, "absent"]), max_size=8)), "good7"}]
    wanted = {word.encode() for word in words}
    for packing in PACKINGS:
        folder = tmp_path_factory.mktemp("hostile")
        with small_parts(part_bytes):
            found = take_subset(
                packed(folder / "x", raw, packing), words, missing="zeros", ignore_case=False, cache=folder
            )
        zeros = bytes(4 * dimension)
        expected = [vectors.get(word.encode(), zeros) for word in words]
        assert [row.tobytes() for row in found.rows] == expected
        assert found.facts.num_entries == len(lines)
        assert {fault.kind: fault.count for fault in found.facts.faults} == faults_of(lines, wanted)
        kept = [word for word, vector in lines if word in wanted and vector not in {"dimension", "truncated"}]
        assert found.facts.num_duplicates == len(kept) - len({*kept})


def faults_of(lines: list[tuple[bytes, bytes | str]], wanted: set[bytes]) -> dict[str, int]:
    """Count all short lines, and the faults of wanted words before a vector was found for them."""
    names = {
        "dimension": "wrong dimension",
        "truncated": "cut off",
        "number": "not a number",
        "finite": "NaN or infinite",
    }
    counts: dict[str, int] = {}
    has = set()
    for word, vector in lines:
        if isinstance(vector, bytes):
            has.add(word)
        elif vector in {"dimension", "truncated"} or (word in wanted and word not in has):
            counts[names[vector]] = counts.get(names[vector], 0) + 1
    return counts


def test_the_first_of_equal_words_wins_also_across_parts_and_threads(tmp_path: Path):
    raw = b"".join(b"w%d %d 0\n" % (number % 500, number) for number in range(5000))
    with small_parts(100):
        found = take_subset(packed(tmp_path / "x", raw), [f"w{number}" for number in range(500)])
    assert found.rows[:, 0].tolist() == list(range(500))
    assert found.facts.num_duplicates == 4500


@pytest.mark.parametrize("part_bytes", [16, 1000])
def test_a_word_without_a_vector_is_a_fault_and_the_next_like_it_is_taken(tmp_path: Path, part_bytes: int):
    """A word with an invalid vector is a fault, and its next valid vector is taken.

    If a word has a vector already, later faults of the word do not count, whichever part was read first.
    """
    raw = b"a nan 1\nb 1 x\na 1 2\nb 3 4\na inf 1\nshort 1\nthe 5 6\n"
    with small_parts(part_bytes):
        found = take_subset(packed(tmp_path / "x", raw), ["a", "b"])
    assert found.rows.tolist() == [[1, 2], [3, 4]]
    assert [(fault.kind, fault.count, fault.examples) for fault in found.facts.faults] == [
        ("NaN or infinite", 1, ("line 1: 'a': number 1 of 2 is nan",)),
        ("not a number", 1, ("line 2: 'b': 'x' is not a number",)),
        ("wrong dimension", 1, ("line 6: 'short 1', 1 numbers, not 2",)),
    ]


def test_strict_the_first_fault_is_an_error_and_nothing_is_kept(tmp_path: Path):
    path = packed(tmp_path / "x", b"the 1 2\nshort 1\na nan 1\n")
    with pytest.raises(
        EmbeddingError, match=r"x: line 2: 'short 1', 1 numbers, not 2 \(wrong dimension\): correct the"
    ):
        take_subset(path, ["the"], strict=True, cache=tmp_path / "cache")
    assert [entry.suffix for entry in (tmp_path / "cache").iterdir()] == [".lock"]
    assert take_subset(path, ["the"], cache=tmp_path / "cache").facts.faults[0].count == 1
    whole = packed(tmp_path / "y", b"the 1 2\na nan 1\n")
    assert take_subset(whole, ["the"], strict=True).facts.faults == ()  # vectors of unwanted words are not checked
    with pytest.raises(EmbeddingError, match="line 2: 'a': number 1 of 2 is nan"):
        take_subset(whole, ["the", "A"], strict=True)


def test_a_file_that_is_cut_off_says_so(tmp_path: Path):
    path = packed(tmp_path / "x", b"1000 2\nthe 1 2\na 3")
    facts = take_subset(path, ["the", "a"], missing="zeros").facts
    assert (facts.num_entries, facts.num_promised, facts.num_exact) == (2, 1000, 1)
    assert [(fault.kind, fault.examples) for fault in facts.faults] == [
        ("cut off", ("line 3: 'a 3', 1 numbers, not 2",)),
    ]
    with pytest.raises(EmbeddingError, match=r"x: line 3: 'a 3', 1 numbers, not 2 \(cut off\)"):
        take_subset(path, ["the"], strict=True)


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("block_bytes", [16, 1 << 20])
def test_rows_without_a_vector(path: Path, precision: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch):
    """Rows without a vector are filled by the chosen method.

    The mean of the five vectors is (2.4, 8), and numpy computes their standard deviations.
    """
    monkeypatch.setattr(subsets, "_BLOCK_BYTES", block_bytes)
    words = ["the", "Paris", "usa", ". . .", "last", "p", "x", "y", None, "z"]
    made = {
        missing: take_subset(path, words, missing=missing, padding="p", precision=precision).rows
        for missing in ("zeros", "mean", "normal")
    }
    for rows in made.values():
        assert rows.dtype == np.dtype(precision)
        assert rows[:5].tolist() == FOUND.tolist()
        assert rows[5].tolist() == [0, 0]
    assert made["zeros"][6:].tolist() == [[0, 0]] * 4
    assert (made["mean"][6:] == np.array([2.4, 8], precision)).all()
    drawn = np.random.default_rng(0).normal(FOUND.mean(axis=0), FOUND.std(axis=0), (4, 2))
    assert np.allclose(made["normal"][6:], drawn.astype(precision), rtol=1e-3 if precision == "float16" else 1e-6)
    facts = take_subset(path, words, precision=precision, padding="p").facts
    assert facts.mean == pytest.approx((2.4 + 8) / 2)
    assert facts.deviation == pytest.approx(FOUND.std(axis=0).mean())


def test_drawn_rows_have_the_mean_and_deviation_of_those_found_and_follow_the_seed(tmp_path: Path):
    generator = np.random.default_rng(5)
    matrix = generator.normal([0.5, -2, 7], [1, 0.1, 3], (400, 3))
    raw = "".join(f"w{number} {' '.join(map(repr, row))}\n" for number, row in enumerate(matrix.tolist())).encode()
    path = packed(tmp_path / "x", raw)
    words = [f"w{number}" for number in range(400)] + [f"absent{number}" for number in range(20_000)]
    rows = take_subset(path, words, seed=1).rows
    drawn = rows[400:].astype(np.float64)
    assert drawn.mean(axis=0) == pytest.approx(matrix.mean(axis=0), abs=0.1)
    assert drawn.std(axis=0) == pytest.approx(matrix.std(axis=0), rel=0.05)
    again = take_subset(path, words, seed=1, cache=tmp_path / "other")
    assert again.rows.tobytes() == rows.tobytes()
    assert take_subset(path, words, seed=2).rows[400:].tobytes() != rows[400:].tobytes()


@pytest.mark.parametrize("raw", [b"the 1 2\nof 5 6\n", b"the 1 2\na 1 2\n"], ids=["one found", "alike ones found"])
def test_rows_that_would_all_be_the_one_that_was_found_are_not_drawn(tmp_path: Path, raw: bytes):
    path = packed(tmp_path / "x", raw)
    words = ["the", "a", "absent", "gone"]
    with pytest.raises(EmbeddingError, match="cannot be drawn from their distribution: set missing to zer"):
        take_subset(path, words, cache=tmp_path)
    assert not [entry for entry in tmp_path.glob("subset-*") if entry.is_dir()]
    assert take_subset(path, ["the"]).rows.tolist() == [[1, 2]]  # no row needs to be drawn
    assert take_subset(path, words, missing="mean").rows[2].tolist() == [1, 2]


def test_half_precision_is_that_of_numpy_and_what_is_too_large_is_a_fault(tmp_path: Path):
    path = packed(tmp_path / "x", b"a 0.1 65504\nb 1 65520\nc 1e-8 -3\n")
    found = take_subset(path, ["a", "b", "c"], precision="float16", missing="zeros")
    expected = np.array([[0.1, 65504], [0, 0], [1e-8, -3]], np.float32).astype(np.float16)
    assert found.rows.tobytes() == expected.tobytes()
    assert found.facts.faults[0].examples == ("line 2: 'b': number 2 of 2 is inf in float16",)
    assert found.facts.misses == (("b", -1),)


def test_hits_are_counted_by_word_and_by_use_and_the_most_used_misses_come_first(path: Path):
    counts = [("the", 50), ("rare", 9), ("Absent", 8), ("PARIS", 5), ("x", 5), ("y", 1)]
    found = take_subset(path, of_counts(counts, "texts", 5, 1))
    facts = found.facts
    assert found.table.texts() == ["<pad>", "<unk>", "the", "rare", "Absent", "PARIS", "x"]
    assert (facts.num_rows, facts.num_words, facts.num_found) == (7, 6, 2)
    assert (facts.num_tokens, facts.num_hit_tokens) == (78, 55)
    assert facts.misses == (("rare", 9), ("Absent", 8), ("x", 5))
    assert facts.vocabulary == "texts"
    assert found.table.padding == 0


def test_only_the_most_used_misses_are_listed(path: Path):
    words = Counter({"the": 1} | {f"absent{number}": number for number in range(100)})
    misses = take_subset(path, words, missing="mean").facts.misses
    assert misses == tuple((f"absent{number}", number) for number in range(99, 79, -1))


def test_the_same_words_used_otherwise_are_counted_again_but_not_read_again(path: Path, tmp_path: Path):
    first = take_subset(path, Vocabulary(["the", "absent"], "one"), missing="mean", cache=tmp_path / "cache")
    words = Vocabulary(["the", "absent"], "other", np.array([3, 7]), num_other_tokens=2)
    again = take_subset(path, words, missing="mean", cache=tmp_path / "cache")
    assert again.table.path == first.table.path
    assert (again.facts.vocabulary, again.facts.num_tokens, again.facts.num_hit_tokens) == ("other", 12, 3)
    assert again.facts.misses == (("absent", 7),)
    assert again.digest == first.digest


def test_any_iterable_file_or_tokenizer_names_the_words(path: Path, tmp_path: Path):
    from tokenizers import Tokenizer, models

    (tmp_path / "words.txt").write_text("last\n\nthe\n")
    backend = Tokenizer(models.WordLevel({"the": 2, "last": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.add_special_tokens(["[UNK]"])
    backend.save(str(tmp_path / "tokenizer.json"))
    vocabularies = [
        tmp_path / "words.txt", str(tmp_path / "tokenizer.json"), backend, (word for word in ("last", None, "the")),
    ]  # fmt: skip
    for words in vocabularies:
        assert take_subset(path, words, missing="zeros").rows.tolist() == [[-4, 14], [0, 0], [1, 2]]


def test_a_file_of_an_archive_has_rows_of_its_own(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("small.txt", b"the 1 2\na 1 2\n")
        archive.writestr("large.txt", b"the 3 4 5\na 1 2 3\n")
    assert take_subset(tmp_path / "a.zip" / "small.txt", ["the"]).rows.tolist() == [[1, 2]]
    found = take_subset(tmp_path / "a.zip" / "large.txt", ["the"])
    assert found.rows.tolist() == [[3, 4, 5]]
    assert found.facts.source == str(tmp_path / "a.zip" / "large.txt")


def test_a_subset_is_a_source_too(path: Path, tmp_path: Path):
    first = take_subset(path, ["the", "absent", "last"])
    again = take_subset(first.table.path, ["last", "the", "absent"], missing="zeros")
    assert again.rows.tolist() == [[-4, 14], [1, 2], [0, 0]]
    assert again.facts.num_entries == 3


@pytest.mark.parametrize("raw", [RAW, b"5 2\n"])
def test_a_vocabulary_with_no_hit_is_an_error_that_shows_both(tmp_path: Path, raw: bytes):
    path = packed(tmp_path / "x", raw)
    theirs = r"the, Paris, usa, \. \. \., the, \.\.\." if raw is RAW else r".*"
    with pytest.raises(
        EmbeddingError, match=rf"none of the 2 words of the words \(der, 東京, ...\) is in .*x \({theirs}\)"
    ):
        take_subset(path, ["der", "東京"], cache=tmp_path / "cache")
    assert [entry.suffix for entry in (tmp_path / "cache").iterdir()] == [".lock"]


def test_progress_ends_at_all_of_the_file(path: Path):
    seen = []
    with small_parts():
        take_subset(path, ["the"], progress=lambda stage, done, total: seen.append((stage, done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == ("vectors", 1000, 1000)
