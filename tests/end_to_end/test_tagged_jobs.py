"""Taggers trained by `plimsoll train` on tagged words: they learn a rule, and resume after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from end_to_end.commands import (
    assert_each_sample_once,
    assert_same_bits,
    kill_all,
    learned,
    lines_of,
    plimsoll,
    start,
    steps_of,
    trained,
    wait_until,
    write_job,
)
from plimsoll.records.run import EvaluationLine
from tagged_files import LSTM, conll, sentences_of_names

NUM_STEPS = 80


@pytest.fixture
def names(tmp_path: Path) -> Path:
    path = tmp_path / "names.conll"
    path.write_text(conll(sentences_of_names(240)))
    return path


def job_of(folder: Path, source: Path, **changes: object) -> Path:
    data = {"train": str(source), "validation": 0.2, **changes.pop("data", {})}
    fields = {
        "task": "token-classification", "model": LSTM | {"dropout": 0.1}, "data": data, "steps": NUM_STEPS,
        "sequence_length": 8, "tokenizer": {"train": "words", "vocab_size": 100},
    }  # fmt: skip
    return write_job(folder / "job.yaml", **fields | changes)


def last_evaluation(run: Path) -> EvaluationLine:
    return [line for line in lines_of(run) if isinstance(line, EvaluationLine)][-1]


def test_a_tagger_learns_a_rule_on_windows_that_overlap(names: Path, tmp_path: Path):
    job = job_of(tmp_path, names, data={"stride": 6, "order": "by_length"})
    trained(job, "--out", tmp_path / "run", "--cache", tmp_path / "cache", "--no-plan")
    found = last_evaluation(tmp_path / "run")
    assert found.entity_f1 is not None
    assert found.entity_f1 > 0.9
    assert found.accuracy is not None
    assert found.accuracy > 0.9
    assert json.loads((tmp_path / "run/model/config.json").read_text())["label_names"] == ["B-NAME", "I-NAME", "O"]
    shown = plimsoll("report", tmp_path / "run")
    assert f"entity F1 {found.entity_f1:.1%}".split()[-1] in shown.stdout
    assert_each_sample_once(steps_of(tmp_path / "run"), NUM_STEPS)


@pytest.mark.slow
def test_a_tagger_that_was_killed_goes_on_to_the_same_bits(names: Path, tmp_path: Path):
    job, cache = job_of(tmp_path, names, steps=20), tmp_path / "cache"
    trained(job, "--out", tmp_path / "undisturbed", "--cache", cache, "--no-plan")
    run = tmp_path / "run"
    process = start("train", job, "--out", run, "--cache", cache, "--no-plan", "--json")
    wait_until(lambda: len(steps_of(run)) >= 5, process)
    kill_all(process)
    trained("--resume", "--out", run)
    assert_same_bits(learned(tmp_path / "undisturbed"), learned(run))
    assert_each_sample_once(steps_of(run), 20)


@pytest.mark.slow
def test_a_hugging_face_model_learns_from_rows_in_batches_of_so_many_tokens(tmp_path: Path):
    source = tmp_path / "names.jsonl"
    rows = [
        {"tokens": [word for word, _ in one], "ner_tags": [tag for _, tag in one]} for one in sentences_of_names(200)
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = {"architecture": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    job = job_of(
        tmp_path, source, model=model | {"intermediate_size": 32}, steps=60, batch_tokens=256, sequence_length=16,
        data={"text": "tokens", "label": "ner_tags", "order": "by_length", "long_texts": "truncate"},
    )  # fmt: skip
    job.write_text(job.read_text().replace("batch_size: 16\n", ""))
    trained(job, "--out", tmp_path / "run", "--cache", tmp_path / "cache", "--no-plan")
    found = last_evaluation(tmp_path / "run")
    assert found.accuracy is not None
    assert found.accuracy > 0.8  # O is 2 of 3 tags
    assert found.entity_f1 is not None
    config = json.loads((tmp_path / "run/model/config.json").read_text())
    assert config["architectures"] == ["BertForTokenClassification"]
    assert config["id2label"] == {"0": "B-NAME", "1": "I-NAME", "2": "O"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.pack=true"], "data.pack joins texts into rows, but token-classification takes them one by one"),
        (["data.label=ner_tags"], "has column numbers, not names, but 'ner_tags' is given"),
        (["task=classification", "data.label=2"], "it is plain text, which has no column '2'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(changes: list[str], message: str, names: Path, tmp_path: Path):
    options = [option for change in changes for option in ("--set", change)]
    done = plimsoll("data", "inspect", job_of(tmp_path, names), *options, "--cache", tmp_path / "cache")
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
