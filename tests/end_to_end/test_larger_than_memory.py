"""Full fine-tuning of a model whose weights, gradients and Adam states exceed the whole budget, killed midway.

It runs on the CPU with a disk. The budget covers all private memory of the training process, including libraries;
offloaded tensors are in files. The run is killed and resumed, and its result must equal an unlimited run to the bit.
The case with four times the budget takes minutes and is `slow`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from end_to_end.commands import (
    CORPUS,
    PeakWatch,
    assert_each_sample_once,
    assert_same_bits,
    finish,
    kill_all,
    learned,
    lines_of,
    plimsoll,
    start,
    steps_of,
    trained,
    wait_for_worker,
    wait_until,
    write_job,
)
from plimsoll.data.quick_facts import sketch_texts
from plimsoll.device.cpu.data_limit import MARGIN_BYTES
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.models.build import build_model
from plimsoll.models.workload import resident_bytes
from plimsoll.planning.plan_validity import facts_of
from plimsoll.records.device import Budget
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, Configuration, Plan, micro_batch_choice
from plimsoll.records.run import CheckpointLine, RunRecord
from plimsoll.techniques import in_order
from plimsoll.techniques.checkpointing import checkpointing_choice

MIB = 1 << 20
CHOICES = (
    micro_batch_choice(4),
    checkpointing_choice("all"),
    Choice(technique="optimizer_offload", options={"to": "disk"}),
    Choice(technique="parameter_offload", options={"gradients": True}),
)


def job_of(folder: Path, width: int, num_layers: int, **changes: object) -> Path:
    """Write the job of a large GPT-2 on little text. It has dropout, so its random numbers must survive a kill."""
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    sizes = {"n_embd": width, "n_layer": num_layers, "n_head": 8, "n_positions": 32}
    return write_job(
        folder / "job.yaml",
        model={"architecture": "gpt2", **sizes, **rates},
        data={"train": str(CORPUS / "*.py")},
        sequence_length=16,
        batch_size=4,
        optimizer={"name": "adamw", "lr": 1e-3, "clip_norm": 1.0},
        **changes,
    )


def budget_of(job: Job, share: float = 0.25) -> int:
    """Return a share of weights, gradients and states, in whole MiB."""
    sizes = resident_bytes(build_model(job, 400, None, 0, device="meta"), job.optimizer)
    return int(share * sum(size or 0 for size in sizes.values())) // MIB * MIB


def write_plan(folder: Path, job_file: Path, budget_bytes: int) -> Path:
    """Write the plan that a search finds, without its minute of run time."""
    job = Job.from_yaml(job_file)
    plan = Plan(
        budget=Budget(device_bytes=budget_bytes),
        fallbacks=(Configuration(choices=in_order(CHOICES)),),
        limit_bytes=budget_bytes - MARGIN_BYTES,
        made_for=facts_of(job, sketch_texts(job), CpuLowering().name),
    )
    plan.save(folder / "plan.json")
    return folder / "plan.json"


def saved_steps(run: Path) -> list[int]:
    return [line.step for line in lines_of(run) if isinstance(line, CheckpointLine)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "num_layers", "share"),
    [(512, 12, 0.72), (768, 16, 0.25)],  # the libraries alone take some 300 MiB
)
def test_less_than_its_memory_gives_the_same_bits_also_when_killed_midway(width, num_layers, share, tmp_path, cache):
    job = job_of(tmp_path, width, num_layers, steps=2, checkpoint={"every": 1, "keep": 1})
    trained(job, "--no-plan", "--set", "checkpoint.every=2", "--out", tmp_path / "free", "--cache", cache)
    budget_bytes = budget_of(Job.from_yaml(job), share)
    plan = write_plan(tmp_path, job, budget_bytes)
    run = tmp_path / "run"
    process = start("train", job, "--plan", plan, "--out", run, "--cache", cache, "--json")
    wait_until(lambda: 1 in saved_steps(run), process)
    kill_all(process)
    process = start("train", "--resume", "--out", run, "--json")
    with PeakWatch(wait_for_worker(process).pid).watching() as watch:
        done = finish(process)
    assert done.returncode == 0, done.stderr
    record = RunRecord.from_directory(run)
    assert record.oom_events == ()
    assert_each_sample_once(steps_of(run), 2)
    assert watch.num_readings > 100
    assert watch.peak_bytes <= budget_bytes
    assert max(line.peak_bytes for line in steps_of(run)) <= budget_bytes
    assert_same_bits(learned(run), learned(tmp_path / "free"))


@pytest.mark.slow
def test_the_planner_finds_it_and_says_what_it_takes(tmp_path, cache):
    """With a smaller model nothing would fit: the libraries alone take most of a quarter."""
    job = job_of(tmp_path, width=1024, num_layers=12, steps=2)
    budget_bytes = budget_of(Job.from_yaml(job))
    done = plimsoll("plan", job, "--budget", f"{budget_bytes // MIB}MiB", "-o", tmp_path / "plan.json")
    assert done.returncode == 0, done.stderr
    plan = Plan.load(tmp_path / "plan.json")
    assert {"parameter_offload", "optimizer_offload"} <= {choice.technique for choice in plan.choices}
    trained(job, "--plan", tmp_path / "plan.json", "--out", tmp_path / "run", "--cache", cache)
    record = RunRecord.from_directory(tmp_path / "run")
    assert record.oom_events == ()
    peak_bytes = max(line.peak_bytes for line in record.steps)
    assert peak_bytes <= budget_bytes
    assert plan.fallbacks[0].peak is not None
    assert peak_bytes == pytest.approx(plan.fallbacks[0].peak.likely_bytes, rel=0.1)
