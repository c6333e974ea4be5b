"""Planning time after the imports, memory and evaluations: for GPT-2 124M, and for 4 billion parameters.

    python benchmarks/plan_quick.py [--only TEXT] [--out FOLDER]

`plan_job` makes each plan in a separate process. Cases: GPT-2 with 64 x 512 tokens on the CPU and an RTX 3060, and
Qwen3-4B with 8 x 512 tokens on larger GPUs. (If no exact plan fits there, the plan names lossy alternatives.) All use
AdamW in float32. The goals are 30 s and 120 s on 2 cores. Memory is the peak of the process, including libraries.

Each case begins with a cache that contains only this machine's speed. It is then planned again for 15/16 of its budget
(or of the GPU), with the cached traces. An evaluation is a new or cached trace; a count is an allocator's result for an
evaluation; a guess is a combination that was only estimated, with all its micro-batches. Processor seconds include
children. Prints a table, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

from _results import add_out, file_result
from plimsoll.records.base import cache_folder

GIB = 1 << 30
GPT2 = {"architecture": "gpt2"}
QWEN3 = {
    "architecture": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
# The model, its vocabulary, samples of 512 tokens, the device, its budget in GiB (None: all of it), and the goal.
CASES: dict[str, tuple[dict[str, Any], int, int, str, float | None, float]] = {
    "GPT-2 124M, CPU, all of it": (GPT2, 50257, 64, "cpu", None, 30.0),
    "GPT-2 124M, CPU, 4 GiB": (GPT2, 50257, 64, "cpu", 4.0, 30.0),
    "GPT-2 124M, CPU, 2 GiB": (GPT2, 50257, 64, "cpu", 2.0, 30.0),
    "GPT-2 124M, RTX 3060": (GPT2, 50257, 64, "rtx3060", None, 30.0),
    "Qwen3-4B, A100 40 GB": (QWEN3, 151936, 8, "a100-40gb", None, 120.0),
    "Qwen3-4B, RTX 4090": (QWEN3, 151936, 8, "rtx4090", None, 120.0),
}


def plan_here(case: str) -> None:
    """Make one plan in this process, and print its cost."""
    import torch  # noqa: F401
    import transformers  # noqa: F401

    from plimsoll.planning.plan import plan_job
    from plimsoll.planning.search.surrogate import Surrogate
    from plimsoll.planning.targets import Target
    from plimsoll.records.job import Job

    counts, guesses = counted(Target, "count"), counted(Surrogate, "guess")
    model, vocab_size, batch_size, device, budget_gib, _ = CASES[case]
    fields = {
        "model": model, "task": "language-modeling", "data": {"train": "nowhere.txt"}, "sequence_length": 512,
        "batch_size": batch_size, "tokenizer": {"train": "bpe", "vocab_size": vocab_size},
    }  # fmt: skip
    started, processor = time.perf_counter(), sum(os.times()[:4])
    limit_bytes = None if budget_gib is None else int(budget_gib * GIB)
    plan = plan_job(Job.from_fields(fields), device=device, limit_bytes=limit_bytes)
    found = {
        "seconds": time.perf_counter() - started,
        "processor_seconds": sum(os.times()[:4]) - processor,
        "num_traces": plan.num_traces,
        "num_counts": len(counts),
        "num_guesses": len(guesses),
        "memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
        "fits": plan.fits,
        "num_fallbacks": len(plan.fallbacks),
        "choices": " ".join(map(str, plan.choices)),
    }
    assert plan.limit_bytes is not None
    less_bytes = (limit_bytes or plan.limit_bytes) * 15 // 16
    found["num_traces_again"] = plan_job(Job.from_fields(fields), device=device, limit_bytes=less_bytes).num_traces
    print(json.dumps(found))


def counted(kind: type, name: str) -> list[None]:
    """Return a list that grows by one at each call of a method."""
    calls: list[None] = []
    method = getattr(kind, name)

    def counting(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        return method(*arguments, **options)

    setattr(kind, name, counting)
    return calls


def measure(case: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="plimsoll-") as cache:
        for file in cache_folder().glob("speed-*.json"):
            shutil.copy(file, cache)
        child = subprocess.run(
            [sys.executable, __file__, "--case", case], capture_output=True, text=True, check=False, timeout=1800,
            env=os.environ | {"PLIMSOLL_CACHE": cache},
        )  # fmt: skip
    if child.returncode != 0:
        sys.exit(f"the plan for {case} fails: {child.stderr.strip().splitlines()[-1]}")
    print(f"{case}: {child.stdout.splitlines()[-1]}", file=sys.stderr, flush=True)
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| plan for | seconds | processor seconds | aim | traces | again | counts | guesses | host memory | plan |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: | --- |",
    ]
    for case, row in found.items():
        says = row["choices"] if row["fits"] else f"does not fit; least: {row['choices']}"
        lines.append(
            f"| {case} | {row['seconds']:.0f} | {row['processor_seconds']:.0f} | {CASES[case][5]:.0f} | "
            f"{row['num_traces']} | {row['num_traces_again']} | {row['num_counts']} | {row['num_guesses']} | "
            f"{row['memory_gib']:.2f} GiB | {says} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--data", help="ignored")
    add_out(parser)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        plan_here(arguments.case)
        return
    found = {case: measure(case) for case in CASES if arguments.only in case}
    text = f"Seconds after the imports; memory is the process's largest, libraries included.\n\n{table(found)}"
    print(text)
    file_result(arguments.out, "plan-quick", "Time to plan", text)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
