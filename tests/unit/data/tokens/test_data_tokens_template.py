"""The special tokens around a text: samples have the ids that transformers gives, also if texts are cut."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tokenizers
from tokenizers import models, processors
from transformers import AutoTokenizer

from made_tokenizers import KINDS, TEMPLATES, saved, with_template
from plimsoll.data.datasets import open_datasets
from plimsoll.data.prepare import prepare
from plimsoll.data.tokens.template import Template, template_of
from plimsoll.errors import DataError
from plimsoll.records.job import Job
from tagged_files import conll

# Real text of the standard library: lines of one module, with other scripts among them.
LINES = [line.strip() for line in Path(argparse.__file__).read_text(encoding="utf-8").splitlines() if line.strip()]
OTHERS = [
    "Éa dès l'été",
    "一二三。 四五",
    "x",
    "  two  spaces and\ttabs",
    "[SEP] and </s> written out",
    "\U0001f600 \u0416",
]
TEXTS = (OTHERS + [" ".join(LINES[place : place + 1 + place % 4]) for place in range(len(LINES))])[:600]


class Case(NamedTuple):
    folder: Path
    texts: Path
    theirs: Any


@pytest.fixture(scope="module", params=[(kind, is_on) for kind in KINDS for is_on in (True, False)], ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    kind, is_on = request.param
    place = tmp_path_factory.mktemp(kind)
    backend = KINDS[kind](TEXTS)
    folder = saved(place / "tokenizer", with_template(backend, TEMPLATES[kind]) if is_on else backend, kind)
    texts = place / "texts.jsonl"
    rows = [json.dumps({"text": text, "label": number % 2}) + "\n" for number, text in enumerate(TEXTS)]
    texts.write_text("".join(rows), encoding="utf-8")
    return Case(folder, texts, AutoTokenizer.from_pretrained(folder))


def samples_of(case: Case, **fields: Any) -> list[dict[str, list[int]]]:
    """Return the samples that a job trains on, as lists."""
    data = {"train": str(case.texts), **fields.pop("data", {})}
    given = {"model": "gpt2", "data": data, "tokenizer": {"path": str(case.folder)}, "sequence_length": 512, **fields}
    job = Job.from_fields(given)
    samples, _ = open_datasets(prepare(job, case.texts.parent / "cache"), job)
    return [
        {name: field.tolist() for name, field in sample.items()}
        for sample in samples.__getitems__([*range(len(samples))])
    ]


LABELLED: dict[str, Any] = {"task": "classification", "data": {"label": "label"}}


@pytest.mark.parametrize("how", [{}, {"on_the_fly": True, "long_texts": "stop"}], ids=["once", "on the fly"])
def test_texts_have_the_ids_that_transformers_gives(case: Case, how: dict):
    found = samples_of(case, **LABELLED | {"data": {"label": "label", **how}})
    assert [sample["input_ids"] for sample in found] == case.theirs(TEXTS)["input_ids"]
    assert [sample["labels"] for sample in found] == [number % 2 for number in range(len(TEXTS))]


@pytest.mark.parametrize("on_the_fly", [False, True])
@pytest.mark.parametrize("side", ["right", "left"])
def test_truncated_texts_keep_what_stands_around_them(case: Case, tmp_path: Path, on_the_fly: bool, side: str):
    kind = next(kind for kind in KINDS if kind in str(case.folder))
    backend = tokenizers.Tokenizer.from_str(case.theirs.backend_tokenizer.to_str())
    other = case._replace(folder=saved(tmp_path / "tokenizer", backend, kind, truncation_side=side))
    data = {"label": "label", "long_texts": "truncate", "on_the_fly": on_the_fly}
    found = samples_of(other, **LABELLED | {"data": data}, sequence_length=9)
    theirs = AutoTokenizer.from_pretrained(other.folder)(TEXTS, truncation=True, max_length=9)
    assert [sample["input_ids"] for sample in found] == theirs["input_ids"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stride", [None, 4])
def test_each_window_of_a_text_has_them(case: Case, stride: int | None):
    num_around = case.theirs.num_special_tokens_to_add()
    data = {"label": "label", "stride": stride}
    found = samples_of(case, **LABELLED | {"data": data}, sequence_length=9)
    overlap = 9 - num_around - (stride or 9 - num_around)
    theirs = case.theirs(TEXTS, truncation=True, max_length=9, stride=overlap, return_overflowing_tokens=True)
    assert [sample["input_ids"] for sample in found] == theirs["input_ids"]


def test_words_with_tags_have_them_without_a_label(case: Case, tmp_path: Path):
    sentences = [[(word, "AB"[len(word) % 2]) for word in text.split()] for text in TEXTS[5:200]]
    (tmp_path / "texts.conll").write_text(conll(sentences), encoding="utf-8")
    found = samples_of(case._replace(texts=tmp_path / "texts.conll"), task="token-classification")
    if "byte_level" in str(case.folder):  # transformers must be told that words follow spaces
        theirs = AutoTokenizer.from_pretrained(case.folder)
        theirs.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    else:
        theirs = case.theirs
    words = [[word for word, _ in sentence] for sentence in sentences]
    encoded = theirs(words, is_split_into_words=True)
    assert [sample["input_ids"] for sample in found] == encoded["input_ids"]
    for number, sample in enumerate(found):
        ids, before = encoded.word_ids(number), [None, *encoded.word_ids(number)]
        firsts = [word is not None and word != last for word, last in zip(ids, before, strict=False)]
        assert [label >= 0 for label in sample["labels"]] == firsts


def test_texts_end_to_end_have_them_once_a_text(case: Case):
    found = samples_of(case, sequence_length=16)
    ids = [number for sample in found for number in sample["input_ids"]]
    template = template_of(case.theirs.backend_tokenizer)
    end = [] if template.suffix else [end_id_of(case)]
    expected = [number for text in case.theirs(TEXTS)["input_ids"] for number in (*text, *end)]
    assert ids == expected[: len(ids)]
    assert len(expected) - len(ids) < 16
    assert [sample["labels"] for sample in found] == [sample["input_ids"] for sample in found]


def end_id_of(case: Case) -> int:
    theirs = case.theirs
    return theirs.eos_token_id if theirs.eos_token_id is not None else theirs.sep_token_id


@pytest.mark.parametrize("how", [{"borders": "sentence"}, {"on_the_fly": True, "long_texts": "stop"}], ids=str)
def test_texts_of_a_language_model_have_them_and_their_end(case: Case, how: dict):
    template = template_of(case.theirs.backend_tokenizer)
    end = [] if template.suffix else [end_id_of(case)]
    expected = [[*text, *end] for text in case.theirs(TEXTS)["input_ids"]]
    found = samples_of(case, data=how)
    assert [sample["input_ids"] for sample in found] == expected
    assert [sample["labels"] for sample in found] == expected


def test_packed_texts_have_them(case: Case):
    template = template_of(case.theirs.backend_tokenizer)
    end = [] if template.suffix else [end_id_of(case)]
    expected = sorted([*text, *end] for text in case.theirs(TEXTS)["input_ids"])
    texts = []
    for sample in samples_of(case, data={"pack": True}):
        begins = [place for place, position in enumerate(sample["position_ids"]) if position == 0]
        parts = [sample["input_ids"][begin:end] for begin, end in zip(begins, [*begins[1:], None], strict=True)]
        texts += [part for part in parts if set(part) != {case.theirs.pad_token_id}]
        assert all(sample["labels"][begin] == -100 for begin in begins)
    assert sorted(texts) == expected


def test_a_job_can_leave_them_out(case: Case):
    source = {"path": str(case.folder), "special_tokens": False}
    found = samples_of(case, **LABELLED, tokenizer=source)
    assert [sample["input_ids"] for sample in found] == case.theirs(TEXTS, add_special_tokens=False)["input_ids"]


def test_a_long_text_has_the_tokens_of_the_whole(case: Case, tmp_path: Path):
    """A long text has the same tokens as if it was encoded at once.

    It is encoded in parts of 64 KiB, and some tokenizers would add a space before the first word of each part.
    """
    (tmp_path / "long.txt").write_text(text := " ".join(TEXTS * 3), encoding="utf-8")
    assert len(text) > 2 * (64 << 10)
    job = Job.from_fields({"model": "gpt2", "data": str(tmp_path / "long.txt"), "tokenizer": str(case.folder)})
    prepared = prepare(job, tmp_path / "cache")
    samples, _ = open_datasets(prepared, job)
    ids = samples.batch(np.arange(len(samples)))["input_ids"].flatten().tolist()
    assert ids == case.theirs(text)["input_ids"][: len(ids)]


def test_what_is_around_an_empty_text_stays():
    template = Template((1,), (2, 3))
    rows, lengths = template.around(np.array([7, 8, 9]), np.array([2, 0, 1]))
    assert rows.tolist() == [1, 7, 8, 2, 3, 1, 2, 3, 1, 9, 2, 3]
    assert lengths.tolist() == [5, 3, 4]
    assert template.around(np.array([7]), np.array([1]), -100)[0].tolist() == [-100, 7, -100, -100]
    assert Template().around(np.array([7]), np.array([1]))[0].tolist() == [7]
    with pytest.raises(DataError, match="sequence_length = 3 leaves no space for a text next to the 3 special tokens"):
        template.room(3)


def word_level(**processor: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[CLS]": 1, "[SEP]": 2, "b": 3}, unk_token="a"))
    backend.add_special_tokens(["[CLS]", "[SEP]"])
    if processor:
        backend.post_processor = processors.TemplateProcessing(special_tokens=[("[CLS]", 1), ("[SEP]", 2)], **processor)
    return backend


@pytest.mark.parametrize(
    ("single", "prefix", "suffix"),
    [("$A", (), ()), ("[CLS] [CLS] $A", (1, 1), ()), ("$A [SEP] [CLS]", (), (2, 1)), ("[CLS] $A [SEP]", (1,), (2,))],
)
def test_a_template_is_found_by_trying(single: str, prefix: tuple[int, ...], suffix: tuple[int, ...]):
    assert template_of(word_level(single=single)) == Template(prefix, suffix)


def test_a_tokenizer_that_knows_no_common_word_is_tried_with_one_of_its_own():
    backend = tokenizers.Tokenizer(models.WordLevel({"zz": 0, "[CLS]": 1}, unk_token="?"))
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    assert template_of(backend) == Template((1,), ())


@pytest.mark.parametrize(
    ("single", "message"),
    [
        ("$A [SEP] $A", "which is more than special tokens before and after the text"),
        (
            "$A:0 [SEP]:2",
            r"gives the tokens of one text the types \[0, 2\], but training passes no token types to the model",
        ),
    ],
)
def test_what_else_a_tokenizer_does_is_refused(single: str, message: str):
    with pytest.raises(DataError, match=f"{message}.*: set tokenizer.special_tokens=false to"):
        template_of(word_level(single=single))
