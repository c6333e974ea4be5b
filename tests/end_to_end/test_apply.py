"""`plimsoll apply` as users run it: killed and repeated, stopped by Ctrl-C, and inside a real limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from end_to_end.commands import plimsoll
from model_folders import model_folder, read_rows, some_texts, write_rows
from processes import LONGEST_SECONDS, environment, run_program

NUM_ROWS = 8000

OPTIONS = ("--batch-size", 4, "--max-length", 8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [text + (" ü 沈む" if number % 9 == 0 else "") for number, text in enumerate(some_texts(NUM_ROWS))]
    path = write_rows(tmp_path_factory.mktemp("data") / "x.jsonl", texts)
    lines = path.read_text().splitlines()
    for number in range(0, NUM_ROWS, 97):
        lines[number] = '{"id": "without text"}'
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def undisturbed(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "y.jsonl"
    done = plimsoll("apply", model, "--data", data, "--out", out, "--keep", "id", *OPTIONS)
    assert done.returncode == 0, done.stderr
    return out


# The runs are forked from one process that has imported everything, so that a kill does not cost a start of the
# interpreter. Every other kill comes at a random moment, also before there is a row. The others come shortly after
# another block is written. Blocks are written slowly, so that 20 kills come before the end.
KILLED = """
import json, os, random, signal, sys, time
from pathlib import Path
import transformers, plimsoll.models.generation
from plimsoll.models.loading import load_model
from plimsoll.inference.apply import ApplyOptions, apply_model
from plimsoll.inference.output import PartFile
append = PartFile.append
def slowly(self, *arguments):
    time.sleep(0.2)
    append(self, *arguments)
PartFile.append = slowly
model, data, out = map(Path, sys.argv[1:4])
load_model(model), transformers.AutoTokenizer.from_pretrained(model)
state = out.with_name(out.name + ".part.json")
generator, kills, done = random.Random(int(sys.argv[5])), 0, []
def num_done():
    return json.loads(state.read_text())["num_rows"] if state.exists() else 0
options = ApplyOptions(keep=("id",), rows_per_pass=4, longest_tokens=8)
while not out.exists():
    child = os.fork()
    if not child:
        apply_model(model, data, out, options)
        os._exit(0)
    if kills < int(sys.argv[4]):
        before = num_done()
        while kills % 2 and num_done() == before:
            time.sleep(0.005)
        time.sleep(generator.uniform(0, 0.1 if kills % 2 else 0.5))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    kills += os.WIFSIGNALED(status)
    done.append(num_done())
print(json.dumps([kills, done]))
"""


@pytest.mark.long
@pytest.mark.parametrize("num_kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_of_an_interrupted_apply_no_row_is_lost_or_doubled(
    model: Path, data: Path, undisturbed: Path, tmp_path: Path, num_kills: int
) -> None:
    """SIGKILL comes at random moments. Then the run finishes, and its output has the bytes of the undisturbed run."""
    out = tmp_path / "y.jsonl"
    ended = run_program(KILLED, model, data, out, num_kills, 0)
    assert ended.returncode == 0, ended.stderr
    kills, done = json.loads(ended.stdout)
    assert kills == num_kills, done
    assert done[:-1] == sorted(done[:-1])  # no finished block is lost
    assert any(0 < rows < NUM_ROWS for rows in done)  # the kills came in the middle
    assert out.read_bytes() == undisturbed.read_bytes()
    assert [row["row"] for row in read_rows(out)] == list(range(NUM_ROWS))
    assert os.listdir(tmp_path) == ["y.jsonl"]


def begun(model: Path, data: Path, out: Path) -> subprocess.Popen[str]:
    """Start the command and wait until it has written a block."""
    command = [sys.executable, "-m", "plimsoll", "apply", *map(str, (model, "--data", data, "--out", out))]
    command += ["--keep", "id", *map(str, OPTIONS), "--json"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    state, end = out.with_name(out.name + ".part.json"), time.monotonic() + LONGEST_SECONDS
    while time.monotonic() < end and process.poll() is None:
        if state.exists() and json.loads(state.read_text())["num_rows"]:
            return process
        time.sleep(0.01)
    raise AssertionError(process.communicate())


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_after_ctrl_c_the_same_command_goes_on(
    model: Path, data: Path, undisturbed: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    out = tmp_path / "y.jsonl"
    process = begun(model, data, out)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == code, stderr
    assert json.loads(stdout)["error"] == "Interrupted"
    assert "rows written: run the same command again to resume" in stderr
    assert not out.exists()
    done = plimsoll("apply", model, "--data", data, "--out", out, "--keep", "id", *OPTIONS, "--json")
    facts = json.loads(done.stdout)
    assert 0 < facts["first_row"] < NUM_ROWS
    assert facts["first_row"] + facts["num_new_rows"] == facts["num_rows"]
    assert out.read_bytes() == undisturbed.read_bytes()


@pytest.mark.slow
def test_what_is_different_is_named_and_force_begins_again(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "y.jsonl"
    process = begun(model, data, out)
    process.kill()
    process.communicate()
    refused = plimsoll("apply", model, "--data", data, "--out", out, "--keep", "id", "--max-length", 6)
    assert refused.returncode == 2
    assert "another --max-length (was 8, is 6)" in refused.stderr
    again = plimsoll("apply", model, "--data", data, "--out", out, "--max-length", 6, "--force", "--json")
    assert json.loads(again.stdout)["first_row"] == 0


# A pass of 64 texts of 512 tokens needs some hundred MiB more than a small one. The limit leaves 200 MiB.
IN_A_LIMIT = """
import json, sys
from contextlib import nullcontext
from pathlib import Path
import torch, transformers
from transformers.models.bert import modeling_bert
from plimsoll.device.base import backend_for
from plimsoll.inference.apply import ApplyOptions, apply_model
model, data, out = map(Path, sys.argv[1:4])
backend = backend_for("cpu")
limit_bytes = backend.baseline_bytes() + (int(sys.argv[4]) << 20) if int(sys.argv[4]) else None
with backend.limited(limit_bytes) if limit_bytes else nullcontext():  # without a plan, which would hold
    facts = apply_model(model, data, out, ApplyOptions(rows_per_pass=64, longest_tokens=512))
print(json.dumps([len(facts.oom_events), facts.peak_bytes, limit_bytes]))
"""


@pytest.mark.slow
def test_inside_a_real_limit_the_results_are_the_same(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "max_position_embeddings": 512}
    folder = model_folder(tmp_path / "m", "BertForSequenceClassification", num_labels=3, **sizes)
    data = write_rows(tmp_path / "x.jsonl", some_texts(100, most_words=500))
    free = run_program(IN_A_LIMIT, folder, data, tmp_path / "free.jsonl", 0)
    assert free.returncode == 0, free.stderr
    limited = run_program(IN_A_LIMIT, folder, data, tmp_path / "limited.jsonl", 150)
    assert limited.returncode == 0, limited.stderr
    num_oom_events, peak_bytes, limit_bytes = json.loads(limited.stdout)
    assert num_oom_events >= 1
    assert peak_bytes <= limit_bytes
    assert json.loads(free.stdout)[1] > limit_bytes
    for one, other in zip(read_rows(tmp_path / "free.jsonl"), read_rows(tmp_path / "limited.jsonl"), strict=True):
        assert (one["row"], one["label"]) == (other["row"], other["label"])
        assert one["score"] == pytest.approx(other["score"], abs=1e-5)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(model: Path, tmp_path: Path) -> None:
    """With nine times the rows the peak grows by a few MiB at most."""
    peaks = list[int]()
    for num_rows in (1_000, 9_000):
        data = write_rows(tmp_path / f"{num_rows}.jsonl", some_texts(num_rows, most_words=5))
        done = plimsoll("apply", model, "--data", data, "--out", tmp_path / f"y{num_rows}.jsonl", "--json")
        peaks.append(json.loads(done.stdout)["peak_bytes"])
    assert peaks[1] - peaks[0] < 16 << 20
