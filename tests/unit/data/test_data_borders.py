"""Sentence and paragraph borders from tokens, with every kind of tokenizer; windows against a plain loop."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from plimsoll.data import borders as module
from plimsoll.data.borders import Borders, border_table
from plimsoll.data.spans import cut_texts
from plimsoll.errors import DataError
from token_stores import store_of

TEXTS = [
    'He left. She said: "Stay." (It was late!) And then? Nothing…\n\nA new day, e.g. this one, cost 3.14 in the U.S.',
    "The U.S. Army law.",
    "一。二！三？",
    "The end of it. The end of all.\nOne more line.\n\n",
] * 5


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def word_piece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special))
    return backend


def sentence_piece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


BACKENDS = {"byte_level": byte_level, "word_piece": word_piece, "sentence_piece": sentence_piece}


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS, scope="module")
def backend(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    make: Callable[[], tokenizers.Tokenizer] = request.param
    return make()


def parts_of(text: str, backend: tokenizers.Tokenizer, borders: Borders) -> list[str]:
    """The text cut at all borders, by the characters that each token is from; without white space at the ends."""
    encoding = backend.encode(text, add_special_tokens=False)
    cuts = [encoding.offsets[number][1] for number in borders.after(np.array(encoding.ids))]
    return [text[begin:end].strip() for begin, end in zip([0, *cuts], [*cuts, None], strict=True)]


@pytest.mark.parametrize(
    "parts",
    [
        ["He left.", "She said: Stay.", "And then?", "Nothing…", "The end!"],
        ["He left.)", "And then?", "The end."],
        ["This one, e.g. this one, is it.", "It cost 3.14 in the U.S. law."],
        ["He left", "and then? the end"],
        ["The end... of it.", "The end?!", "Nothing."],
    ],
    ids=lambda parts: parts[0],
)
def test_sentences_end_where_a_reader_says(backend: tokenizers.Tokenizer, parts: list[str]):
    if parts[0] == "He left":
        parts = [" ".join(parts)]
    assert parts_of(" ".join(parts), backend, border_table(backend, "sentence")) == parts


def test_quotes_after_the_full_stop_belong_to_the_sentence():
    for make in (byte_level, sentence_piece):  # WordPiece does not tell a closing quote from an opening one
        backend = make()
        parts = ['She said: "Stay."', '"It was late!"', "And then?"]
        assert parts_of(" ".join(parts), backend, border_table(backend, "sentence")) == parts


def test_full_width_signs_need_no_space(backend: tokenizers.Tokenizer):
    assert parts_of("一。二！三？一", backend, border_table(backend, "sentence")) == ["一。", "二！", "三？", "一"]


@pytest.mark.parametrize("make", [byte_level], ids=["byte_level"])
def test_paragraphs_end_at_blank_lines(make: Callable[[], tokenizers.Tokenizer]):
    backend = make()
    text = "The end\nof it. One\n\nmore line.\n \nA day\n\n\nit was"
    parts = ["The end\nof it. One", "more line.", "A day", "it was"]
    assert parts_of(text, backend, border_table(backend, "paragraph")) == parts
    in_sentences = ["The end\nof it.", "One", "more line.", "A day", "it was"]
    assert parts_of(text, backend, border_table(backend, "sentence")) == in_sentences


def test_a_tokenizer_that_drops_line_breaks_knows_no_paragraphs():
    with pytest.raises(DataError, match=r"of \d+ tokens drops line breaks.*: use borders `sentence`, or another"):
        border_table(word_piece(), "paragraph")


def test_special_tokens_are_no_words():
    backend = word_piece()
    borders = border_table(backend, "sentence")
    separator = backend.token_to_id("[SEP]")
    assert borders.after(np.array([*backend.encode("He left.", add_special_tokens=False).ids, separator])).size == 0


# Numbers as tokens: 1 to 9 are words, 20 ends a sentence. All borders of the windows below are after a 20.
WORD, FULL_STOP = 1, 20


def plain_borders() -> Borders:
    flags = np.zeros(30, np.uint16)
    flags[1:20] = module._BEGINS_WORD
    flags[FULL_STOP] = module._ENDS
    return Borders("sentence", flags)


def windows_of(texts: list[list[int]], most: int, with_end: bool) -> tuple[list[tuple[int, int]], int]:
    """Starts and lengths, and how many windows end where no border fitted, in plain loops."""
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
        store = store_of(Path(folder), texts)
        spans = cut_texts(store, most, borders=plain_borders(), with_end=with_end)
        found = list(zip(*(part.tolist() for part in spans.places(np.arange(len(spans)))), strict=True))
    assert found == expected
    if not spans.are_texts:
        assert spans.num_cut_inside == num_inside


def test_a_stride_has_no_place_at_borders(tmp_path: Path):
    with pytest.raises(DataError, match=r"stride = 2 is for windows that do not end at borders only: leave one"):
        cut_texts(store_of(tmp_path, [[1, 2, 3]]), 2, stride=2, borders=plain_borders())


def test_other_borders_are_other_spans(tmp_path: Path):
    store = store_of(tmp_path, [[1, FULL_STOP, 1, 1, 1]])
    folders = {
        cut_texts(store, 3, borders=borders).folder
        for borders in (None, plain_borders(), Borders("paragraph", plain_borders().flags))
    }
    assert len(folders) == 3
