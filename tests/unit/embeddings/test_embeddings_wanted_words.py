"""The wanted words, with each option that can name them."""

from pathlib import Path

import pytest

from plimsoll.embeddings.wanted_words import WantedWords
from plimsoll.errors import EmbeddingError


def test_words_of_a_file_are_those_of_its_lines(tmp_path: Path):
    (tmp_path / "words.txt").write_text("ship\nline\n")
    assert list(WantedWords(vocabulary=tmp_path / "words.txt").vocabulary_in().words) == ["ship", "line"]


def test_words_of_texts_are_counted(tmp_path: Path):
    (tmp_path / "a.txt").write_text("ship line ship\nhull ship line\n")
    wanted = WantedWords(corpus=(str(tmp_path / "a.txt"),), min_count=2)
    # the first two rows are padding and unknown
    assert list(wanted.vocabulary_in(tmp_path / "cache").words)[2:] == ["ship", "line"]


def test_rows_of_the_words_are_taken_and_written(tmp_path: Path):
    (tmp_path / "vectors.txt").write_text("ship 1 2\nline 3 5\n")
    (tmp_path / "words.txt").write_text("line\n")
    wanted, output = WantedWords(vocabulary=tmp_path / "words.txt"), tmp_path / "rows.txt"
    facts = wanted.rows_of(tmp_path / "vectors.txt", output, tmp_path / "cache", missing="zeros")
    assert (facts.num_words, facts.missing) == (1, "zeros")
    assert output.read_text() == "line 3.0 5.0\n"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (WantedWords(), r"the words must come from one option, not 0 \(none\)"),
        (WantedWords(vocabulary=Path("a"), corpus=("b",)), r"from one option, not 2 \(--vocabulary, --corpus\)"),
        (WantedWords(vocabulary=Path("a"), max_words=3), "--max-words needs --corpus"),
    ],
)
def test_one_option_says_it_and_others_are_of_a_corpus(wanted: WantedWords, message: str):
    with pytest.raises(EmbeddingError, match=message):
        wanted.vocabulary_in()
