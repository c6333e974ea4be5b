"""Augmentation of text: words are deleted, swapped and replaced.

White space, punctuation and case stay. An error about a table names the line.
"""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.data.batches.augment_text import TextAugmentation, read_synonyms
from plimsoll.errors import DataError
from plimsoll.records.augmentation import Augmentation

TABLE = "quick\tfast\nfox\tred fox\nJumps\tleaps\n\n"


@pytest.fixture
def table(tmp_path: Path) -> str:
    (tmp_path / "words.tsv").write_text(TABLE)
    return str(tmp_path / "words.tsv")


def test_synonyms_take_over_case_and_punctuation(table: str):
    augmentation = TextAugmentation(Augmentation(synonyms=table, synonym=1.0), 0)
    text = "  The quick, (Fox)\n'JUMPS' Quickly. \n"
    assert augmentation.apply(text, 3, 0) == "  The fast, (Red fox)\n'LEAPS' Quickly. \n"
    assert pickle.loads(pickle.dumps(augmentation)).apply(text, 3, 0) == augmentation.apply(text, 3, 0)


def test_a_table_without_a_share_replaces_one_word_in_ten(table: str):
    augmentation = TextAugmentation(Augmentation(synonyms=table), 0)
    words = " ".join(augmentation.apply("quick " * 100, number, 0) for number in range(100)).split()
    assert abs(words.count("fast") / 10_000 - 0.1) < 4 * (0.09 / 10_000) ** 0.5


def test_every_synonym_is_taken(tmp_path: Path):
    (tmp_path / "words.json").write_text('{"Quick": ["fast", "swift", "rapid"], "quick": ["brisk"]}')
    augmentation = TextAugmentation(Augmentation(synonyms=str(tmp_path / "words.json"), synonym=1.0), 0)
    drawn = {augmentation.apply("quick", number, 0) for number in range(100)}
    assert drawn == {"fast", "swift", "rapid", "brisk"}


def test_words_are_deleted_with_the_space_after_them():
    augmentation = TextAugmentation(Augmentation(delete_word=0.5), 0)
    text = " one two\nthree  four five six seven eight "
    results = [augmentation.apply(text, number, 0) for number in range(50)]
    for result in results:
        assert re.fullmatch(r" (one )?(two\n)?(three  )?(four )?(five )?(six )?(seven )?(eight )?", result)
        assert result.strip()
    assert len(set(results)) > 30


def test_one_word_is_left_of_any_text():
    augmentation = TextAugmentation(Augmentation(delete_word=1.0), 0)
    assert augmentation.apply("a b c d", 0, 0).strip() in "abcd"
    assert augmentation.apply("one", 0, 0) == "one"


def test_words_trade_places():
    augmentation = TextAugmentation(Augmentation(swap_word=0.5), 0)
    text = "one, two\nthree  four"
    results = {augmentation.apply(text, number, 0) for number in range(100)}
    assert len(results) > 3
    assert all(sorted(result.split()) == sorted(text.split()) for result in results)
    assert all(re.fullmatch(r"\S+ \S+\n\S+  \S+", result) for result in results)


@given(st.text(max_size=60), st.integers(0, 5), st.integers(0, 5))
def test_blank_texts_stay_and_others_never_become_blank(text: str, sample: int, epoch: int):
    config = Augmentation(delete_word=0.9, swap_word=0.9, swap_distance=3)
    result = TextAugmentation(config, 0).apply(text, sample, epoch)
    assert bool(result.split()) == bool(text.split())
    if not text.split():
        assert result == text
    assert TextAugmentation(config, 0).apply(text, sample, epoch) == result


def test_a_text_changes_as_if_it_were_alone(table: str):
    config = Augmentation(synonyms=table, synonym=0.5, delete_word=0.3, swap_word=0.3, swap_distance=2)
    augmentation = TextAugmentation(config, 0)
    texts = ["The quick fox.", "", " \n", "Quick quick QUICK fox", "one", " a b\tc  d "] * 5
    ids = np.arange(100, 130)
    assert augmentation.apply_all(texts, ids, 4) == [
        augmentation.apply(text, number, 4) for text, number in zip(texts, ids.tolist(), strict=True)
    ]


def test_no_change_is_the_text_itself(table: str):
    text = "The quick fox."
    assert TextAugmentation(Augmentation(synonyms=table, synonym=0.0, mask=0.5), 0).apply(text, 0, 0) is text


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text_noise_of_tests.py").write_text(
        "def upper(text): return text.upper()\n"
        "def seeded(text, seed): return f'{text} {seed}'\n"
        "def nothing(text): return None\n"
        "def blank(text): return ' '\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("functions")
def test_a_function_has_the_last_word():
    assert TextAugmentation(Augmentation(function="text_noise_of_tests:upper"), 0).apply("a b", 0, 0) == "A B"
    seeded = TextAugmentation(Augmentation(function="text_noise_of_tests:seeded"), 0)
    assert len({seeded.apply("a", sample, epoch) for sample in range(3) for epoch in range(3)}) == 9


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize("name", ["nothing", "blank"])
def test_a_function_must_return_a_text(name: str):
    augmentation = TextAugmentation(Augmentation(function=f"text_noise_of_tests:{name}"), 0)
    with pytest.raises(DataError, match=rf"function text_noise_of_tests:{name} returned .* for text 7: return a text"):
        augmentation.apply("word", 7, 0)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        (
            "a.tsv",
            "quick\tfast\nslow fast\n",
            r"line 2 of the synonyms .* is 'slow fast': write a word and its synonyms",
        ),
        ("a.tsv", "quick\t\n", r"line 1 of the synonyms"),
        ("a.tsv", "\n\n", r"hold no word: write lines"),
        ("a.json", '{"a": ["b"],\n "c" ["d"]}', r"line 2 of the synonyms .* is not JSON"),
        ("a.json", '{"a": "b"}', r"the entry 'a' is not a list of words: write an object"),
        ("a.json", '["a"]', r"the entry .* is not a list of words: write an object"),
    ],
)
def test_a_fault_of_the_table_is_named(tmp_path: Path, name: str, content: str, fault: str):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=fault):
        read_synonyms(tmp_path / name)


def test_a_missing_table_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"cannot read the synonyms .*none\.tsv \(.*No such file.*\): give a file"):
        TextAugmentation(Augmentation(synonyms=str(tmp_path / "none.tsv")), 0)
