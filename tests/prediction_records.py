"""Predictions small enough to check by hand; 1 MiB is 2**20 bytes."""

from __future__ import annotations

from plimsoll.records.prediction import Answer, Estimate, Holding, MemoryTimeline, Moment, Prediction, WhatIf
from plimsoll.records.trace import Assumption

MIB = 1 << 20
GPT2 = "lib/python3.11/site-packages/transformers/models/gpt2/modeling_gpt2.py:97"


def estimate(likely_mib: int, spread_mib: int = 0, **known_mib: int) -> Estimate:
    """Return an estimate with a symmetric range; all of it is traced by default."""
    known = {f"{name}_bytes": size * MIB for name, size in (known_mib or {"traced": likely_mib}).items()}
    return Estimate(
        likely_bytes=likely_mib * MIB,
        low_bytes=(likely_mib - spread_mib) * MIB,
        high_bytes=(likely_mib + spread_mib) * MIB,
        **known,
    )


def moment(**changes: object) -> Moment:
    """Return the backward of the second step's last matrix product."""
    fields = {"step": 2, "phase": "backward", "op": "aten::mm", "module": "lm_head", "line": f"/opt/venv/{GPT2}"}
    return Moment.model_validate(fields | changes)


def holding(size_mib: int, category: str, shape: str, **made: object) -> Holding:
    """Return one allocation of the first step's forward."""
    where = {"step": 1, "phase": "forward", "op": "aten::addmm", "module": "transformer.h.11.mlp.c_fc"}
    return Holding.model_validate(
        {"num_bytes": size_mib * MIB, "category": category, "shape": shape, "made": moment(**(where | made))}
    )


def timeline(**changes: object) -> MemoryTimeline:
    """Return six points in MiB: weights 100; states 200 from step 2 on; activations up to 500; the fifth is highest."""
    fields: dict[str, object] = {
        "source": "predicted",
        "phase": ("setup", "forward", "backward", "forward", "backward", "optimizer"),
        "step": (0, 1, 1, 2, 2, 2),
        "label": ("aten::empty", "aten::mm in h.0", "aten::mm", "aten::mm in h.0", "aten::mm in <lambda>", "aten::add"),
        "categories": {
            "activations": tuple(size * MIB for size in (0, 400, 300, 450, 500, 0)),
            "parameters": (100 * MIB,) * 6,
            "optimizer states": tuple(size * MIB for size in (0, 0, 0, 200, 200, 200)),
        },
        "used_bytes": tuple(size * MIB for size in (100, 500, 400, 750, 800, 300)),
        "reserved_bytes": tuple(size * MIB for size in (120, 520, 520, 770, 900, 900)),
        "peak_row": 4,
    }
    return MemoryTimeline.model_validate(fields | changes)


def fitting(**changes: object) -> Prediction:
    """Return a peak of 1000 MiB (range 960 to 1040) of 2048: 800 traced, 150 measured, 50 modelled."""
    fields: dict[str, object] = {
        "subject": "gpt2, language-modeling",
        "device": "NVIDIA GeForce RTX 3060",
        "device_kind": "cuda",
        "capacity_bytes": 12288 * MIB,
        "limit_bytes": 2048 * MIB,
        "limit_source": "--budget",
        "micro_batch": 8,
        "sequence_length": 1024,
        "batch_size": 64,
        "precision": "bf16",
        "peak": estimate(1000, 40, traced=800, measured=150, modelled=50),
        "allocated": estimate(800),
        "reserved": estimate(850, 40, traced=800, modelled=50),
        "context": estimate(150, measured=150),
        "host": estimate(3072, 512, assumed=3072),
        "moment": moment(),
        "parts": {
            "parameters": 100 * MIB,
            "optimizer states": 200 * MIB,
            "activations": 500 * MIB,
            "context": 150 * MIB,
            "fragmentation": 50 * MIB,
            "buffers": 0,
        },
        "largest": (
            holding(300, "activations", "float32[8, 1024, 50257]", module="lm_head"),
            holding(48, "activations", "bfloat16[8, 1024, 3072]"),
            holding(40, "parameters", "float32[50257, 768]", step=0, phase="setup", op="", module="", line=""),
        ),
        "timeline": timeline(),
        "what_ifs": tuple(
            WhatIf(micro_batch=batch, sequence_length=length, peak=estimate(size, 10), fits=size <= 2048)
            for batch, length, size in ((8, 512, 700), (8, 1024, 1000), (16, 512, 1000), (16, 1024, 3072))
        ),
        "answers": (
            Answer(question="largest micro-batch", value=14, peak=estimate(2000, 40)),
            Answer(question="longest sequence", value=1024, peak=estimate(1000, 40), is_bound=True),
            Answer(question="smallest device", value="NVIDIA T1000 (4 GiB)", peak=None),
        ),
        "assumptions": (
            Assumption(text="no other process uses the device"),
            Assumption(text="cuBLAS takes its default workspace", high_bytes=64 * MIB),
            Assumption(text="a custom kernel was not traced", low_bytes=-16 * MIB, high_bytes=64 * MIB),
        ),
        "versions": {"torch": "2.13.0", "plimsoll": "0.1.0"},
        "predict_seconds": 12.34,
    }
    return Prediction.model_validate(fields | changes)


def too_large(**changes: object) -> Prediction:
    """Return a peak of 3072 MiB (range 2972 to 3172) of 2048: OOM in the first backward; 5 samples would fit."""
    fields: dict[str, object] = {
        "peak": estimate(3072, 100, traced=2000, assumed=1072),
        "parts": {"activations": 2922 * MIB, "context": 150 * MIB},
        "answers": (Answer(question="largest micro-batch", value=5, peak=estimate(1990, 30)),),
        "what_ifs": (),
        "runs_out_at": moment(step=1, op="aten::addmm", module="transformer.h.2.mlp"),
    }
    return fitting(**(fields | changes))


def bare(**changes: object) -> Prediction:
    """Return a prediction in which all optional fields are empty."""
    nothing = {"step": 0, "phase": "setup", "op": "", "module": "", "line": ""}
    fields: dict[str, object] = {
        "peak": Estimate(likely_bytes=1000 * MIB, low_bytes=1000 * MIB, high_bytes=1000 * MIB),
        "host": None,
        "moment": moment(**nothing),
        "parts": {},
        "largest": (),
        "timeline": timeline(phase=(), step=(), label=(), categories={}, used_bytes=(), reserved_bytes=(), peak_row=0),
        "what_ifs": (),
        "answers": (),
        "assumptions": (),
        "versions": {},
    }
    return fitting(**(fields | changes))


def on_cpu(**changes: object) -> Prediction:
    """Return 1000 MiB of private memory (range 900 to 1100) under a limit of 1024: it probably fits."""
    fields: dict[str, object] = {
        "subject": "lstm, classification",
        "device": "Example CPU",
        "device_kind": "cpu",
        "limit_bytes": 1024 * MIB,
        "limit_source": "cgroup v2 memory.max",
        "precision": "fp32",
        "peak": estimate(1000, 100, traced=800, measured=200),
        "context": estimate(200, measured=200),
        "host": None,
        "parts": {"activations": 500 * MIB, "parameters": 300 * MIB, "baseline": 195 * MIB, "fragmentation": 5 * MIB},
        "what_ifs": (),
        "answers": (),
    }
    return fitting(**(fields | changes))
