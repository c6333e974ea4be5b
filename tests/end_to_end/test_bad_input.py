"""Invalid input of `plimsoll train`: one message, exit code 2 and nothing on standard output.

The messages are in tests/golden/errors, with placeholders for the test's folder and for parts that depend on the
machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from end_to_end.commands import assert_each_sample_once, plimsoll, steps_of, trained, write_job
from plimsoll.records.run import RunRecord

TINY = {
    "model": {"architecture": "lstm", "embedding_size": 16, "hidden_size": 16, "num_layers": 1},
    "tokenizer": {"vocab_size": 300},
    "sequence_length": 32,
    "batch_size": 4,
    "optimizer": {"lr": 1e-2},
    "steps": 4,
    "checkpoint": {"every": 2, "keep": 9},
}
TINY_CHECKPOINT_BYTES = 168 << 10
SENTENCES = "".join(f"the ship number {number} sinks to its line and no further\n" for number in range(400))
DIFFERS = re.compile(r"\d+(\.\d+)? [KMGT]iB|(?<=CRC )[0-9a-f]{8}|(?<=and )[0-9a-f]{8}")


def tiny_job(folder: Path, **changes: object) -> Path:
    """Write a job of a few seconds and a text for it into `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(SENTENCES)
    return write_job(folder / "job.yaml", **TINY | {"data": {"train": str(folder / "text.txt")}} | changes)


def refused(*arguments: object) -> str:
    """Run `plimsoll train`, which must refuse with one message, and return the message."""
    done = plimsoll("train", *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    assert len(re.findall(r"^error: ", done.stderr, re.MULTILINE)) == 1, done.stderr
    message = done.stderr[done.stderr.index("error: ") :]
    rest = message.splitlines()[1:]
    assert all(line.startswith("  ") for line in rest), f"more follows the message: {message}"
    return message


def without_machine(message: str, folder: Path) -> str:
    """Replace the parts of a message that depend on the machine or the folder."""
    return DIFFERS.sub("<n>", message.replace(str(folder), "<folder>"))


def whole_checkpoints(run: Path) -> list[str]:
    return sorted(folder.name for folder in (run / "checkpoints").iterdir() if (folder / "manifest.json").is_file())


_SLOW = pytest.mark.slow  # for cases that resemble another one: each takes seconds
_LIKE_OTHERS = ("binary-text", "text-not-utf-8", "empty-text")

# -- refused before a training process runs ----------------------------------------------------------------------------

TEXTS = {
    "empty-text": b"",
    "binary-text": b"\x7fELF\x02\x01\x01\x00\x00\x00",
    "text-not-utf-8": "the ship is ready, na\xefvely said\n".encode("latin1"),
    "fewer-samples-than-one-batch": SENTENCES[:700].encode(),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[_SLOW] if case in _LIKE_OTHERS else []) for case in TEXTS])
def test_a_text_that_cannot_be_trained_on(case, golden, tmp_path):
    (tmp_path / "given.txt").write_bytes(TEXTS[case])
    job = tiny_job(tmp_path, data={"train": str(tmp_path / "given.txt")}, batch_size=64)
    golden(f"errors/{case}.txt", without_machine(refused(job, "--out", tmp_path / "run"), tmp_path))


@pytest.mark.parametrize(
    "case",
    ["missing-text", pytest.param("folder-without-text", marks=_SLOW), pytest.param("glob-without-text", marks=_SLOW)],
)
def test_a_source_with_nothing_in_it(case, golden, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00")
    source = {"missing-text": "gone.txt", "folder-without-text": "folder", "glob-without-text": "folder/*.txt"}[case]
    job = tiny_job(tmp_path, data={"train": str(tmp_path / source)})
    golden(f"errors/{case}.txt", without_machine(refused(job, "--out", tmp_path / "run"), tmp_path))


FIELDS: dict[str, dict[str, Any]] = {
    "unknown-field": {"bach_size": 4},
    "unknown-field-of-model": {"model": TINY["model"] | {"hiden_size": 16}},
    "unknown-model": {"model": {"architecture": "ltsm"}},
    "batch-size-0": {"batch_size": 0},
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_job_with_a_wrong_field(case, golden, tmp_path):
    job = tiny_job(tmp_path, **FIELDS[case])
    golden(f"errors/{case}.txt", without_machine(refused(job, "--out", tmp_path / "run"), tmp_path))
    assert not (tmp_path / "run" / "data").exists()  # nothing was tokenized for it


def test_an_out_that_exists_is_left_as_it_is(golden, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    message = refused(tiny_job(tmp_path), "--out", tmp_path / "run", "--force")
    golden("errors/out-exists.txt", without_machine(message, tmp_path))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def test_an_out_below_a_file(golden, tmp_path):
    message = refused(tiny_job(tmp_path), "--out", tmp_path / "text.txt" / "run")
    golden("errors/out-below-a-file.txt", without_machine(message, tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into every folder")
def test_an_out_without_permission(golden, tmp_path):
    job = tiny_job(tmp_path)
    (tmp_path / "locked").mkdir(mode=0o500)
    golden("errors/out-locked.txt", without_machine(refused(job, "--out", tmp_path / "locked" / "run"), tmp_path))


# -- refused by the training process -----------------------------------------------------------------------------------


def test_a_budget_below_what_exists_before_the_first_step(golden, tmp_path):
    """140 MiB are more than any process takes at its start, and less than a training takes."""
    message = refused(tiny_job(tmp_path), "--out", tmp_path / "run", "--budget", "140MiB", "--no-plan")
    golden("errors/budget.txt", without_machine(message, tmp_path))
    needed = re.search(r"([\d.]+) MiB are needed", message)
    assert needed is not None
    assert float(needed[1]) > 100  # an interpreter with torch needs more


def test_a_budget_that_no_process_keeps(golden, tmp_path):
    message = refused(tiny_job(tmp_path), "--out", tmp_path / "run", "--budget", "1MiB")
    golden("errors/budget-of-no-process.txt", without_machine(message, tmp_path))
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def nan_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run with seed 1 until the loss becomes NaN, and return the run directory and the message."""
    folder = tmp_path_factory.mktemp("nan")
    run = folder / "run"
    job = tiny_job(folder, seed=1, steps=50, optimizer={"lr": 1e12}, checkpoint={"every": 1, "keep": 99})
    return run, refused(job, "--out", run)


def test_a_nan_loss_names_the_step_and_the_last_good_checkpoint(nan_run, golden):
    run, message = nan_run
    num_done = len(steps_of(run))
    assert num_done >= 1
    assert whole_checkpoints(run)[-1] == f"step-{num_done:08d}"
    told = message.replace(f"step-{num_done:08d}", "step-<done>")
    told = told.replace(f"step {num_done + 1} ", "step <next> ").replace(f"step {num_done}:", "step <done>:")
    golden("errors/nan-loss.txt", without_machine(told, run.parent))


@pytest.fixture(scope="module")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of four steps, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("good")
    trained(tiny_job(folder), "--out", folder / "run")
    return folder / "run"


def test_a_torn_checkpoint_is_refused_and_the_good_one_works(good_run, golden, tmp_path):
    run = shutil.copytree(good_run, tmp_path / "run")
    losses = [step.loss for step in steps_of(run)]
    weights = run / "checkpoints" / "step-00000004" / "model.pt"
    os.truncate(weights, weights.stat().st_size - 100)
    told = without_machine(refused("--resume", "--out", run, "--set", "steps=6"), tmp_path)
    golden("errors/torn-checkpoint.txt", re.sub(r"\d+ bytes|(?<=expected )\d+", "<n>", told))
    trained("--resume", "--from-step", 2, "--out", run)
    assert [step.loss for step in steps_of(run)] == losses
    assert_each_sample_once(steps_of(run), 4)
    assert whole_checkpoints(run) == ["step-00000002", "step-00000004"]


def test_a_foreign_checkpoint_is_refused_and_the_good_one_named(good_run, nan_run, golden, tmp_path):
    run = shutil.copytree(good_run, tmp_path / "run")
    metrics = (run / "metrics.jsonl").read_bytes()
    shutil.copytree(nan_run[0] / "checkpoints" / "step-00000001", run / "checkpoints" / "step-00000005")
    told = without_machine(refused("--resume", "--out", run, "--set", "steps=6"), tmp_path)
    golden("errors/foreign-checkpoint.txt", told)
    assert (run / "metrics.jsonl").read_bytes() == metrics


# -- a full disk -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a disk of 16 MiB on which two and a half checkpoints fit, until `ballast` is removed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = 16 << 20
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small disk needs root and the command `mount`")
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    if done.returncode:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    (disk / "ballast").write_bytes(bytes(size - TINY_CHECKPOINT_BYTES * 5 // 2))
    yield disk
    subprocess.run(["umount", str(disk)], check=True, timeout=10)


def test_a_full_disk_leaves_the_earlier_checkpoints_and_space_mends_it(small_disk, golden, tmp_path):
    run = small_disk / "run"
    job = tiny_job(tmp_path, steps=8)
    message = refused(job, "--out", run, "--cache", tmp_path / "cache")
    golden("errors/disk-full.txt", without_machine(message, tmp_path))
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-00000002", "step-00000004"]
    (small_disk / "ballast").unlink()
    trained("--resume", "--out", run)
    assert RunRecord.from_directory(run).status == "finished"
    assert_each_sample_once(steps_of(run), 8)
