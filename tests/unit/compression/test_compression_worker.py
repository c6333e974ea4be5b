"""Questions and answers over a pipe, with a real process that gives fixed answers without torch."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from plimsoll.compression.worker import ShrinkProcess, Source
from plimsoll.errors import KilledError, WeightsError
from plimsoll.records.plan import Choice

ANSWERS = """
import os, signal
from plimsoll.errors import KilledError, WeightsError
from plimsoll.compression.worker import serve

def weight_bytes(chain):
    print("a library prints what nobody asked for")
    if chain[0]["technique"] == "fails":
        raise WeightsError("heads cannot be 3: give 4")
    if chain[0]["technique"] == "was killed":
        raise KilledError("what it started was killed", signal.SIGKILL)
    if chain[0]["technique"] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return len(chain)

def make(source, chain, target):
    quality = {"loss": 0.5, "num_samples": len(target)}
    names = [one["technique"] for one in chain]
    return {"form": "plain", "file_bytes": 3, "weight_bytes": 2, "quality": quality,
            "has_own_tokenizer": [source["folder"], names] == ["x", ["a", "b"]]}

def measured(source):
    return {"rows": 1, "longest_tokens": 2, "peak_bytes": 3, "baseline_bytes": 2, "row_seconds": 0.5}

def predicted_training(source, teacher):
    if source["tokenizer"] is not None:
        return 3 / 0
    if teacher is None:
        return None
    return {"likely_bytes": len(teacher), "low_bytes": 0, "high_bytes": 900}

serve(lambda: {
    "weight_bytes": weight_bytes,
    "offers": lambda: [{"method": "heads", "saves": "much", "reason": "none"}],
    "check": lambda chain: weight_bytes(chain) and None,
    "make": make, "measured": measured, "predicted_training": predicted_training,
})
"""


@pytest.fixture
def process(tmp_path):
    script = tmp_path / "answers.py"
    script.write_text(ANSWERS)
    made = ShrinkProcess(tmp_path / "request.json")
    made._command = [sys.executable, str(script)]
    with made:
        yield made


def chain(*names):
    return tuple(Choice(technique=name) for name in names)


def test_what_libraries_print_is_no_answer(process):
    assert [process.weight_bytes(chain(*"abc")), process.weight_bytes(chain("a"))] == [3, 1]
    assert process.offers()[0].reason == "none"
    assert process.check(chain("heads")) is None
    with pytest.raises(WeightsError, match="heads cannot be 3: give 4"):
        process.check(chain("fails"))
    assert process.predicted_training(Source(folder="x")) is None


def test_an_error_of_ours_arrives_as_what_it_is_and_the_process_goes_on(process):
    with pytest.raises(WeightsError, match="heads cannot be 3: give 4"):
        process.weight_bytes(chain("fails"))
    assert process.weight_bytes(chain("a")) == 1


def test_a_kill_that_the_process_tells_of_keeps_its_signal(process):
    with pytest.raises(KilledError, match="what it started was killed") as raised:
        process.weight_bytes(chain("was killed"))
    assert raised.value.exit_code == 137


def test_a_death_is_said_with_what_to_do(process):
    with pytest.raises(KilledError, match="ended with exit code -9 .*run the same command again, which") as raised:
        process.weight_bytes(chain("dies"))
    assert raised.value.exit_code == 137


def test_an_error_of_another_kind_ends_the_process(process):
    with pytest.raises(KilledError, match="ended with exit code 1 during `predicted_training`"):
        process.predicted_training(Source(folder="x", tokenizer="y"))


def test_a_model_that_was_made_and_what_it_takes_arrive_whole(process):
    made = process.make(Source(folder="x"), chain("a", "b"), Path("/target"))
    assert (made.file_bytes, made.weight_bytes, made.quality.num_samples, made.has_own_tokenizer) == (3, 2, 7, True)
    assert process.measured(Source(folder="x")).peak_bytes == 3


def test_a_teacher_is_named_by_its_whole_path(process, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert process.predicted_training(Source(folder="x"), Path("teacher")).likely_bytes == len(f"{tmp_path}/teacher")


def test_the_process_ends_with_the_block(tmp_path):
    made = ShrinkProcess(tmp_path / "request.json")
    made._command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with made:
        assert made._process.poll() is None
    assert made._process.returncode == -9


def test_a_process_that_ends_with_an_error_has_no_signal_to_tell(process):
    with pytest.raises(KilledError) as raised:
        process.predicted_training(Source(folder="x", tokenizer="y"))
    assert raised.value.exit_code == 137  # as if it was killed, so that the same command continues
    with pytest.raises(KilledError, match="ended with exit code 1 "):  # also if the process ended before the question
        process.offers()


def test_a_process_that_another_signal_ended_tells_it(tmp_path):
    made = ShrinkProcess(tmp_path / "request.json")
    made._command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)"]
    with made, pytest.raises(KilledError, match=f"ended with exit code -{signal.SIGUSR1} ") as raised:
        made.offers()
    assert raised.value.exit_code == 128 + signal.SIGUSR1
