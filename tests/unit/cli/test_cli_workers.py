"""The processes that a run starts, called in this process as the supervisor calls them."""

import random
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from plimsoll.cli.main import app
from plimsoll.errors import CheckpointError
from plimsoll.records.job import Job
from plimsoll.records.plan import micro_batch_plan
from plimsoll.records.prepared import Prepared
from plimsoll.records.run import RunRecord
from plimsoll.training.run_directory import RunDirectory
from processes import environment


@pytest.fixture
def directory(tmp_path):
    """Create a run of four steps, as `plimsoll train` leaves it to the workers."""
    (tmp_path / "text.txt").write_text("\n".join(f"line {i} of the text" for i in range(300)))
    fields = {
        "model": {"architecture": "gru", "embedding_size": 8, "hidden_size": 8},
        "data": {"train": str(tmp_path / "text.txt")},
        "tokenizer": {"vocab_size": 300},
        "sequence_length": 16,
        "batch_size": 4,
        "steps": 4,
        "checkpoint": {"every": 2},
    }
    directory = RunDirectory.create(tmp_path / "a", force=False)
    directory.job.write_text(yaml.safe_dump(fields))
    micro_batch_plan(Job.from_yaml(directory.job).budget, (4, 2, 1)).save(directory.plan)
    return directory


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_prepare_then_train_then_go_on(directory, tmp_path):
    prepared = invoke("prepare-worker", directory.path, tmp_path / "cache", "--quiet")
    assert (prepared.exit_code, prepared.output) == (0, "")
    assert Prepared.load(directory.prepared).vocab_size == 300
    trained = invoke("train-worker", directory.path, "--quiet", "--fallback", 1)
    assert (trained.exit_code, trained.output) == (0, "")
    record = RunRecord.from_directory(directory.path)
    assert [step.micro_batch for step in record.steps] == [2] * 4
    again = invoke("train-worker", directory.path, "--quiet", "--resume", "--from-step", 2, "--restarts", 3)
    assert again.exit_code == 0
    record = RunRecord.from_directory(directory.path)
    assert [(start.step, start.restarts) for start in record.starts] == [(0, 0), (2, 3)]
    assert [step.step for step in record.steps] == [1, 2, 3, 4]
    wrong = invoke("train-worker", directory.path, "--quiet", "--resume", "--from-step", 3)
    assert isinstance(wrong.exception, CheckpointError)


@pytest.mark.long
def test_a_tokenizer_for_which_a_budget_has_no_room_beside_torch_is_trained_before_torch_is_loaded(directory, tmp_path):
    draw = random.Random(0)
    text = tmp_path / "many.txt"
    text.write_text("\n".join(f"request {draw.getrandbits(64):016x} served" for _ in range(80_000)))
    fields = yaml.safe_load(directory.job.read_text())
    budget_bytes = 280 << 20
    fields |= {"data": str(text), "budget": {"device": budget_bytes}, "tokenizer": {"vocab_size": 300}}
    directory.job.write_text(yaml.safe_dump(fields))
    prepare = [sys.executable, "-m", "plimsoll", "prepare-worker", directory.path, tmp_path / "cache"]
    done = subprocess.run(list(map(str, prepare)), capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tokenizer") == 2  # the first attempt ran while torch was loaded
    assert Prepared.load(directory.prepared).vocab_size == 300


def test_progress_is_shown_on_standard_error_unless_it_is_quiet(directory, tmp_path):
    done = invoke("prepare-worker", directory.path, tmp_path / "cache")
    assert done.stdout == ""
    assert "tokens" in done.stderr
