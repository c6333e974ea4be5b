"""A model that exceeds its limit, planned and applied inside it: the same results, with the predicted peak."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from model_folders import model_folder, read_rows, some_texts, write_rows
from plimsoll.models.inference import inference_task
from plimsoll.records.placement import InferencePlan
from processes import run_program
from small_checkpoints import batch, saved

MIB = 1 << 20
WIDE = {"n_layer": 8, "n_embd": 640, "n_head": 8, "n_positions": 64}  # 150 MiB, of which the output layer is 1
LENGTH = 20

LIMITED = """
import json, sys, torch
from pathlib import Path
from plimsoll.device.base import backend_for
from plimsoll.models.inference import inference_task
from plimsoll.records.placement import InferencePlan
from plimsoll.inference import apply
from plimsoll.inference.placement import placed_model
sys.path.insert(0, sys.argv[3])
from small_checkpoints import batch

folder, plan = Path(sys.argv[1]), InferencePlan.load(Path(sys.argv[2]))
task, backend = inference_task("score", folder), backend_for("cpu")
with backend.limited(plan.budget_bytes), placed_model(folder, plan) as model, torch.inference_mode():
    backend.reset_peak()
    for _ in range(3):
        sums, numbers = task.compute(model, batch(plan.micro_batch, 20))
    peak_bytes = backend.use().peak_bytes
print(json.dumps({"peak_bytes": peak_bytes, "sums": sums.tolist()}))
"""

PLAIN = """
import sys, torch
from pathlib import Path
from plimsoll.device.base import backend_for
from plimsoll.inference import apply
from transformers import AutoModelForCausalLM

with backend_for("cpu").limited(int(sys.argv[2])):
    AutoModelForCausalLM.from_pretrained(Path(sys.argv[1]))
"""

COMMAND = "import sys; from plimsoll.cli.main import main; sys.argv = ['plimsoll', *sys.argv[1:]]; main()"

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is Linux's")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("checkpoints") / "wide", "gpt2", **WIDE)


def plan_of(folder, *options):
    done = run_program(COMMAND, "plan", folder, "--inference", "--max-length", LENGTH, "--json", *options)
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def least(folder):
    """Return a plan whose budget is too small."""
    code, plan = plan_of(folder, "--budget", "64MiB")
    assert (code, plan["record"]) == (1, "inference-plan")
    return plan


@pytest.mark.long
@pytest.mark.cold  # the prediction is for a process that loads as a user's does
def test_a_limit_of_half_the_weights_holds_and_changes_nothing(folder, least, tmp_path):
    num_bytes = (folder / "model.safetensors").stat().st_size
    baseline_bytes = least["peak"]["measured_bytes"]
    budget_mib = (baseline_bytes + num_bytes // 2) // MIB
    code, found = plan_of(folder, "--budget", f"{budget_mib}MiB")
    assert code == 0, found
    plan = InferencePlan.from_json(json.dumps(found))
    assert plan.bytes_in("disk") > num_bytes // 3
    plan.save(tmp_path / "plan.json")

    tests = str(next(path for path in sys.path if path.endswith("tests")))
    done = run_program(LIMITED, folder, tmp_path / "plan.json", tests)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["peak_bytes"] <= plan.budget_bytes
    assert measured["peak_bytes"] == pytest.approx(plan.peak.likely_bytes, rel=0.06)
    assert plan.peak.low_bytes * 0.98 <= measured["peak_bytes"] <= plan.peak.high_bytes

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        sums, _ = inference_task("score", folder).compute(model, batch(plan.micro_batch, LENGTH))
    assert torch.equal(torch.tensor(measured["sums"]), sums)

    plain = run_program(PLAIN, folder, plan.budget_bytes)
    assert plain.returncode != 0
    assert "alloc" in plain.stderr or "MemoryError" in plain.stderr


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["stored", "bf16"])
def test_the_command_does_what_it_has_planned_and_no_pass_runs_out(dtype, tmp_path):
    """The vocabulary is as large as in real models, and the output layer is a third of the weights."""
    wide = {"num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 20_000}
    model = model_folder(tmp_path / "model", **wide)
    data = write_rows(tmp_path / "x.jsonl", some_texts(40))
    _, least = plan_of(model, "--budget", "64MiB")
    budget_mib = (least["peak"]["measured_bytes"] + 80 * MIB) // MIB  # for 115 MiB of weights
    command = ["apply", model, "--data", data, "--out", tmp_path / "y.jsonl", "--budget", f"{budget_mib}MiB"]
    done = run_program(COMMAND, *command, "--dtype", dtype, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["oom_events"] == []
    assert facts["peak_bytes"] <= budget_mib * MIB
    assert len(read_rows(tmp_path / "y.jsonl")) == 40


@pytest.mark.slow
def test_the_command_says_which_budget_would_do(folder, least):
    assert least["smallest_budget_bytes"] > least["budget_bytes"]
    code, fits = plan_of(folder, "--budget", f"{-(-least['smallest_budget_bytes'] // MIB) + 4}MiB")
    assert (code, fits["smallest_budget_bytes"]) == (0, None)


def test_what_is_no_model_is_refused(tmp_path):
    code, error = plan_of(tmp_path / "nowhere", "--budget", "1GiB")
    assert (code, error["error"]) == (2, "JobError")
