"""Questions and answers over a pipe, with a real process that has answers of its own and no torch."""

from __future__ import annotations

import sys

import pytest

from plimsoll.errors import KilledError, WeightsError
from plimsoll.records.plan import Choice, Pin
from plimsoll.run.shrink_process import ShrinkProcess, Source

ANSWERS = """
import os, signal
from plimsoll.errors import KilledError, WeightsError
from plimsoll.run.shrink_process import serve

def weight_bytes(chain):
    print("a library prints what nobody asked for")
    if chain[0]["technique"] == "fails":
        raise WeightsError("heads cannot be 3: give 4")
    if chain[0]["technique"] == "was killed":
        raise KilledError("what it started was killed", signal.SIGKILL)
    if chain[0]["technique"] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return len(chain)

serve(lambda: {
    "weight_bytes": weight_bytes,
    "offers": lambda: [{"method": "heads", "stage": "structure", "saves": "much", "reason": "none"}],
    "resolved": lambda pins: [{"technique": pin["technique"], "options": {"share": pin["value"]}} for pin in pins],
    "predicted_training": lambda source, teacher: None if source["tokenizer"] is None else 3 / 0,
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
    assert process.resolved([Pin(technique="heads", value=0.5)]) == (Choice(technique="heads", options={"share": 0.5}),)
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
    with pytest.raises(KilledError, match="ended with -9 .*give the same command again, which goes on") as raised:
        process.weight_bytes(chain("dies"))
    assert raised.value.exit_code == 137


def test_an_error_of_another_kind_ends_the_process(process):
    with pytest.raises(KilledError, match="ended with 1 while it was asked for predicted_training"):
        process.predicted_training(Source(folder="x", tokenizer="y"))
