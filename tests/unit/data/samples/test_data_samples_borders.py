"""Sentence and paragraph borders, found in the text for any tokenizer; windows compared with a plain loop."""

import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from made_tokenizers import byte_level, sentence_piece, word_piece
from plimsoll.data.samples import borders as module
from plimsoll.data.samples.borders import MARKS, begins_in, marked_pieces
from plimsoll.data.samples.text_windows import cut_texts
from plimsoll.data.tokens.store import TextEncoder
from plimsoll.errors import DataError
from token_stores import store_of

TEXTS = [
    'He left. She said: "Stay." (It was late!) And then? Nothing…\n\nA new day, e.g. this one, cost 3.14 in the U.S.',
    "The U.S. Army law.",
    "一。二！三？",
    "The end of it. The end of all.\nOne more line.\n\n",
] * 5

BACKENDS = {
    "byte_level": byte_level,
    "word_piece": lambda texts: word_piece(texts, lowercase=False),
    "uncased": word_piece,
    "sentence_piece": sentence_piece,
}


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS, scope="module")
def backend(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    make: Callable[[list[str]], tokenizers.Tokenizer] = request.param
    return make(TEXTS)


def parts_of(text: str, backend: tokenizers.Tokenizer, kind: str = "sentence") -> list[str]:
    """Cut the text before each marked token, and strip white space from the parts."""
    encoded = TextEncoder(backend).encode(list(marked_pieces([(text, True)], True)), with_marks=True)
    offsets = backend.encode(text, add_special_tokens=False).offsets
    assert encoded.marks is not None
    cuts = [offsets[number][0] for number in np.flatnonzero(encoded.marks & MARKS[kind])]
    return [text[begin:end].strip() for begin, end in zip([0, *cuts], [*cuts, None], strict=True)]


@pytest.mark.parametrize(
    "parts",
    [
        ["He left.", "She said: Stay.", "And then?", "Nothing…", "The end!"],
        ["He left.)", "And then?", "The end."],
        ["This one, e.g. this one, is it.", "It cost 3.14 in the U.S. law."],
        ["He left and then? the end"],
        ["The end... of it.", "The end?!", "Nothing."],
        ['She said: "Stay."', '"It was late!"', "And then?"],
        ["The U.S. Army law.", "At 3. 4 men left."],
        ["Élan.", "Été!", "\u0416ar."],
    ],
    ids=lambda parts: parts[0],
)
def test_sentences_end_where_a_reader_says(backend: tokenizers.Tokenizer, parts: list[str]):
    assert parts_of(" ".join(parts), backend) == parts


def test_full_width_signs_need_no_space():
    assert [begin.place for begin in begins_in("一。二！三？一")] == [2, 4, 6]


def test_paragraphs_end_at_blank_lines_also_where_the_tokenizer_drops_them(backend: tokenizers.Tokenizer):
    text = "\n\nThe end\nof it. One\n\nmore line.\n \nA day\n\n\nit was\n\n"
    parts = ["The end\nof it. One", "more line.", "A day", "it was"]
    assert [part for part in parts_of(text, backend, "paragraph") if part] == parts
    in_sentences = ["The end\nof it.", "One", "more line.", "A day", "it was"]
    assert [part for part in parts_of(text, backend) if part] == in_sentences


@given(text=st.text('aB1.!?" \n)。', max_size=80), cuts=st.sets(st.integers(1, 79), max_size=4))
def test_a_text_in_pieces_has_the_borders_of_the_whole(text: str, cuts: set[int]):
    whole = [begin[::2] for begin in begins_in(text)]
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    parts = [(text[begin:end], end == len(text)) for begin, end in pairwise(edges)]
    found = [
        (begin.place + edge, begin.mark)
        for piece, edge in zip(marked_pieces(parts, True), edges, strict=False)
        for begin in piece.begins
    ]
    assert found == whole


@pytest.mark.parametrize("character", list('.\n )。"'))
def test_a_long_run_of_signs_is_read_once(character: str):
    """A long run of punctuation is read once.

    A search that starts again at each character of the run would exceed the time limit of a test.
    """
    assert begins_in("." + character * (1 << 18)) == []


# Numbers as tokens: 1 is a word, 20 ends a sentence. All borders of the windows below are after a 20.
WORD, FULL_STOP = 1, 20


def windows_of(texts: list[list[int]], most: int, with_end: bool) -> tuple[list[tuple[int, int]], int]:
    """Return starts and lengths of windows, and how many windows end without a border, by plain loops."""
    windows, num_inside, begin = [], 0, 0
    for text in texts:
        tokens = [*text, 0] if with_end or not text else text
        start = 0
        while len(tokens) - start > most:
            fitting = [
                stop
                for stop in range(start + 1, start + most + 1)
                if tokens[stop - 1] == FULL_STOP and 0 < tokens[stop] < FULL_STOP
            ]
            stop = max(fitting, default=start + most)
            num_inside += not fitting
            windows.append((begin + start, stop - start))
            start = stop
        windows.append((begin + start, len(tokens) - start))
        begin += len(text) + 1
    return windows, num_inside


def marked_store(folder: Path, texts: list[list[int]]):
    """Create a store whose sentences begin with a word after a full stop."""
    flat = np.array([token for text in texts for token in [*text, 0]])
    begins = np.concatenate(([False], (flat[:-1] == FULL_STOP) & (flat[1:] == WORD)))
    return store_of(folder, texts, marks=begins * np.uint8(MARKS["sentence"]))


@given(
    texts=st.lists(st.lists(st.sampled_from([WORD, WORD, WORD, FULL_STOP]), max_size=60), min_size=1, max_size=10),
    most=st.integers(1, 12),
    with_end=st.booleans(),
    tokens_per_pass=st.integers(1, 100),
)
def test_windows_end_at_the_last_border_that_fits(texts, most, with_end, tokens_per_pass):
    expected, num_inside = windows_of(texts, most, with_end)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TOKENS_PER_PASS", tokens_per_pass)
        store = marked_store(Path(folder), texts)
        spans = cut_texts(store, most, borders="sentence", with_end=with_end)
        found = list(zip(*(part.tolist() for part in spans.places(np.arange(len(spans)))), strict=True))
    assert found == expected
    if not spans.are_texts:
        assert spans.num_cut_inside == num_inside


def test_a_stride_has_no_place_at_borders(tmp_path: Path):
    with pytest.raises(
        DataError, match=r"stride = 2 works only with windows that do not end at borders: leave stride out"
    ):
        cut_texts(store_of(tmp_path, [[1, 2, 3]]), 2, stride=2, borders="sentence")


def test_other_borders_are_other_spans(tmp_path: Path):
    store = marked_store(tmp_path, [[1, FULL_STOP, 1, 1, 1]])
    assert len({cut_texts(store, 3, borders=kind).folder for kind in (None, "sentence", "paragraph")}) == 3
