"""The stages of a job's data: the cache names of their stores, and the reuse of stores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from plimsoll.data import pipeline as module
from plimsoll.data.pipeline import (
    CHOSEN_SPANS,
    KNOWN_NAMES,
    LABELS,
    PACKS,
    REPEATED,
    SIDE,
    SIDES,
    SPANS,
    STREAM,
    TEXTS,
    TOKENIZER,
    TOKENS,
    VALIDATION_TEXTS,
    Pipeline,
    Stage,
    reading_of,
)
from plimsoll.data.prepare import prepare
from plimsoll.files.checksums import MANIFEST
from plimsoll.records.job import Job
from tagged_files import conll, sentences_of_names

WORDS = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "good", "text", "number", "words", "to", "train", "on", ".", ","]
TAGGED = {"task": "token-classification", "model": "lstm", "data": {"train": "tags.conll"}}
OTHER_FILE = {"validation": "other/*/*.txt"}
CLASSES = {"task": "classification"}
JOBS: dict[str, dict] = {
    "windows": {},
    "windows, texts held out": {"data": {"validation": 0.2}},
    "windows, with a stride, of a tokenizer with a template": {"tokenizer": "template", "data": {"stride": 8}},
    "windows, of a file of their own": {"data": OTHER_FILE},
    "streams, texts held out": {"model": "lstm", "data": {"order": "streams", "validation": 0.3}},
    "streams, of a file of their own": {"model": "lstm", "data": {"order": "streams", **OTHER_FILE}},
    "packed": {"data": {"pack": True, "validation": 0.2}},
    "windows that end at borders": {"data": {"borders": "sentence", "validation": 0.2}},
    "classes of folders, truncated": {**CLASSES, "data": {"long_texts": "truncate", "validation": 0.2}},
    "classes of folders, windows": {**CLASSES, "tokenizer": "template", "data": {"validation": 0.2}},
    "classes of folders, of a file of their own": {**CLASSES, "data": OTHER_FILE},
    "classes of a column": {**CLASSES, "data": {"train": "rows.jsonl", "label": "kind", "validation": 0.2}},
    "classes, tokenized on the fly": {
        **CLASSES,
        "data": {"on_the_fly": True, "long_texts": "truncate", "validation": 0.2},
    },
    "tags": {**TAGGED, "data": {**TAGGED["data"], "validation": 0.2}},
    "tags, of a file of their own": {**TAGGED, "data": {**TAGGED["data"], "validation": "tags-other.conll"}},
    "words": {"tokenizer": {"train": "words", "vocab_size": 12}},
}


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder with texts of all kinds, in which the test runs."""
    for folder, nums in (("data", range(8)), ("other", range(8, 12))):
        for label, word in (("ham", "good"), ("spam", "buy")):
            for number in nums:
                path = tmp_path / folder / label / f"{number}.txt"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{word} text number {number}, with words to train on. " * (number + 1))
    rows = [{"text": f"a text of row {number}", "kind": "ab"[number % 2]} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tags.conll").write_text(conll(sentences_of_names(30)))
    (tmp_path / "tags-other.conll").write_text(conll(sentences_of_names(10, seed=1)))
    backend = tokenizers.Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", 1), ("[SEP]", 2)]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    (tmp_path / "template").mkdir()
    backend.save(str(tmp_path / "template" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "sep_token": "[SEP]", "cls_token": "[CLS]"}
    (tmp_path / "template" / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "[PAD]"}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job_of(fields: dict) -> Job:
    given = {"model": "gpt2", "tokenizer": {"vocab_size": 270}, "sequence_length": 16, "batch_size": 4, **fields}
    return Job.from_fields(given | {"data": {"train": "data", **fields.get("data", {})}})


def kept(cache: Path) -> dict[str, dict]:
    """Return the facts and files of each store of a cache, by name.

    Indexes and converted files have their file lists as names, because their folder names depend on times and paths.
    """
    stores = {}
    for folder in sorted(cache.iterdir()):
        if folder.is_dir():
            manifest = json.loads((folder / MANIFEST).read_text())
            facts = {key: fact for key, fact in manifest["facts"].items() if key not in {"mtimes", "stored"}}
            kind, _, _ = folder.name.partition("-")
            is_named_by_times = kind in {"index", "packed"}
            name = f"{kind} {manifest['files']}" if is_named_by_times else folder.name
            stores[name] = json.loads(json.dumps(facts | {"files": manifest["files"]}).replace(str(cache.parent), "."))
    return dict(sorted(stores.items()))


def test_the_cache_has_the_names_and_facts_that_it_always_had(texts: Path, golden, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizers, "__version__", "0")  # a part of the name of a trained tokenizer
    # a part of the name of a loaded tokenizer
    monkeypatch.setattr("plimsoll.data.tokens.given_tokenizer.version", lambda _: "0")
    found = {}
    for name, fields in JOBS.items():
        cache = texts / f"cache {len(found)}"
        prepared = prepare(job_of(fields), cache)
        found[name] = {"key": prepared.key} | kept(cache)
    lines = [
        f"{name}: {store}: {json.dumps(facts, ensure_ascii=False)}"
        for name, stores in found.items()
        for store, facts in stores.items()
    ]
    golden("cache.txt", "\n".join(lines) + "\n")


def test_a_stage_takes_only_what_comes_before_it():
    stages = [value for value in vars(module).values() if isinstance(value, Stage)]
    for number, stage in enumerate(stages):
        assert set(stage.takes) <= set(stages[:number]), stage.name
    assert len({stage.name for stage in stages}) == len(stages) == 14


def test_what_is_in_the_cache_is_not_made_again(texts: Path):
    told: list[str] = []
    pipeline = Pipeline(job_of(JOBS["packed"]), texts / "cache", lambda stage, done, total: told.append(stage))
    assert not pipeline.is_there(TOKENS)
    assert set(told) == {"index", "tokenizer"}  # the folder name of tokens follows from their inputs
    packs = pipeline.run(PACKS)
    assert list(dict.fromkeys(told)) == ["index", "tokenizer", "tokens", "spans", "packs"]
    assert pipeline.run(PACKS) is packs
    told.clear()
    again = Pipeline(job_of(JOBS["packed"]), texts / "cache", lambda stage, done, total: told.append(stage))
    assert again.is_there(PACKS)
    assert again.run(PACKS).members.tolist() == packs.members.tolist()
    assert not told


def test_other_texts_get_other_tokens_of_the_same_tokenizer(texts: Path):
    pipeline = Pipeline(job_of(JOBS["classes of folders, of a file of their own"]), texts / "cache")
    tokens, labels, other = pipeline.run(TOKENS), pipeline.run(LABELS), pipeline.run(VALIDATION_TEXTS)
    assert other is not None
    known = {TEXTS: other, TOKENIZER: pipeline.run(TOKENIZER), KNOWN_NAMES: labels.names}
    beside = pipeline.replacing(known)
    assert beside.run(TOKENIZER) is pipeline.run(TOKENIZER)
    assert len(beside.run(TOKENS).ends) == 8 < len(tokens.ends) == 16
    assert beside.run(LABELS).names == labels.names
    assert pipeline.run(TOKENS) is tokens


def test_the_samples_of_a_side_are_of_the_spans_of_all_texts(texts: Path):
    pipeline = Pipeline(job_of(JOBS["packed"]), texts / "cache")
    spans = pipeline.run(SPANS)
    sides = [pipeline.replacing({SIDE: side}) for side in pipeline.run(SIDES)]
    assert [side.run(SPANS) for side in sides] == [spans, spans]
    assert sum(len(side.run(CHOSEN_SPANS)) for side in sides) == len(pipeline.run(CHOSEN_SPANS)) == len(spans)
    assert sum(len(side.run(STREAM).tokens) for side in sides) == len(pipeline.run(STREAM).tokens)


@pytest.mark.parametrize(("share", "num_texts"), [(None, 16), (0.0, 16), (0.5, 1)])
def test_where_nothing_is_held_out_nothing_is_trained_on_twice(texts: Path, share: float | None, num_texts: int):
    train = "data" if num_texts > 1 else "data/ham/0.txt"
    assert Pipeline(job_of({"data": {"train": train, "validation": share}}), texts / "cache").run(REPEATED) == 0


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "-stream"),
        ({"data": {"stride": 8}}, "-stream"),
        ({"model": "lstm", "data": {"order": "streams"}}, "-stream"),
        ({"data": {"pack": True}}, ""),
        ({"data": {"borders": "sentence"}}, "-borders"),
        ({"task": "classification"}, ""),
        ({"task": "classification", "data": {"borders": "paragraph"}}, "-borders"),
    ],
    ids=str,
)
def test_texts_end_to_end_are_stored_with_what_is_around_them(texts: Path, fields: dict, kind: str):
    pipeline = Pipeline(job_of({"tokenizer": "template"} | fields), texts / "cache")
    folder = pipeline.run(TOKENS).folder
    assert folder.name == f"tokens-{pipeline.run(TEXTS).key[:16]}-{pipeline.run(TOKENIZER).key[:16]}{kind}"
    assert reading_of(pipeline.job).unit == "document"
