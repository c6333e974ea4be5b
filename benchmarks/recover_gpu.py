"""How fast a training is after memory ran out once, against the best rung that fits.

    PYTHONPATH=src python benchmarks/recover_gpu.py [--budget 4GiB] [--steps 12] [--tiny]

GPT-2 of 124M parameters (vocabulary 8,000) on 64 x 512 tokens, bf16, AdamW, clipped, inside a budget on a GPU. The
rungs are those of a plan: 16 samples and fewer, all blocks checkpointed. Three trainings:

- *steady*: no event, which is what the others are held to;
- *injected*: a moment's shortage in the first forward pass, which no size is to blame for;
- *too large*: a rung before these has no checkpointing and really runs out, in the first step.

It exits with 1 if, from the tenth step after the event on, the median step takes more than 1.25 times the steady one.
``--tiny`` trains a small model on the processor, to try the code. Prints a table and a last line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import transformers

from _results import table
from plimsoll import TrainStep
from plimsoll.device.base import backend_for
from plimsoll.records.plan import Choice, Rung, micro_batch_choice
from plimsoll.records.prediction import Estimate
from plimsoll.records.units import format_bytes, parse_bytes
from plimsoll.run.failpoints import armed

_MIB = 1 << 20
_ALL_BLOCKS = Choice(technique="checkpointing", options={"blocks": "all"})
_MOST_OF_STEADY = 1.25


def rung(samples: int, peak_mib: int, *others: Choice) -> Rung:
    """A rung with what is predicted for it: allocated bytes and a context of 500 MiB."""
    num_bytes = peak_mib * _MIB
    peak = Estimate(likely_bytes=num_bytes, low_bytes=num_bytes, high_bytes=num_bytes, traced_bytes=num_bytes)
    return Rung(choices=(micro_batch_choice(samples), *others), peak=peak)


CHECKPOINTED = (rung(16, 3435, _ALL_BLOCKS), rung(4, 2990, _ALL_BLOCKS), rung(1, 2800, _ALL_BLOCKS))
TRAININGS = {"steady": CHECKPOINTED, "injected": CHECKPOINTED, "too large": (rung(16, 3900), *CHECKPOINTED)}


def train(rungs: Sequence[Rung], device: str, num_steps: int, tiny: bool, injects: bool) -> dict[str, Any]:
    """Train; returns the seconds of each step with its rung, and the number of events."""
    width, layers, length, batch_size = (32, 2, 32, 64) if tiny else (768, 12, 512, 64)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=8000, n_positions=length, n_embd=width, n_layer=layers, n_head=width // 16 if tiny else 12
    )
    model = transformers.GPT2LMHeadModel(config).train().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    step = TrainStep(model, optimizer, units="next-tokens", clip_norm=1.0, precision="bf16", rungs=rungs)
    ids = torch.arange(batch_size * length).view(batch_size, length) * 7919 % 7998 + 1
    rows, num_events = [], 0
    for number in range(num_steps + 1):
        with armed("forward", 1) if injects and number == 0 else nullcontext():
            step.backend.synchronize()
            started = time.perf_counter()
            result = step({"input_ids": ids, "labels": ids})
            step.backend.synchronize()
            rows.append((round(time.perf_counter() - started, 4), result.rung))
            num_events += len(result.oom_events)
    peak_bytes = step.backend.use().peak_bytes
    step.close()
    return {"steps": rows, "events": num_events, "peak_bytes": peak_bytes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="4GiB", help="what the process may use (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=12, help="steps after that of the event, 10 or more (default: %(default)s)"
    )
    parser.add_argument("--tiny", action="store_true", help="a small model on the processor")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    device = "cpu" if options.tiny else "cuda"
    backend = backend_for(device)
    found = {}
    with backend.limited(parse_bytes(options.budget)):
        for name, rungs in TRAININGS.items():
            found[name] = train(rungs, device, options.steps, options.tiny, injects=name == "injected")
            gc.collect()
            backend.release()
            backend.reset_peak()
    steady = statistics.median(seconds for seconds, _ in found["steady"]["steps"][1:])
    rows, figures = [], {}
    for name, one in found.items():
        after = [seconds for seconds, _ in one["steps"][1:]]
        late = statistics.median(after[9:])
        figures[name] = {
            "events": one["events"], "late_seconds": round(late, 4), "of_steady": round(late / steady, 3),
            "peak_bytes": one["peak_bytes"], "steps": one["steps"],
        }  # fmt: skip
        shown = " ".join(f"{seconds:.2f}/{rung}" for seconds, rung in one["steps"])
        rows.append([name, str(one["events"]), f"{late:.3f} s", f"{late / steady:.2f}", shown])
    print(f"{options.budget} on {device}; the last trained in {format_bytes(found['too large']['peak_bytes'] or 0)}")
    print(table(["training", "events", "late steps", "of steady", "seconds / rung of each step"], rows))
    print(json.dumps(figures))
    return int(any(one["of_steady"] > _MOST_OF_STEADY for one in figures.values()))


if __name__ == "__main__":
    raise SystemExit(main())
