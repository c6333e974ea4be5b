"""Texts tokenized on demand have the same samples as texts tokenized once, also in workers."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from plimsoll.data.batches.augment import TokenAugmentation
from plimsoll.data.batches.augment_text import TextAugmentation
from plimsoll.data.batches.loader import Loader
from plimsoll.data.formats import Reading
from plimsoll.data.samples.text_windows import cut_texts
from plimsoll.data.samples.texts import DocumentDataset
from plimsoll.data.text.corpus import Corpus
from plimsoll.data.text.index import open_corpus
from plimsoll.data.tokens.on_the_fly import TextDataset
from plimsoll.data.tokens.store import tokenize
from plimsoll.data.tokens.tokenizer import Tokenizer, prepare_tokenizer
from plimsoll.errors import DataError
from plimsoll.records.augmentation import Augmentation
from plimsoll.records.job import TokenizerSource

LONGEST = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Corpus, Tokenizer, Path]:
    folder = tmp_path_factory.mktemp("texts")
    lines = ["one two three " * (number % 7) + f"number {number}" for number in range(60)]
    (folder / "a.txt").write_text("\n".join(lines))
    corpus = open_corpus((str(folder),), Reading(unit="line"), folder / "cache")
    return corpus, prepare_tokenizer(TokenizerSource(vocab_size=300), corpus, folder / "cache"), folder / "cache"


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("is_labelled", [True, False])
def test_samples_are_those_of_tokens_made_once(made, is_labelled: bool):
    corpus, tokenizer, cache = made
    labels = np.arange(len(corpus)) % 3 if is_labelled else None
    spans = cut_texts(tokenize(corpus, tokenizer, cache), LONGEST, long_texts="truncate", with_end=not is_labelled)
    once = DocumentDataset(spans, labels, tokenizer.end_id, pad_multiple=8)
    options = {"long_texts": "truncate", "pad_multiple": 8}
    fly = TextDataset(corpus, tokenizer.folder, labels, LONGEST, tokenizer.end_id, **options)
    assert len(fly) == len(once) == 60
    for ids in (np.arange(60), np.array([7, 3, 3])):
        assert equal(fly.batch(ids), once.batch(ids))
    assert fly.num_truncated >= spans.num_truncated > 0
    assert equal(fly[5], once[5])
    assert equal(fly.collate(fly.__getitems__([1, 2])), once.batch(np.array([1, 2])))


def test_a_text_that_is_too_long_is_an_error_in_numbers(made):
    corpus, tokenizer, _ = made
    dataset = TextDataset(corpus, tokenizer.folder, None, LONGEST, tokenizer.end_id)
    assert dataset.batch(np.array([0]))["input_ids"].shape[1] <= LONGEST
    with pytest.raises(
        DataError, match=r"text 6 has \d+ tokens, but a sample holds sequence_length = 12: set data.long"
    ):
        dataset.batch(np.array([6]))


def test_workers_read_the_same_and_their_truncations_are_counted(made):
    corpus, tokenizer, _ = made
    batches = []
    for workers in (0, 2):
        dataset = TextDataset(corpus, tokenizer.folder, None, LONGEST, tokenizer.end_id, long_texts="truncate")
        loader = Loader(dataset, 8, seed=1, workers=workers)
        batches.append(list(loader))
        loader.close()
        assert dataset.num_truncated > 0
    assert all(equal(one, other) for one, other in zip(*batches, strict=True))


def test_words_and_tokens_are_augmented_anew_in_each_epoch(made):
    corpus, tokenizer, _ = made
    config = Augmentation(delete_word=0.3, swap=0.3)
    tokens = TokenAugmentation(config, 5, tokenizer.special_ids, tokenizer.mask_id, LONGEST)
    dataset = TextDataset(
        corpus, tokenizer.folder, None, LONGEST, tokenizer.end_id, long_texts="truncate",
        words=TextAugmentation(config, 5), tokens=tokens,
    )  # fmt: skip
    ids = np.arange(20)
    assert equal(dataset.batch(ids, epoch=1), dataset.batch(ids, epoch=1))
    assert not equal(dataset.batch(ids, epoch=1), dataset.batch(ids, epoch=2))
    alone = dataset.batch(ids[7:8], epoch=1)["input_ids"][0]
    together = dataset.batch(ids, epoch=1)["input_ids"][7]
    length = min(len(alone), len(together))
    assert torch.equal(alone[:length], together[:length])


def test_it_is_pickled_as_where_things_are(made):
    corpus, tokenizer, _ = made
    dataset = TextDataset(corpus, tokenizer.folder, None, LONGEST, tokenizer.end_id, long_texts="truncate")
    dataset.batch(np.array([0]))
    raw = pickle.dumps(dataset)
    assert len(raw) < 2000
    assert equal(pickle.loads(raw).batch(np.arange(4)), dataset.batch(np.arange(4)))


def test_lengths_are_those_of_the_bytes(made):
    corpus, tokenizer, _ = made
    dataset = TextDataset(corpus, tokenizer.folder, None, LONGEST, tokenizer.end_id)
    assert dataset.lengths(np.array([0, 1])).tolist() == corpus.byte_lengths(np.array([0, 1])).tolist()
    short = TextDataset(corpus, tokenizer.folder, None, 2, tokenizer.end_id)
    assert short.lengths(np.array([6])).tolist() == [32]
