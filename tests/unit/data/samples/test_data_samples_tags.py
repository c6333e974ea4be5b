"""Labels of tokens: each word's first token has the label of the word, in exactly one window, by brute force."""

import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.data.batches.loader import iterate_once
from plimsoll.data.samples.tags import INSIDE_WORD, NO_LABEL, WordEncoder, are_of_entities, entity_note, tags_of
from plimsoll.data.samples.text_windows import cut_texts
from plimsoll.data.samples.texts import DocumentDataset, TokenLabels
from plimsoll.data.samples.windows import IGNORED_LABEL
from plimsoll.data.tokens.store import tokenize
from plimsoll.errors import DataError
from tagged_files import conll, sentences_of_names, tagged_corpus, tagged_store
from token_stores import store_of_lengths


def test_that_nothing_is_predicted_is_said_alike():
    assert NO_LABEL == IGNORED_LABEL


@pytest.mark.parametrize(
    ("names", "are", "named"),
    [
        (["B-X", "I-X", "O"], True, None),
        (["I-X", "O"], True, None),  # conlleval counts an I that follows no B as a beginning
        (["O"], False, None),
        (["NOUN", "VERB"], False, None),  # tags without entities, for which nobody expects an F1
        (
            ["B-PER", "O", "PER", "LOC"],
            False,
            "and some have none: name 'PER', 'LOC' with a prefix, such as B-PER and I-PER, or O",
        ),
    ],
)
def test_tags_of_which_some_only_are_of_entities_are_told(names: list[str], are: bool, named: str | None):
    assert are_of_entities(names) == are
    note = entity_note(names)
    assert note is None if named is None else named in (note or "")


@pytest.mark.parametrize("tokenizer", [{}, {"train": "bpe", "vocab_size": 270}], ids=["words", "bpe"])
def test_the_first_token_of_each_word_has_its_label(tmp_path: Path, tokenizer: dict):
    sentences = sentences_of_names(30)
    corpus, made, store = tagged_store(tmp_path / "a.conll", sentences, **tokenizer)
    names = tags_of(corpus)
    assert names == ("B-NAME", "I-NAME", "O") == store.tag_names
    assert store.labels is not None
    assert store.labels.dtype == np.int8
    before = " " if tokenizer else ""
    tokens, labels = [], []
    for sentence in sentences:
        for word, tag in sentence:
            ids = made.backend.encode(before + word).ids
            tokens += ids
            labels += [names.index(tag)] + [INSIDE_WORD] * (len(ids) - 1)
        tokens.append(made.end_id)
        labels.append(NO_LABEL)
    assert store.tokens.tolist() == tokens
    assert store.labels.tolist() == labels
    assert store.num_lost_words == 0
    assert [end for end, token in enumerate(tokens) if token == made.end_id] == store.ends.tolist()


def test_tokenizing_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    corpus, made, store = tagged_store(tmp_path / "a.conll", sentences_of_names(300))
    monkeypatch.setattr("plimsoll.data.tokens.store._BATCH_BYTES", 500)
    monkeypatch.setattr("plimsoll.data.tokens.store._SHARD_BYTES", 2000)
    monkeypatch.setattr("plimsoll.data.samples.tags._PIECE_WORDS", 4)

    def stop(stage: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(corpus, made, tmp_path / "other", stop)
    assert list((tmp_path / "other").glob("*/done.json"))
    again = tokenize(corpus, made, tmp_path / "other")
    for name in ("tokens.bin", "ends.bin", "labels.bin"):
        assert (again.folder / name).read_bytes() == (store.folder / name).read_bytes()


def test_a_word_without_a_token_is_lost_and_counted(tmp_path: Path):
    _, made, store = tagged_store(tmp_path / "a.conll", [[("Ada", "B"), ("\u00ad", "O"), ("slept", "O")]])
    assert (store.num_lost_words, len(store.tokens)) == (1, 3)
    assert store.labels is not None
    assert store.labels.tolist() == [0, 1, NO_LABEL]
    assert WordEncoder(made.backend).encode([["", "Ada"]])[1].tolist() == [0, 1]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(2, 9), st.data())
def test_each_token_belongs_to_the_window_in_which_it_is_farthest_from_an_edge(lengths, sequence_length, data):
    stride = data.draw(st.integers(1, sequence_length))
    with tempfile.TemporaryDirectory() as name:
        store = store_of_lengths(Path(name), lengths)
        spans = cut_texts(store, sequence_length, stride=stride)
        ids = np.arange(len(spans))
        starts, lens = spans.places(ids)
        first, stop = spans.own_ranges(ids)
        parents = spans.parents(ids)
    owners = {}
    for span in ids.tolist():
        for place in range(int(starts[span] + first[span]), int(starts[span] + stop[span])):
            assert place not in owners
            owners[place] = span
    begin = 0
    for text, length in enumerate(lengths):
        for place in range(begin, begin + length):
            found = []
            for span in np.flatnonzero(parents == text).tolist():
                left, right = int(starts[span]), int(starts[span] + lens[span])
                if left <= place < right:
                    to_left = np.inf if left == begin else place - left
                    to_right = np.inf if right == begin + length else right - 1 - place
                    found.append((-min(to_left, to_right), span))
            assert owners[place] == min(found)[1]
        begin += length + 1


@pytest.mark.parametrize("stride", [None, 3, 6])
def test_every_word_counts_once_in_windows_of_any_order(tmp_path: Path, stride: int | None):
    sentences = sentences_of_names(40)
    corpus, made, store = tagged_store(tmp_path / "a.conll", sentences, train="bpe", vocab_size=270)
    spans = cut_texts(store, 8, stride=stride)
    samples = DocumentDataset(spans, TokenLabels(store, tags_of(corpus)), made.end_id)
    samples = pickle.loads(pickle.dumps(samples))
    counts = np.zeros(3, np.int64)
    for batch in iterate_once(samples, 7):
        fields = batch.fields
        assert fields["labels"].shape == fields["input_ids"].shape
        assert (fields["labels"][fields["attention_mask"] == 0] == IGNORED_LABEL).all()
        counts += np.bincount(fields["labels"][fields["labels"] >= 0].numpy(), minlength=3)
    assert counts.tolist() == list(corpus.tag_counts.values())


def test_labels_have_the_numbers_of_the_training_texts(tmp_path: Path):
    corpus, _, store = tagged_store(tmp_path / "a.conll", [[("b", "X"), ("c", "Z")]])
    spans = cut_texts(store, 8)
    assert TokenLabels(store, ["W", "X", "Y", "Z"]).of(spans, np.array([0])).tolist() == [1, 3]
    assert tags_of(corpus, ("W", "X", "Y", "Z")) == ("W", "X", "Y", "Z")


def test_tags_that_cannot_be_learnt_are_refused(tmp_path: Path):
    corpus = tagged_corpus(tmp_path / "a.conll", conll([[("b", "B-PER"), ("c", "O")]]))
    with pytest.raises(DataError, match=r"the tags 'B-PER', but the training data has only .*did you mean 'B-PERS'"):
        tags_of(corpus, ("B-PERS", "O"))
    with pytest.raises(DataError, match="at least 2 tags, but all words of the 1 texts have 'O'"):
        tags_of(tagged_corpus(tmp_path / "b.conll", "a O\n"))


def test_a_word_whose_tag_is_minus_100_has_no_label(tmp_path: Path):
    _, _, store = tagged_store(tmp_path / "a.conll", [[("Ada", "B-X"), ("saw", "-100"), ("it", "O")]])
    assert store.tag_names == ("B-X", "O")
    assert np.asarray(store.labels).tolist() == [0, NO_LABEL, 1, NO_LABEL]  # the last label belongs to the end token
    corpus = tagged_corpus(tmp_path / "b.conll", "a -100\nb -100\n")
    with pytest.raises(DataError, match=r"no word of the 1 texts has a tag \(-100 means no tag\)"):
        tags_of(corpus)
