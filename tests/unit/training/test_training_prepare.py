"""The process that prepares data: its refusals before and after reading, and its report."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plimsoll.data.prepare import Prepared, PreparedText, prepare
from plimsoll.device.process import private_bytes
from plimsoll.errors import BudgetError, DataError, EmbeddingError, InputError, RecordError
from plimsoll.records.device import Budget
from plimsoll.records.job import Job
from plimsoll.records.plan import micro_batch_plan
from plimsoll.records.run import GradientReach
from plimsoll.training.prepare import data_sentence, prepare_run
from plimsoll.training.run_directory import RunDirectory
from small_runs import small_job

NewRun = Callable[..., RunDirectory]


def test_tags_of_which_only_some_are_of_entities_are_told_before_the_training(tmp_path):
    (tmp_path / "a.conll").write_text("Ada B-PER\nBob PER\nslept O\n\n" * 9)
    fields = {"model": "lstm", "task": "token-classification", "tokenizer": {"train": "words"}, "batch_size": 2}
    job = Job.from_fields(fields | {"data": str(tmp_path / "a.conll")})
    said = data_sentence(prepare(job, tmp_path / "cache"))
    assert "; 3 tags; entity F1 is left out, because some tags have a prefix" in said
    assert "name 'PER' as those" in said


def test_a_tokenizer_that_does_not_fit_the_budget_is_refused_before_it_is_trained(tmp_path):
    draw = random.Random(0)
    text = tmp_path / "log.txt"
    text.write_text("\n".join(f"request {draw.getrandbits(64):016x} served" for _ in range(80_000)))
    budget_bytes = private_bytes() + (32 << 20)
    directory = RunDirectory.create(tmp_path / "run", force=False)
    directory.write_job(small_job(text, budget={"device": budget_bytes}))
    with pytest.raises(BudgetError, match=r"training the tokenizer takes about .* the budget of .* left: raise it"):
        prepare_run(directory.path, tmp_path / "cache", quiet=True)
    assert not directory.prepared.exists()


def test_a_budget_beyond_the_machine_is_refused_before_the_data_are_prepared(text, tmp_path):
    directory = RunDirectory.create(tmp_path / "run", force=False)
    directory.write_job(small_job(text, budget={"device": 1 << 52}))
    with pytest.raises(BudgetError, match=r"a budget of 4\.0 PiB is more than .* has, .*: give that or less"):
        prepare_run(directory.path, tmp_path / "cache", quiet=True)
    assert not (tmp_path / "cache").exists()


def prepared_of(*, reach: GradientReach | None = None, labels: tuple[str, ...] = (), **changes: Any) -> Prepared:
    fields = {"corpus_key": "k", "index_folder": "i", "num_documents": 1234, "num_bytes": 99_999, "num_samples": 2345}
    train = PreparedText.model_validate(fields | {"num_skipped": 0, "skipped": ()} | changes)
    return Prepared(
        key="k", train=train, tokenizer_folder="t", vocab_size=300, end_id=0, label_names=labels, gradient_reach=reach
    )


PLAIN = "data: 1,234 texts; 2,345 samples"


@pytest.mark.parametrize(
    ("prepared", "sentence"),
    [
        (prepared_of(), PLAIN),
        (prepared_of(num_tokens=34_567), "data: 1,234 texts; 34,567 tokens; 2,345 samples"),
        (prepared_of(labels=("a", "b", "c"), labels_folder="l"), f"{PLAIN}; 3 classes"),
        (prepared_of(labels=("O", "B-PER", "I-PER")), f"{PLAIN}; 3 tags"),
        (prepared_of(labels=("B-PER", "PER"), labels_folder="l"), f"{PLAIN}; 2 classes"),  # no tags, but classes
        (prepared_of(num_long_texts=1111), f"{PLAIN}; 1,111 texts longer than a sample, cut into windows"),
        (
            prepared_of(num_long_texts=1111, num_truncated=1111, num_dropped_tokens=5678),
            f"{PLAIN}; 1,111 texts longer than a sample, 5,678 tokens of them dropped",
        ),
        (prepared_of(num_lost_words=1001), f"{PLAIN}; 1,001 words without a token, whose tags are not learned"),
        (prepared_of(num_cut_inside=1002), f"{PLAIN}; 1,002 windows that end at no border"),
        (
            prepared_of(reach=GradientReach(most_tokens=2047, mean_tokens=1024.26)),
            f"{PLAIN}; gradients reach back 1,024.3 tokens on average, 2,047 at most",
        ),
        (
            prepared_of(num_skipped=1003, skipped=("a.txt: torn", "b.txt: torn")),
            f"{PLAIN}; 1,003 files or rows left out, the first: a.txt: torn",
        ),
    ],
)
def test_what_is_trained_on_is_said_in_a_line_and_what_is_not(prepared: Prepared, sentence: str) -> None:
    assert data_sentence(prepared) == sentence


def test_data_are_prepared_anew_unless_it_is_again_and_quietly_if_asked_to(
    new_run: NewRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = new_run()
    expected = Prepared.load(directory.prepared)
    directory.prepared.unlink()
    prepare_run(directory.path, tmp_path / "cache", quiet=True)
    assert capsys.readouterr().err == ""
    assert Prepared.load(directory.prepared).key == expected.key
    directory.prepared.unlink()
    with pytest.raises(RecordError, match=r"prepared\.json"):
        prepare_run(directory.path, tmp_path / "cache", quiet=True, again=True)


@pytest.mark.parametrize(
    ("pins", "forbids"), [(("packing",), ()), ((), ("no_such_technique",))], ids=["pinned", "forbidden"]
)
def test_a_constraint_that_cannot_be_met_is_refused_before_the_data_are_prepared(
    new_run: NewRun, tmp_path: Path, pins: tuple[str, ...], forbids: tuple[str, ...]
) -> None:
    directory = new_run()
    with pytest.raises(InputError):
        prepare_run(directory.path, tmp_path / "cache", quiet=True, pins=pins, forbids=forbids)
    assert not (tmp_path / "cache").exists()


def test_what_the_data_are_too_little_for_is_said_before_a_plan_is_made(new_run: NewRun, tmp_path: Path) -> None:
    directory = new_run(batch_size=5000)
    with pytest.raises(DataError, match="5000"):
        prepare_run(directory.path, tmp_path / "cache", quiet=True)


def test_word_vectors_must_be_the_same_when_a_run_goes_on(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vectors = tmp_path / "vectors.txt"
    before = "ship 1 2 3 4 5 6 7 8\nline 8 7 6 5 4 3 2 1\n"
    vectors.write_text(before)
    directory = RunDirectory.create(tmp_path / "run", force=False)
    tokenizer = {"train": "words", "vocab_size": 300}
    directory.write_job(small_job(text, tokenizer=tokenizer, embeddings={"path": str(vectors)}))
    micro_batch_plan(Budget(), (8,)).save(directory.plan)
    prepare_run(directory.path, tmp_path / "cache", quiet=False)
    first = Prepared.load(directory.prepared)
    assert first.vectors_digest is not None
    assert first.vectors_folder is not None
    assert [line[:5] for line in capsys.readouterr().err.splitlines()[-2:]] == ["data:", "vecto"]
    prepare_run(directory.path, tmp_path / "cache", quiet=True, again=True)
    again = Prepared.load(directory.prepared)
    assert again.model_copy(update={"peak_bytes": first.peak_bytes}) == first  # the peak is measured
    vectors.write_text("ship 2 2 3 4 5 6 7 8\nline 8 7 6 5 4 3 2 1\n")
    with pytest.raises(EmbeddingError, match=rf"then {first.vectors_digest}\) are not what they were: put the file"):
        prepare_run(directory.path, tmp_path / "cache", quiet=True, again=True)
    prepare_run(directory.path, tmp_path / "cache", quiet=True)
    assert Prepared.load(directory.prepared).vectors_digest != first.vectors_digest
    vectors.write_text(before)
    with pytest.raises(EmbeddingError, match="are not what they were"):
        prepare_run(directory.path, tmp_path / "cache", quiet=True, again=True)
