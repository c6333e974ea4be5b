"""`plimsoll explain` on real runs of models that keep too much (`leaky_models`), and on users' own loops."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from end_to_end.commands import lines_of, plimsoll, steps_of, trained, write_job
from end_to_end.leaky_models import ARRAY_BYTES, HIDDEN_SIZE
from plimsoll.records.diagnosis import Diagnosis
from plimsoll.records.run import GraphLine
from processes import run_program

NUM_STEPS = 30
OUTPUT_BYTES = 16 * 16 * HIDDEN_SIZE * 4  # 16 samples of 16 tokens


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tokens, which are the same for all models."""
    return tmp_path_factory.mktemp("cache")


def job(folder: Path, model: str) -> Path:
    return write_job(folder / "job.yaml", model=f"leaky_models:{model}", steps=NUM_STEPS, sequence_length=16)


def run_of(tmp_path: Path, cache: Path, model: str) -> Path:
    trained(job(tmp_path, model), "--out", tmp_path / "run", "--no-plan", "--cache", cache)
    return tmp_path / "run"


def explained(run: Path, code: int) -> Diagnosis:
    done = plimsoll("explain", run, "--json")
    assert (done.returncode, done.stderr) == (code, "")
    return Diagnosis.from_json(done.stdout)


def line_of(text: str) -> int:
    source = (Path(__file__).parent / "leaky_models.py").read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(source, start=1) if text in line)


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """Return a run whose model keeps all its outputs."""
    return run_of(tmp_path_factory.mktemp("collected"), cache, "collects")


def test_outputs_that_are_collected(collected):
    diagnosis = explained(collected, 1)
    (finding,) = diagnosis.findings
    assert finding.title.startswith("`model.history` collects tensors with their graphs: graph grows by ")
    assert finding.code == "self.history.append(output.detach())"
    assert finding.place.endswith(f"leaky_models.py:{line_of('self.history.append(output)')}")
    assert finding.effect_bytes >= NUM_STEPS * OUTPUT_BYTES
    assert 0 < finding.peak_share < 1
    shown = plimsoll("explain", collected)
    assert shown.returncode == 1
    assert "self.history.append(output.detach())" in shown.stdout


@pytest.mark.slow
def test_a_running_mean_that_is_carried_on(tmp_path, cache):
    (finding,) = explained(run_of(tmp_path, cache, "averages"), 1).findings
    assert finding.title.startswith("hidden state not detached (`model.mean_output`): graph grows by ")
    assert finding.title.endswith(" per step")
    assert finding.code == "self.mean_output = (0.9 * self.mean_output + 0.1 * output.mean((0, 1))).detach()"


@pytest.mark.slow
def test_a_hidden_state_that_is_fed_back(tmp_path, cache):
    run = tmp_path / "run"
    done = plimsoll("train", job(tmp_path, "feeds_back"), "--out", run, "--no-plan", "--cache", cache)
    assert done.returncode == 2
    number = line_of("self.hidden = hidden")
    told = (
        r"error: step 2: the backward pass reached the graph of an earlier forward pass, which is already freed: "
        r"`model\.hidden` is kept from pass to pass and not detached \(a hidden state, for example\); in .*"
        rf"leaky_models\.py:{number}, write `self\.hidden = hidden\.detach\(\)` for `self\.hidden = hidden`"
    )
    assert re.search(told, done.stderr)
    (finding,) = explained(run, 1).findings
    assert finding.title == "hidden state not detached: backward reached the graph of an earlier step"


def test_a_healthy_run_has_no_finding_and_no_line(tmp_path, cache):
    run = run_of(tmp_path, cache, "healthy")
    diagnosis = explained(run, 0)
    assert diagnosis.findings == ()
    assert diagnosis.growth.likely_bytes < OUTPUT_BYTES  # less than the one output that it keeps
    assert not [line for line in lines_of(run) if isinstance(line, GraphLine)]
    assert all(step.used_bytes for step in steps_of(run))


@pytest.mark.slow
def test_memory_that_grows_for_another_reason_is_no_graph(tmp_path, cache):
    diagnosis = explained(run_of(tmp_path, cache, "hoards"), 0)
    assert diagnosis.findings == ()
    assert diagnosis.growth.is_steady
    assert diagnosis.growth.likely_bytes == pytest.approx(ARRAY_BYTES, rel=0.5)
    assert "look for objects that your own code keeps" in diagnosis.notes[0]


@pytest.mark.slow
def test_a_run_that_goes_on_is_explained_by_its_longest_process(tmp_path, collected):
    """Lines of repeated steps are dropped, and the process with more steps counts."""
    run = shutil.copytree(collected, tmp_path / "run")
    trained("--resume", "--from-step", NUM_STEPS - 2, "--out", run, "--set", f"steps={NUM_STEPS + 2}")
    steps = [line.step for line in lines_of(run) if isinstance(line, GraphLine)]
    assert steps == sorted(set(steps))
    assert steps[-1] > NUM_STEPS
    diagnosis = explained(run, 1)
    assert diagnosis.num_steps == NUM_STEPS - 2


LOOP = """
import sys
import torch
from torch import nn
import plimsoll

class Loss:
    def __init__(self):
        self.losses = []

    def __call__(self, model, batch):
        loss = nn.functional.mse_loss(model(batch), batch)
        if sys.argv[1] == "collects":
            self.losses.append(loss)
        else:
            self.losses.append(loss.item())
        return loss

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))

    def forward(self, x):
        return self.layers(x)

model = Wide()
step = plimsoll.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), Loss(), units="samples")
for _ in range(60):
    step(torch.ones(8, 64))
print(plimsoll.explain(step).to_json())
"""


def loop(tmp_path: Path, *arguments: str) -> Diagnosis:
    (tmp_path / "loop.py").write_text(LOOP, encoding="utf-8")
    program = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    done = run_program(program, tmp_path / "loop.py", *arguments)
    assert done.returncode == 0, done.stderr
    return Diagnosis.from_json(json.dumps(json.loads(done.stdout)))


def test_losses_that_are_collected_in_a_loop_of_ones_own(tmp_path):
    """A step has two operations for each of 20 layers and one for the loss. The nodes of parameters are shared."""
    diagnosis = loop(tmp_path, "collects")
    (finding,) = diagnosis.findings
    assert (diagnosis.subject, diagnosis.num_steps) == ("Wide", 60)
    assert finding.title.startswith("`loss.losses` collects tensors with their graphs: graph grows by ")
    assert finding.code == "self.losses.append(loss.detach())"
    assert finding.place.endswith("loop.py:14")
    assert any(fact.text.startswith("41 operations per step") for fact in finding.evidence)


def test_a_healthy_loop_of_ones_own_has_no_finding(tmp_path):
    assert loop(tmp_path, "healthy").findings == ()
