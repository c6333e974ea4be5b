"""A BiLSTM tagger on long sequences inside a budget: roles of the words in Python's standard library.

    python benchmarks/recurrent_tagger.py                       # 60 files of this Python's library, in minutes
    python benchmarks/recurrent_tagger.py --data path/to/sources --files 400 --length 512 --budget 700MiB

A text is a file, read with ``tokenize``; a word is a token. Tags are keyword, operator, number, string, comment, and
four roles of names: defined (after ``def`` or ``class``), called (before a parenthesis), attribute (after a dot), or
read. A tag therefore depends on both neighbours. The words of a file are one sequence of thousands, cut into
overlapping windows.

One job is trained twice: without a limit, and inside the budget, with smaller micro-batches if needed. The losses must
be equal. An arm that fails shows its error. Peaks are private memory as the training process reads it. Prints a table,
and one JSON object as the last line. Linux only.
"""

from __future__ import annotations

import argparse
import io
import json
import keyword
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

Figures = dict[str, Any]
KINDS = {tokenize.OP: "operator", tokenize.NUMBER: "number", tokenize.STRING: "string", tokenize.COMMENT: "comment"}
FIRST_STEPS = 3  # warm-up, not timed


def tagged_words(source: str) -> Iterator[tuple[str, str]]:
    """Yield the words of a file with their tags; strings and comments end at the first blank."""
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type in KINDS or token.type == tokenize.NAME
    ]
    for number, token in enumerate(tokens):
        before = tokens[number - 1].string if number else ""
        after = tokens[number + 1].string if number + 1 < len(tokens) else ""
        tag = KINDS.get(token.type)
        if tag is None:
            tag = role_of(token.string, before, after)
        yield token.string.split()[0], tag


def role_of(name: str, before: str, after: str) -> str:
    """Return the role of a name."""
    if keyword.iskeyword(name):
        return "keyword"
    if before in {"def", "class"}:
        return "definition"
    if before == ".":
        return "attribute"
    return "call" if after == "(" else "name"


def write_files(paths: list[Path], target: Path) -> tuple[int, int]:
    """Write a row for each file that Python can tokenize; return the numbers of files and words."""
    num_files = num_words = 0
    with target.open("w", encoding="utf-8") as rows:
        for path in paths:
            try:
                pairs = list(tagged_words(path.read_text(encoding="utf-8")))
            except (tokenize.TokenError, SyntaxError, UnicodeDecodeError):
                continue
            if pairs:
                row = {"tokens": [word for word, _ in pairs], "tags": [tag for _, tag in pairs]}
                rows.write(json.dumps(row, ensure_ascii=False) + "\n")
                num_files, num_words = num_files + 1, num_words + len(pairs)
    return num_files, num_words


def train(folder: Path, name: str, budget: str | None, args: argparse.Namespace) -> Figures:
    """Train one arm, and return the figures of its record."""
    job = {
        "model": {
            "architecture": "lstm", "embedding_size": 64, "hidden_size": args.hidden, "num_layers": 2,
            "bidirectional": True, "dropout": 0.0,  # so that a split batch has the same loss
        },
        "task": "token-classification",
        "data": {"train": str(folder / "files.jsonl"), "validation": 0.1, "stride": args.length * 7 // 8},
        "tokenizer": {"train": "words", "vocab_size": 8000, "min_count": 2},
        "sequence_length": args.length, "batch_size": args.batch, "steps": args.steps,
        "optimizer": {"name": "adamw", "lr": 3e-3, "clip_norm": 1.0},
    }  # fmt: skip
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(job))
    command = [
        sys.executable, "-m", "plimsoll", "train", str(file), "--out", str(folder / name), "--no-plan",
        "--cache", str(folder / "cache"), "--json", *(["--budget", budget] if budget else []),
    ]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    record = json.loads(done.stdout.splitlines()[-1])
    steps, last = record["steps"], record["evaluations"][-1]
    counted = steps[FIRST_STEPS:]
    return {
        "accuracy": last["accuracy"],
        "validation_loss": last["loss"],
        "losses": [step["loss"] for step in steps],
        "words_per_second": sum(step["num_units"] for step in counted) / sum(step["step_seconds"] for step in counted),
        "micro_batch": steps[-1]["micro_batch"],
        "num_oom_events": len(record["oom_events"]),
        "peak_bytes": max(step["peak_bytes"] or 0 for step in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(json.__file__).parents[1], help="folder of Python sources")
    parser.add_argument("--files", type=int, default=60)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--budget", default="450MiB")
    args = parser.parse_args()
    paths = sorted(args.data.glob("*.py"))[: args.files]
    if not paths:
        raise SystemExit(f"there is no .py file in {args.data}: give a folder of Python sources with --data")
    with tempfile.TemporaryDirectory(prefix="plimsoll-") as temporary:
        folder = Path(temporary)
        num_files, num_words = write_files(paths, folder / "files.jsonl")
        arms: dict[str, Figures] = {
            name: train(folder, name, budget, args)
            for name, budget in (("no-limit", None), ("inside-the-budget", args.budget))
        }
    difference = None
    if not any("error" in found for found in arms.values()):
        whole, cut = (np.array(found["losses"]) for found in arms.values())
        difference = float(np.max(np.abs(whole - cut)))
    title = (
        f"BiLSTM 2 x {args.hidden}, {num_files} files with {num_words:,} words, {args.steps} steps of {args.batch} x "
        f"{args.length}; budget {args.budget}"
    )
    table = Table("arm", "peak", "OOM", "micro-batch", "words/s", "last loss", "right words", title=title)
    for name, found in arms.items():
        if "error" in found:
            table.add_row(name, found["error"])
            continue
        table.add_row(
            name, f"{found['peak_bytes'] / 2**20:.0f} MiB", str(found["num_oom_events"]), str(found["micro_batch"]),
            f"{found['words_per_second']:,.0f}", f"{found['losses'][-1]:.4f}", f"{found['accuracy']:.1%}",
        )  # fmt: skip
    Console(width=120).print(table)
    if difference is not None:
        print(f"largest difference of the losses of one step: {difference:.1e}")
    print(json.dumps({"arms": arms, "num_files": num_files, "num_words": num_words, "loss_difference": difference}))


if __name__ == "__main__":
    main()
