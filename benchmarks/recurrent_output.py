"""The output layer of an LSTM language model with a large vocabulary, in three forms: plain, in chunks, adaptive.

    python benchmarks/recurrent_output.py --train wikitext2-test.txt --validation wikitext2-valid.txt
    python benchmarks/recurrent_output.py                   # the standard library's sources, in place of English

The model has one LSTM layer (embedding 128, hidden 256) and is trained with AdamW. The tokenizer has the words of the
training text by frequency, and unused words up to ``--words``. Three trainings use the same batches and seed on one
thread, each in a separate process: as in plain PyTorch, with ``chunked_loss`` and with ``adaptive_softmax``. Measured
is the highest private memory of the process during the steps, with and without its baseline. The other results are the
median processor seconds per step, and the final loss on held-out text. Prints a table, and one JSON object as the last
line. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demo import standard_library
from plimsoll.data.prepare import prepare
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.records.prepared import Prepared

ARMS: dict[str, tuple[Choice, ...]] = {
    "plain": (),
    "chunked_loss=256": (Choice(technique="chunked_loss", options={"chunk_tokens": 256}),),
    "adaptive_softmax": (Choice(technique="adaptive_softmax", options={"cutoffs": "auto", "div_value": 4}),),
}
HELD_OUT_BATCHES = 12


def job_of(args: argparse.Namespace, tokenizer: dict[str, Any]) -> Job:
    return Job.from_fields(
        {
            "model": {"architecture": "lstm", "embedding_size": 128, "hidden_size": 256, "dropout": 0.2},
            "data": {"train": args.train, "validation": args.validation},
            "tokenizer": tokenizer,
            "sequence_length": args.length,
            "batch_size": args.batch,
            "optimizer": {"name": "adamw", "lr": 2e-3, "clip_norm": 1.0},
            "steps": args.steps,
            "device": "cpu",
            "allow": ["adaptive_softmax"],
        }
    )


def prepare_texts(args: argparse.Namespace, folder: Path) -> None:
    """Write the job and its tokens, with a vocabulary of the requested size."""
    fields = {"train": "words", "vocab_size": args.words}
    trained = Path(prepare(job_of(args, fields), folder / "cache").tokenizer_folder) / "tokenizer.json"
    described = json.loads(trained.read_text("utf-8"))
    vocabulary = described["model"]["vocab"]
    vocabulary |= {f"<unused {number}>": number for number in range(len(vocabulary), args.words)}
    (folder / "tokenizer.json").write_text(json.dumps(described), "utf-8")
    job = job_of(args, {"path": str(folder / "tokenizer.json")})
    prepare(job, folder / "cache").save(folder / "prepared.json")
    (folder / "job.json").write_text(job.to_json(), "utf-8")


def measure(folder: Path, choices: tuple[Choice, ...]) -> dict[str, Any]:
    """Train in this process."""
    import torch

    from plimsoll.data.batches.loader import iterate_once
    from plimsoll.device.base import backend_for
    from plimsoll.models.assemble import assemble
    from plimsoll.step.job_step import step_of

    torch.set_num_threads(1)
    job, prepared = Job.load(folder / "job.json"), Prepared.load(folder / "prepared.json")
    backend = backend_for("cpu")
    before_bytes = backend.baseline_bytes()
    parts = assemble(job, prepared, "cpu")
    step = step_of(job, parts.model, parts.optimizer, [(micro_batch_choice(job.batch_size), *choices)])
    backend.reset_peak()
    seconds, losses = [], []
    for _ in range(job.steps):
        started = time.process_time()
        losses.append(step(parts.loader.peek().fields).loss)
        seconds.append(time.process_time() - started)
        parts.loader.advance()
    peak_bytes = backend.use().peak_bytes
    held_out = (batch.fields for batch in islice(iterate_once(parts.validation, job.batch_size), HELD_OUT_BATCHES))
    num_parameters = sum(parameter.numel() for parameter in step.workload.model.parameters())
    return {
        "peak_bytes": peak_bytes,
        "training_bytes": peak_bytes - before_bytes,
        "step_seconds": statistics.median(seconds),
        "first_loss": losses[0],
        "held_out_loss": step.evaluate(held_out).loss,
        "num_parameters": num_parameters,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs="*", default=standard_library()[:1], help="text files or patterns")
    parser.add_argument("--validation", default=0.1, help="text file, or share of the text that is held out")
    parser.add_argument("--words", type=int, default=50_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        print(json.dumps(measure(args.folder, ARMS[args.arm])))
        return
    found = {}
    with tempfile.TemporaryDirectory(prefix="plimsoll-") as temporary:
        prepare_texts(args, Path(temporary))
        for name in ARMS:
            command = [sys.executable, __file__, "--arm", name, "--folder", temporary]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
            found[name] = json.loads(done.stdout.splitlines()[-1])
    sizes = f"{args.words:,} words, {args.batch} x {args.length} tokens a step, {args.steps} steps"
    table = Table(
        "output layer",
        "parameters",
        "peak private memory",
        "of that, training",
        "s a step",
        "held-out loss",
        title=sizes,
    )
    for name, one in found.items():
        sizes_mib = (f"{one[key] / 2**20:,.0f} MiB" for key in ("peak_bytes", "training_bytes"))
        row = (f"{one['num_parameters'] / 1e6:.1f} M", *sizes_mib, f"{one['step_seconds']:.2f}")
        table.add_row(name, *row, f"{one['held_out_loss']:.3f}")
    Console(width=120).print(table)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
