"""Trainings on tables, by length, packed and tokenized on the fly, and `plimsoll data` as a new user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from end_to_end.commands import (
    CORPUS,
    assert_each_sample_once,
    assert_same_bits,
    kill_all,
    learned,
    plimsoll,
    start,
    steps_of,
    trained,
    wait_until,
    write_job,
)

NUM_STEPS = 12
WAYS = {
    "by length": {"order": "by_length"},
    "on the fly": {
        "on_the_fly": True, "long_texts": "truncate", "order": "by_length", "workers": 2,
        "augment": {"delete_word": 0.1, "swap": 0.1},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a table of paragraphs from the standard library's source, labelled by their length."""
    path = tmp_path_factory.mktemp("table") / "sources.jsonl"
    texts = [
        text for file in sorted(CORPUS.glob("*.py")) for text in file.read_text("utf-8").split("\n\n") if text.strip()
    ]
    rows = [{"text": text, "size": "long" if len(text) > 100 else "short"} for text in texts[:400]]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def job_of(folder: Path, table: Path, **data: object) -> Path:
    return write_job(
        folder / "job.yaml", task="classification", steps=NUM_STEPS, batch_size=16, sequence_length=32,
        data={"train": str(table), "label": "size", "validation": 0.1, **data},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_was_killed_goes_on_with_the_same_batches(way: str, table: Path, tmp_path: Path):
    job, cache = job_of(tmp_path, table, **WAYS[way]), tmp_path / "cache"
    trained(job, "--out", tmp_path / "undisturbed", "--cache", cache, "--no-plan")
    run = tmp_path / "run"
    process = start("train", job, "--out", run, "--cache", cache, "--no-plan", "--json")
    wait_until(lambda: len(steps_of(run)) >= 5, process)
    kill_all(process)
    trained("--resume", "--out", run)
    assert_same_bits(learned(tmp_path / "undisturbed"), learned(run))
    assert_each_sample_once(steps_of(run), NUM_STEPS)


@pytest.mark.slow
def test_batches_of_so_many_tokens_differ_in_samples(table: Path, tmp_path: Path):
    job = write_job(
        tmp_path / "job.yaml", task="classification", steps=NUM_STEPS, batch_tokens=256, sequence_length=32,
        data={"train": str(table), "label": "size", "order": "by_length"},
    )  # fmt: skip
    job.write_text(job.read_text().replace("batch_size: 16\n", ""))
    trained(job, "--out", tmp_path / "run", "--cache", tmp_path / "cache", "--no-plan")
    sizes = [step.num_samples for step in steps_of(tmp_path / "run")]
    assert sizes[0] == min(sizes) == 8  # the longest first
    assert max(sizes) > 8
    assert_each_sample_once(steps_of(tmp_path / "run"), NUM_STEPS)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param({"pack": True}, marks=pytest.mark.slow),
        {"borders": "sentence", "order": "by_length"},
        pytest.param({"stride": 32}, marks=pytest.mark.slow),
    ],
)
def test_language_models_learn_from_every_shape(data: dict[str, object], tmp_path: Path):
    model = {"architecture": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2}
    source = {"train": str(CORPUS / "*.py"), "validation": 0.1, **data}
    job = write_job(tmp_path / "job.yaml", model=model, data=source, steps=NUM_STEPS, precision="fp32")
    trained(job, "--out", tmp_path / "run", "--cache", tmp_path / "cache", "--no-plan")
    steps = steps_of(tmp_path / "run")
    assert steps[-1].loss < steps[0].loss
    assert_each_sample_once(steps, NUM_STEPS)


def test_a_recurrent_model_cannot_be_packed(tmp_path: Path):
    job = write_job(tmp_path / "job.yaml", data={"train": str(CORPUS / "*.py"), "pack": True})
    done = plimsoll("train", job, "--out", tmp_path / "run")
    assert done.returncode == 2
    assert "error: data.pack: RecurrentLanguageModel takes no position_ids" in done.stderr
    assert not (tmp_path / "run" / "data").exists(), "it is said before the texts are read"


@pytest.mark.parametrize(
    ("verb", "record", "field"),
    [
        ("index", "corpus", "num_texts"),
        ("tokenize", "tokens", "num_tokens"),
        ("inspect", "data-inspection", "fillings"),
    ],
)
def test_what_a_command_says_of_a_corpus_is_one_record(verb: str, record: str, field: str, table: Path, tmp_path: Path):
    common = [table, "--set", "task=classification", "--set", "data.label=size", "--set", "tokenizer.vocab_size=400"]
    done = plimsoll("data", verb, *common, "--cache", tmp_path / "cache", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["record"] == record
    assert found[field]
    again = plimsoll("data", verb, *common, "--cache", tmp_path / "cache")
    assert again.returncode == 0
    assert f"{len(table.read_text().splitlines())}" in again.stdout


@pytest.mark.slow
def test_rates_are_told_for_each_stage(table: Path, tmp_path: Path):
    done = plimsoll("data", "bench", table, "--cache", tmp_path, "--set", "tokenizer.vocab_size=400", "--json")
    assert done.returncode == 0, done.stderr
    rates = json.loads(done.stdout)["rates"]
    assert [rate["stage"] for rate in rates] == ["read", "read", "tokenize", "feed", "feed"]
    assert all(rate["per_second"] > 0 for rate in rates)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.txt"], "there is no file or folder"),
        (["--set", "data.label=sice"], "did you mean"),
        (["--set", "data.labels=size"], "data.labels: unknown field; did you mean `label`?"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], message: str, table: Path, tmp_path: Path):
    texts = [] if arguments[0] == "absent.txt" else [table, "--set", "task=classification"]
    done = plimsoll("data", "inspect", *texts, *arguments, "--cache", tmp_path / "cache")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
