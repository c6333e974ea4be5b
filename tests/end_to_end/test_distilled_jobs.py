"""A student trained by `plimsoll train` with a teacher: it resumes exactly, and its cache files are checked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from end_to_end.commands import (
    SMALL_JOB,
    assert_each_sample_once,
    assert_same_bits,
    learned,
    lines_of,
    plimsoll,
    steps_of,
    trained,
    write_job,
)
from plimsoll.models.build import save_model
from plimsoll.models.recurrent.model import build_recurrent
from plimsoll.records.run import EvaluationLine, RunHead
from plimsoll.training.run_directory import RunDirectory

NUM_STEPS = 6


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(0)
    sizes = {"vocab_size": SMALL_JOB["tokenizer"]["vocab_size"], "embedding_size": 48, "hidden_size": 48}
    save_model(build_recurrent({"architecture": "gru", **sizes}), folder)
    return folder


def job_of(folder: Path, teacher: Path, **distill: object) -> Path:
    return write_job(folder / "job.yaml", steps=NUM_STEPS, distill={"teacher": str(teacher), **distill})


def without_rows_of_time(run: Path) -> list[tuple[float, float | None]]:
    return [(step.loss, step.gradient_norm) for step in steps_of(run)]


def test_what_the_teacher_says_is_kept_and_read(teacher: Path, tmp_path: Path):
    """The cache is made once. Afterwards only the identity of the teacher is needed, not its weights."""
    job, run, cache = job_of(tmp_path, teacher, cache=8), tmp_path / "run", tmp_path / "cache"
    trained(job, "--out", run, "--cache", cache, "--no-plan", PLIMSOLL_FAILPOINTS="evaluation@1,backward@2")
    assert_each_sample_once(steps_of(run), NUM_STEPS)
    kept = [folder for folder in cache.iterdir() if folder.name.startswith("teacher-") and folder.is_dir()]
    assert len(kept) == 1
    assert json.loads((kept[0] / "manifest.json").read_text())["facts"]["num_kept"] == 8
    assert len([line for line in lines_of(run) if isinstance(line, EvaluationLine)]) == 1
    marks = RunHead.load(RunDirectory(run).head).fingerprint
    assert marks["distill.teacher"].startswith("sha256:")
    assert "distill.form" not in marks


@pytest.mark.slow
@pytest.mark.parametrize("distill", [{}, {"form": "memory", "hard": 0.0}, {"cache": 8}], ids=["mapped", "soft", "kept"])
def test_a_run_that_goes_on_has_the_same_bits(teacher: Path, tmp_path: Path, distill: dict[str, object]):
    """This also holds if the teacher has been moved in the meantime."""
    (tmp_path / "teachers").mkdir()
    shutil.copytree(teacher, tmp_path / "teachers" / "a")
    job, cache = job_of(tmp_path, tmp_path / "teachers" / "a", **distill), tmp_path / "cache"
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    trained(job, "--out", undisturbed, "--cache", cache, "--no-plan")
    trained(job, "--out", run, "--cache", cache, "--no-plan", "--set", "steps=4")
    trained("--resume", "--out", run, "--set", f"steps={NUM_STEPS}")
    assert without_rows_of_time(run) == without_rows_of_time(undisturbed)
    assert_same_bits(learned(undisturbed), learned(run))


@pytest.mark.slow
def test_another_teacher_is_another_training(teacher: Path, tmp_path: Path):
    mine = tmp_path / "mine"
    shutil.copytree(teacher, mine)
    job, run = job_of(tmp_path, mine), tmp_path / "run"
    trained(job, "--out", run, "--cache", tmp_path / "cache", "--no-plan", "--set", "steps=2")
    sizes = {"vocab_size": SMALL_JOB["tokenizer"]["vocab_size"], "embedding_size": 48, "hidden_size": 48}
    save_model(build_recurrent({"architecture": "gru", **sizes}), mine)
    done = plimsoll("train", "--resume", "--out", run, "--set", "steps=4")
    assert done.returncode == 2
    assert "distill.teacher" in done.stderr


@pytest.mark.slow
def test_a_teacher_of_another_vocabulary_is_refused_before_training(teacher: Path, tmp_path: Path):
    fields = {"tokenizer": {"vocab_size": 300}, "distill": str(teacher)}
    job = write_job(tmp_path / "job.yaml", **fields)
    done = plimsoll("train", job, "--out", tmp_path / "run", "--cache", tmp_path / "cache", "--no-plan")
    assert done.returncode == 2
    assert "has 400 token embeddings, but the tokenizer has 300 tokens" in done.stderr
