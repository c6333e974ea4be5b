"""An LSTM language model on contiguous streams with a carried state, and on shuffled windows, with equal gradient
reach.

    python benchmarks/recurrent_streams.py --text wikitext2-valid.txt
    python benchmarks/recurrent_streams.py --text wikitext2-valid.txt --steps 100   # a quarter of that

Each variant trains the same model with `plimsoll train`, from the same weights, for the same number of steps and
tokens. In all of them a gradient reaches at most ``--reach`` tokens back. The last tenth of the lines is held out. Each
model is evaluated on it twice: in windows of that many tokens that start with a zero state, and as one stream with a
carried state. Times are processor seconds of the whole command. Prints a table, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from plimsoll.data.tokens.store import open_tokens
from plimsoll.models.recurrent.model import RecurrentLanguageModel, load_recurrent
from plimsoll.records.prepared import Prepared

BATCH_SIZE, VOCAB_SIZE, SIZE = 32, 2000, 96
STREAM_WINDOW = 512  # tokens per step when the stream is evaluated; does not affect the result
Figures = dict[str, Any]

ARMS: dict[str, dict[str, Any]] = {
    "shuffled windows, from zeros": {"order": "shuffle"},
    "streams, state carried": {"order": "streams"},
    "streams, reset at texts": {"order": "streams", "reset": "texts"},
}


def split(text: Path, folder: Path) -> None:
    """Write the first nine tenths of the lines, and the last tenth."""
    lines = text.read_text(encoding="utf-8").splitlines(keepends=True)
    num_training = len(lines) * 9 // 10
    (folder / "train.txt").write_text("".join(lines[:num_training]), encoding="utf-8")
    (folder / "held-out.txt").write_text("".join(lines[num_training:]), encoding="utf-8")


def train(folder: Path, number: int, data: dict[str, Any], args: argparse.Namespace) -> Figures:
    """Train one variant, and return its cost and its losses."""
    job = {
        "model": {
            "architecture": "lstm", "embedding_size": SIZE, "hidden_size": SIZE, "num_layers": 2, "dropout": 0.2,
            "tie_weights": True,
        },
        "data": {"train": str(folder / "train.txt"), "validation": str(folder / "held-out.txt"), "unit": "line"} | data,
        "tokenizer": {"train": "words", "vocab_size": VOCAB_SIZE},
        "sequence_length": args.reach + 1, "batch_size": BATCH_SIZE, "steps": args.steps,
        "optimizer": {"lr": 3e-3, "clip_norm": 1.0}, "checkpoint": {"every": args.steps}, "seed": args.seed,
    }  # fmt: skip
    file, run = folder / f"{number}.yaml", folder / str(number)
    file.write_text(yaml.safe_dump(job))
    command = [
        sys.executable, "-m", "plimsoll", "train", str(file), "--out", str(run), "--no-plan", "--cache",
        str(folder / "cache"), "--json",
    ]  # fmt: skip
    before = os.times()
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    after = os.times()
    if done.returncode:
        raise SystemExit(done.stderr)
    steps = json.loads(done.stdout.splitlines()[-1])["steps"]
    model = load_recurrent(run / "model")
    assert isinstance(model, RecurrentLanguageModel)
    prepared = Prepared.load(run / "prepared.json")
    assert prepared.validation is not None
    tokens = open_tokens(Path(str(prepared.validation.tokens_folder))).tokens
    return {
        "training_loss": float(np.mean([step["loss"] for step in steps[-20:]])),
        "loss_from_zeros": loss_from_zeros(model.eval(), tokens, args.reach + 1),
        "loss_of_stream": loss_of_stream(model, tokens),
        "cpu_seconds": after.children_user - before.children_user + after.children_system - before.children_system,
        "peak_bytes": max(step["peak_bytes"] or 0 for step in steps),
        "num_epochs": steps[-1]["epoch"] + 1,
    }


@torch.no_grad()
def loss_from_zeros(model: RecurrentLanguageModel, tokens: np.ndarray, length: int) -> float:
    """Return the mean loss over windows that start with a zero state."""
    windows = tokens[: len(tokens) // length * length].astype(np.int64).reshape(-1, length)
    losses = [model(input_ids=part, labels=part).loss * len(part) for part in torch.from_numpy(windows).split(64)]
    return float(sum(losses)) / len(windows)


@torch.no_grad()
def loss_of_stream(model: RecurrentLanguageModel, tokens: np.ndarray) -> float:
    """Return the mean loss over one stream, in plain PyTorch."""
    ids, loss_sum = torch.from_numpy(tokens.astype(np.int64)), 0.0
    state: tuple[Tensor, Tensor] | None = None
    for begin in range(0, len(ids) - 1, STREAM_WINDOW):
        window = ids[begin : begin + STREAM_WINDOW + 1]
        hidden, state = model.recurrent(model.embedding(window[None, :-1]), state)
        loss_sum += float(nn.functional.cross_entropy(model.head(hidden[0]), window[1:], reduction="sum"))
    return loss_sum / (len(ids) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="text file, one paragraph per line")
    parser.add_argument("--reach", type=int, default=35, help="maximum number of tokens that a gradient reaches back")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plimsoll-") as temporary:
        folder = Path(temporary)
        split(args.text, folder)
        figures = {name: train(folder, number, data, args) for number, (name, data) in enumerate(ARMS.items())}
    title = (
        f"LSTM, 2 layers of {SIZE}, {VOCAB_SIZE:,} words, {args.steps} steps of {BATCH_SIZE} x {args.reach} predicted "
        f"tokens"
    )
    table = Table("training", "its loss", "held out, from zeros", "held out, one stream", "CPU s", "peak", title=title)
    for name, found in figures.items():
        table.add_row(
            name, *(f"{found[which]:.3f}" for which in ("training_loss", "loss_from_zeros", "loss_of_stream")),
            f"{found['cpu_seconds']:.0f}", f"{found['peak_bytes'] / 2**20:.0f} MiB",
        )  # fmt: skip
    Console(width=120).print(table)
    print(json.dumps({"reach_tokens": args.reach, "steps": args.steps, "arms": figures}))


if __name__ == "__main__":
    main()
