"""Hand-made runs: a graph that grows by 1 MiB of tensors and 100 operations per step, checked after steps 3 to 30."""

from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.device import Budget, Device, MemoryUse
from plimsoll.records.diagnosis import Diagnosis, Fact, Finding, MemoryGrowth
from plimsoll.records.plan import micro_batch_plan
from plimsoll.records.run import GraphLine, RetainedGraph, RunRecord, StepLine

MIB = 1 << 20
CHECKED_STEPS = (3, 4, 5, 6, 7, 8, 10, 12, 15, 18, 22, 27)


def retained(step, **changes):
    """Return the contents of `model.history` after a step: one tensor of 1 MiB per step, and its inputs."""
    earlier = tuple(one for one in (1, 2, *CHECKED_STEPS) if one < step)
    is_walked = step <= CHECKED_STEPS[2]
    fields = {
        "holder": "model.history",
        "num_tensors": step,
        "num_bytes": step * MIB,
        "num_nodes": 100 * step if is_walked else None,
        "graph_bytes": 0 if is_walked else None,
        "marked_steps": earlier,
        "alive_steps": earlier,
        "place": "model.py:7",
        "code": "self.history.append(output)",
        "remedy": "self.history.append(output.detach())",
    }
    return RetainedGraph(**fields | changes)


def lines(**changes):
    """Return a line for each checked step."""
    return tuple(GraphLine(step=step, retained=(retained(step, **changes),)) for step in CHECKED_STEPS)


def evidence(**changes):
    """Return thirty steps of a process of 100 MiB that grows by 1 MiB per step."""
    fields = {
        "subject": "a run",
        "kind": "cpu",
        "first_step": 0,
        "last_step": 30,
        "used_bytes": tuple((step, (100 + step) * MIB) for step in range(1, 31)),
        "graphs": lines(),
        "peak_bytes": 300 * MIB,
    }
    return Evidence(**fields | changes)


def step_line(step, **changes):
    """Return a step of one sample."""
    fields = {
        "time_seconds": float(step), "step": step, "epoch": 0, "first_sample": step - 1, "num_samples": 1,
        "num_units": 1, "loss": 1.0, "learning_rate": 0.1, "step_seconds": 1.0, "micro_batch": 1,
    }  # fmt: skip
    return StepLine.model_validate(fields | changes)


def empty_run(**changes):
    """Return a run without events."""
    use = MemoryUse(used_bytes=0, peak_bytes=0, reserved_bytes=0)
    device = Device(
        name="a CPU", kind="cpu", capacity_bytes=1 << 30, free_bytes=1 << 30, hardware_bytes=1 << 30, use=use
    )
    fields = {
        "name": "tiny", "job": {}, "plan": micro_batch_plan(Budget(), (1,)), "device": device, "status": "finished",
    }  # fmt: skip
    return RunRecord.model_validate(fields | changes)


def diagnosis(**changes):
    """Return one finding with all fields set."""
    finding = Finding(
        cause="graph_kept",
        title="`model.history` collects tensors with their graphs: graph grows by 1.0 MiB per step",
        place="model.py:7",
        evidence=(
            Fact(text="`model.history` has 30 tensors, 30.0 MiB", known="counted"),
            Fact(text="100 operations per step, each about 1 KiB of the host's memory", known="assumed"),
        ),
        peak_share=0.1,
        remedy="keep it without its graph: in model.py:7 write the line below for `self.history.append(output)`",
        code="self.history.append(output.detach())",
        effect_bytes=30 * MIB,
        effect_known="counted",
        effect_high_bytes=60 * MIB,
    )
    growth = MemoryGrowth(
        likely_bytes=2 * MIB, low_bytes=MIB, high_bytes=3 * MIB, first_step=7, last_step=30, is_steady=True
    )
    fields = {"subject": "tiny", "num_steps": 30, "peak_bytes": 300 * MIB, "growth": growth, "findings": (finding,)}
    return Diagnosis(**fields | changes)


def unknown_diagnosis():
    """Return one finding with few fields set, and no memory figures."""
    finding = Finding(cause="graph_kept", title="hidden state not detached", remedy="detach the state [bold]")
    return diagnosis(findings=(finding,), growth=None, peak_bytes=None, num_steps=1, notes=("Too few steps.",))


def empty_diagnosis():
    """Return a diagnosis without findings, of a flat run."""
    growth = MemoryGrowth(likely_bytes=1024, low_bytes=0, high_bytes=2048, first_step=7, last_step=30, is_steady=False)
    return diagnosis(findings=(), growth=growth)
