"""The pass of a teacher over the samples: its answers, once, in micro-batches that fit, and resumed if interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distillations import gradients_of, largest_difference
from plimsoll.data.datasets import open_datasets
from plimsoll.data.prepare import prepare
from plimsoll.data.samples.teacher_cache import LOG_P, WORDS, TeacherCacheFiles, open_teacher_cache
from plimsoll.device.base import backend_for
from plimsoll.errors import OutOfMemoryError
from plimsoll.models.assemble import assemble, fingerprint, teacher_cache_folder
from plimsoll.models.build import save_model
from plimsoll.models.distillation.chunked import softened
from plimsoll.models.recurrent.model import build_recurrent
from plimsoll.planning.teacher_loss import loss_for, teacher_of
from plimsoll.records.job import Job
from plimsoll.records.prepared import Prepared
from plimsoll.step.failpoints import armed
from plimsoll.training import teacher_cache
from plimsoll.training.teacher_cache import prepare_teacher_cache

KEPT = 300


@pytest.fixture(scope="module", params=["language-modeling", "borders", "classification", "token-classification"])
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Prepared]:
    folder = tmp_path_factory.mktemp("with-teacher")
    task = "language-modeling" if request.param == "borders" else request.param
    lines = [f"the line {n} of {'a longer' if n % 3 else 'this'} text" for n in range(40)]
    data: dict[str, Any] = {"train": str(folder / "a.txt"), "unit": "line", "validation": 0.2}
    if request.param == "borders":
        data["borders"] = "sentence"
    (folder / "a.txt").write_text("\n".join(lines))
    if task == "classification":
        rows = [f"{line},{'odd' if n % 2 else 'even'}" for n, line in enumerate(lines)]
        (folder / "a.csv").write_text("text,label\n" + "\n".join(rows))
        data = {"train": str(folder / "a.csv"), "label": "label", "validation": 0.2}
    if task == "token-classification":
        words = ["\n".join(f"{word} {'N' if word.isdigit() else 'O'}" for word in line.split()) for line in lines]
        (folder / "a.conll").write_text("\n\n".join(words) + "\n")
        data = {"train": str(folder / "a.conll"), "validation": 0.2}
    fields = {
        "model": {"architecture": "lstm", "embedding_size": 8, "hidden_size": 8}, "task": task, "data": data,
        "tokenizer": {"vocab_size": KEPT}, "sequence_length": 12, "batch_size": 4, "steps": 2,
    }  # fmt: skip
    prepared = prepare(Job.from_fields(fields), folder / "cache")
    torch.manual_seed(7)
    sizes = {"vocab_size": prepared.vocab_size, "num_labels": prepared.num_labels, "embedding_size": 12}
    if task == "token-classification":
        teacher: nn.Module = build_recurrent({"architecture": "gru", **sizes, "hidden_size": 12, "is_tagger": True})
    else:
        teacher = build_recurrent({"architecture": "gru", **sizes, "hidden_size": 12})
    save_model(teacher, folder / "teacher")
    distill = {"teacher": str(folder / "teacher"), "cache": KEPT, "temperature": 3.0}
    return Job.from_fields(fields | {"distill": distill}), prepared


def made(case: tuple[Job, Prepared], **changes: Any) -> tuple[Job, Path]:
    """Run the teacher anew."""
    job, prepared = case
    assert job.distill is not None
    job = job.model_copy(update={"distill": job.distill.model_copy(update=changes)})
    prepare_teacher_cache(job, prepared, lambda: teacher_of(job, prepared, "cpu"), backend_for("cpu"))
    return job, teacher_cache_folder(job, prepared)


def rows_of(folder: Path) -> tuple[Any, Any]:
    rows = open_teacher_cache(folder)
    return None if rows.words is None else np.array(rows.words), np.array(rows.log_p)


def test_with_all_words_a_step_learns_what_the_teacher_itself_teaches(case: tuple[Job, Prepared]) -> None:
    job, _ = made(case)
    prepared, found = case[1], []
    assert job.distill is not None
    for cache in (job.distill.cache, None):
        one = job.model_copy(update={"distill": job.distill.model_copy(update={"cache": cache})})
        parts = assemble(one, prepared, "cpu")
        fields = parts.loader.peek().fields
        assert (LOG_P in fields) == (cache is not None)
        assert (WORDS in fields) == (cache is not None and not job.is_labelled)
        loss_for(one, prepared, "cpu")(parts.model, fields).backward()
        found.append(gradients_of(parts.model))
    assert largest_difference(*found) < 1e-4
    assert fingerprint(job, prepared)["distill.cache"] == str(KEPT)


def test_the_likeliest_words_are_kept(case: tuple[Job, Prepared]) -> None:
    job, folder = made(case, cache=5)
    words, log_p = rows_of(folder)
    if job.is_labelled:
        assert words is None
        np.testing.assert_allclose(np.exp(log_p).sum(axis=1), 1, rtol=1e-5)
        return
    assert words.shape[1] == log_p.shape[1] == 5
    assert (np.diff(log_p, axis=1) <= 0).all()
    samples, _ = open_datasets(case[1], job)
    lengths = samples.lengths(np.arange(len(samples)))
    assert len(words) == lengths.sum()


def test_what_is_there_is_not_asked_again(case: tuple[Job, Prepared]) -> None:
    job, _ = made(case)
    prepare_teacher_cache(job, case[1], lambda: pytest.fail("it was loaded"), backend_for("cpu"))


def test_other_samples_another_teacher_and_another_temperature_are_other_folders(case: tuple[Job, Prepared]) -> None:
    job, prepared = case
    assert job.distill is not None
    others = [job.model_copy(update={"distill": job.distill.model_copy(update=one)}) for one in (
        {"temperature": 1.0}, {"cache": 7}, {"form": "int8"},
    )]  # fmt: skip
    others.append(job.model_copy(update={"seed": 1}))
    folders = {teacher_cache_folder(one, prepared) for one in (job, *others)}
    assert len(folders) == 1 + len(others)
    same = job.model_copy(update={"distill": job.distill.model_copy(update={"hard": 0.1, "form": "memory"})})
    assert teacher_cache_folder(same, prepared) == teacher_cache_folder(job, prepared)


def test_a_batch_without_room_is_asked_in_halves(case: tuple[Job, Prepared]) -> None:
    expected = rows_of(made(case, cache=9)[1])
    with armed("evaluation", 1, 3):
        _, folder = made(case, cache=9, temperature=3.0 + 1e-12)
    _, log_p = rows_of(folder)
    np.testing.assert_allclose(log_p, expected[1], rtol=1e-4, atol=1e-5)
    with armed("evaluation", *range(1, 9)), pytest.raises(OutOfMemoryError, match="asked about 1 sample"):
        made(case, cache=9, temperature=3.0 + 2e-12)


def test_an_interrupted_pass_is_gone_on_with(case: tuple[Job, Prepared]) -> None:
    expected, asked = rows_of(made(case, cache=11)[1]), []
    job, prepared = case
    assert job.distill is not None
    job = job.model_copy(update={"distill": job.distill.model_copy(update={"cache": 11, "temperature": 3.0 + 1e-12})})

    def progress(stage: str, done: int, total: int) -> None:
        asked.append(done)
        if len(asked) == 2:
            raise KeyboardInterrupt

    def run() -> None:
        prepare_teacher_cache(job, prepared, lambda: teacher_of(job, prepared, "cpu"), backend_for("cpu"), progress)

    with pytest.raises(KeyboardInterrupt):
        run()
    run()
    assert asked[:3] == [4, 8, 12]
    _, log_p = rows_of(teacher_cache_folder(job, prepared))
    np.testing.assert_allclose(log_p, expected[1], rtol=1e-5, atol=1e-6)


def test_without_a_teacher_or_a_cache_nobody_is_asked(case: tuple[Job, Prepared]) -> None:
    job, prepared = case
    assert job.distill is not None
    for distill in (None, job.distill.model_copy(update={"cache": None})):
        given = job.model_copy(update={"distill": distill})
        prepare_teacher_cache(given, prepared, lambda: pytest.fail("it was loaded"), backend_for("cpu"))


def test_a_batch_without_room_is_halved_and_what_is_over_is_in_the_first_half(case: tuple[Job, Prepared]) -> None:
    job, prepared = case
    assert job.distill is not None
    told: list[tuple[int, int]] = []
    distill = job.distill.model_copy(update={"cache": 9, "temperature": 3.0 + 3e-12})
    job = job.model_copy(update={"distill": distill, "batch_size": 7})

    def progress(stage: str, done: int, total: int) -> None:
        told.append((done, total))

    with armed("evaluation", 1):
        prepare_teacher_cache(job, prepared, lambda: teacher_of(job, prepared, "cpu"), backend_for("cpu"), progress)
    num_samples = len(open_datasets(prepared, job)[0])
    assert told == [(min(done, num_samples), num_samples) for done in range(4, num_samples + 4, 4)]


def test_what_is_done_is_on_the_disk_every_so_many_samples(
    case: tuple[Job, Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_cache, "_SAMPLES_KEPT_AT_ONCE", 8)
    keep, kept = TeacherCacheFiles.keep, list[int]()

    def noted(files: TeacherCacheFiles) -> None:
        kept.append(files.num_done)
        keep(files)

    monkeypatch.setattr(TeacherCacheFiles, "keep", noted)
    job, _ = made(case, cache=9, temperature=3.0 + 4e-12)
    num_samples = len(open_datasets(case[1], job)[0])
    assert num_samples > 20
    assert sorted({*kept} - {num_samples}) == [*range(8, num_samples, 8)]


def test_words_are_the_same_however_few_positions_are_computed_at_once(
    case: tuple[Job, Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, folder = made(case, cache=9)
    if job.is_labelled:
        return
    words, log_p = rows_of(folder)
    lengths: list[int] = []

    def noted(logits: torch.Tensor, temperature: float) -> torch.Tensor:
        lengths.append(logits.shape[1])
        return softened(logits, temperature)

    monkeypatch.setattr(teacher_cache, "softened", noted)
    for number, (chunk_numbers, most) in enumerate([(4 * case[1].vocab_size * 5 + 1, 5), (1, 1)], start=5):
        monkeypatch.setattr(teacher_cache, "CHUNK_NUMBERS", chunk_numbers)
        found = rows_of(made(case, cache=9, temperature=3.0 + number * 1e-12)[1])
        np.testing.assert_array_equal(found[0], words)
        np.testing.assert_allclose(found[1], log_p, rtol=1e-5, atol=1e-6)
        assert lengths[0] == most  # of the first four samples
        lengths.clear()
