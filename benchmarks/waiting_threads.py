"""Measure a training step alone and next to a busy program, for each waiting policy of OpenMP threads.

    python benchmarks/waiting_threads.py [--rounds 3] [--out FOLDER]

Each arm is a separate process: steps of a GPT-2 of 6 layers of 256 with 2 x 256 tokens and AdamW, on all cores. The
busy program runs an endless loop. Arms take turns. Prints a table, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from _results import add_out, file_result, table

NUM_STEPS = 6
ARMS = {
    "torch's default": {},
    "spin 10,000 times": {"GOMP_SPINCOUNT": "10000"},
    "spin 1,000 times": {"GOMP_SPINCOUNT": "1000"},
    "do not spin": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def run_arm() -> None:
    """Print the mean seconds of the steps after the first."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=256, n_head=4, vocab_size=8000))
    optimizer, tokens = torch.optim.AdamW(model.parameters()), torch.randint(0, 8000, (2, 256))
    for step in range(NUM_STEPS):
        if step == 1:
            started = time.perf_counter()
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    print((time.perf_counter() - started) / (NUM_STEPS - 1))


@contextmanager
def counting() -> Iterator[None]:
    """Run a program that keeps one core busy."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as program:
        try:
            yield
        finally:
            program.kill()


def measure(variables: dict[str, str]) -> float:
    """Return the seconds of a step in an environment."""
    done = subprocess.run(
        [sys.executable, __file__, "--arm"], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    add_out(parser)
    parser.add_argument("--arm", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        run_arm()
        return
    found: dict[str, dict[str, list[float]]] = {arm: {"alone": [], "beside": []} for arm in ARMS}
    for _ in range(arguments.rounds):
        for arm, variables in ARMS.items():
            found[arm]["alone"].append(measure(variables))
        with counting():
            for arm, variables in ARMS.items():
                found[arm]["beside"].append(measure(variables))
    medians = {arm: {where: statistics.median(all_of) for where, all_of in row.items()} for arm, row in found.items()}
    rows = [(arm, *(f"{row[where]:.3f} s" for where in ("alone", "beside"))) for arm, row in medians.items()]
    text = table(("threads", "a step alone", "beside a busy program"), rows)
    print(text)
    file_result(arguments.out, "waiting-threads", "How threads wait", text)
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
