"""A plan whose prediction is 30 % too low: the run goes through the planned fallbacks, and nothing is lost by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from end_to_end.commands import CORPUS, assert_each_sample_once, lines_of, plimsoll, steps_of, trained, write_job
from plimsoll.records.device import Budget
from plimsoll.records.plan import Plan
from plimsoll.records.run import RunRecord, StartLine

TOLD_SHARE = 0.7  # of what a plan needs, as far as the predictor has been told
NUM_STEPS = 3
MOST_RETRIES = 2
CLOSE = 1e-4

GPT2 = {
    "architecture": "gpt2", "n_layer": 2, "n_embd": 128, "n_head": 4,
    "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,  # another cut draws other masks
}  # fmt: skip
LSTM = {"architecture": "lstm", "embedding_size": 96, "hidden_size": 96}
# For plans that need about as much. They begin with the whole batch: a smaller one costs little time on a CPU and
# would leave most of that memory free. Few other techniques, so that little is searched.
LIMIT_BYTES = 620 << 20
FORBIDDEN = ("chunked_loss", "activation_offload", "optimizer_offload", "parameter_offload", "optimizer_in_backward")
CASES = [pytest.param(GPT2, 64, id="gpt2"), pytest.param(LSTM, 128, id="lstm")]


def job_of(path: Path, model: dict[str, Any], batch_size: int) -> Path:
    """Some 300 MiB more than the process takes by itself; updates in which no rounding error is blown up."""
    data = {"train": str(CORPUS.parent / "asyncio" / "*.py")}
    optimizer = {"lr": 1e-3, "clip_norm": 1.0, "arguments": {"eps": 1e-4}}
    shape = {"batch_size": batch_size, "sequence_length": 96, "tokenizer": {"vocab_size": 2000}}
    return write_job(path, model=model, data=data, optimizer=optimizer, steps=NUM_STEPS, **shape)


def told_too_little(job: Path, batch_size: int, folder: Path) -> tuple[Path, Path, int]:
    """A plan as it was made; the same for a budget that it is 30 % too large for; and that budget."""
    honest, wrong = folder / "honest.json", folder / "wrong.json"
    forbids = [word for name in FORBIDDEN for word in ("--forbid", name)]
    pins = ["--pin", f"micro_batch={batch_size}"]
    done = plimsoll("plan", job, "--budget", LIMIT_BYTES, *pins, *forbids, "-o", honest, "--json")
    assert done.returncode == 0, done.stderr
    plan = Plan.load(honest)
    assert plan.rungs[0].peak is not None
    budget_bytes = int(TOLD_SHARE * plan.rungs[0].peak.likely_bytes)
    plan.model_copy(update={"budget": Budget(device_bytes=budget_bytes)}).save(wrong)
    return honest, wrong, budget_bytes


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


@pytest.mark.parametrize(("model", "batch_size"), CASES)
def test_a_run_whose_plan_was_told_too_little_recovers_through_its_fallbacks(model, batch_size, cache, tmp_path):
    job = job_of(tmp_path / "job.yaml", model, batch_size)
    honest, wrong, budget_bytes = told_too_little(job, batch_size, tmp_path)
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    trained(job, "--out", undisturbed, "--cache", cache, "--plan", honest)
    assert not RunRecord.from_directory(undisturbed).oom_events

    trained(job, "--out", run, "--cache", cache, "--plan", wrong)
    record = RunRecord.from_directory(run)
    num_starts = sum(isinstance(line, StartLine) for line in lines_of(run))
    num_retries = len(record.oom_events) + num_starts - 1
    print(f"{num_retries} retries: {record.oom_events}; rungs {[step.rung for step in record.steps]}")
    assert 1 <= num_retries <= MOST_RETRIES
    assert all(step.rung > 0 for step in record.steps)
    assert record.peak_bytes is not None
    assert record.peak_bytes <= budget_bytes
    assert_each_sample_once(steps_of(run), NUM_STEPS)
    expected, found = weights_of(undisturbed), weights_of(run)
    assert expected.keys() == found.keys()
    off = {name: float((found[name] - one).norm() / one.norm()) for name, one in expected.items()}
    assert max(off.values()) < CLOSE, off
