"""A GRU classifier with word vectors under `plimsoll train`: the gain in accuracy and the cost in memory.

    python benchmarks/embeddings_classifier.py --data agnews-test.csv   # label, title, body; no header, as AG News has
    python benchmarks/embeddings_classifier.py                          # generated sentences, in seconds
    python benchmarks/embeddings_classifier.py --data ... --text wikitext2-valid.txt --text wikitext2-test.txt

No pretrained vectors can be downloaded here, so they are computed from the texts (and from ``--text``). A singular
value decomposition reduces the positive pointwise mutual information of words at most four apart to 100 numbers per
word (Levy and Goldberg 2014). As in GloVe's files, hundreds of thousands of other words are in the file.

Three trainings use the same GRU, batch, steps, seed and budget: random trained vectors, frozen vectors from the file,
and trained vectors from the file. The memory for loading the whole file in Python is measured for comparison. Prints a
table, and one JSON object as the last line. Linux only.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table
from scipy.sparse import coo_matrix
from scipy.sparse.linalg import svds

from _results import add_out, fenced, file_result, keep_printed
from plimsoll.data.tokens.words import words_of

DIMENSION, WINDOW = 100, 4
NUM_WORDS, NUM_OTHERS = 20_000, 380_000
Figures = dict[str, Any]

ARMS = {
    "drawn at random, trained": {},
    "from the file, frozen": {"trainable": False},
    "from the file, trained": {"trainable": True},
}
LOAD_ALL = """
import sys
import numpy as np
vectors = {}
with open(sys.argv[1], encoding="utf-8") as file:
    for line in file:
        word, *numbers = line.rstrip().split(" ")
        vectors[word] = np.asarray(numbers, dtype="float32")
print(next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon")))
"""


def sentences() -> list[tuple[str, str]]:
    """Return generated labelled sentences, for a run without a corpus."""
    drawn = random.Random(0)
    words = {
        "sport": ["match", "goal", "team", "coach", "season", "league", "striker"],
        "market": ["shares", "profit", "bank", "prices", "trade", "investors", "quarter"],
        "": [
            "the",
            "a",
            "of",
            "in",
            "on",
            "said",
            "after",
            "with",
            "new",
            "for",
            "and",
            "to",
            "is",
            "was",
            "it",
            "by",
            "as",
            "at",
        ],
    }
    rows = []
    for number in range(2000):
        label = ("sport", "market")[number % 2]
        text = drawn.choices(words[""], k=14) + drawn.choices(words[label], k=4)
        drawn.shuffle(text)
        rows.append((label, " ".join(text)))
    return rows


def rows_of(data: Path | None) -> list[tuple[str, str]]:
    """Return labels and texts of a table without a header: label, title, body."""
    if data is None:
        return sentences()
    with data.open(newline="", encoding="utf-8") as file:
        return [(row[0], " ".join(row[1:])) for row in csv.reader(file)]


def vectors_of(texts: Iterable[str]) -> tuple[list[str], np.ndarray]:
    """Return words by frequency and their vectors: the left singular vectors of their mutual information."""
    cut = [words_of(text, lowercase=True) for text in texts]
    words = [word for word, _ in Counter(word for text in cut for word in text).most_common(NUM_WORDS)]
    number_of = {word: number for number, word in enumerate(words)}
    pairs: Counter[tuple[int, int]] = Counter()
    for text in cut:
        numbers = [number_of[word] for word in text if word in number_of]
        for distance in range(1, WINDOW + 1):
            pairs.update(zip(numbers, numbers[distance:], strict=False))
    places = np.array(list(pairs), np.int64)
    counts = coo_matrix((np.fromiter(pairs.values(), float, len(pairs)), places.T), (len(words), len(words))).tocsr()
    counts = (counts + counts.T).tocoo()
    uses = np.asarray(counts.sum(axis=1)).ravel()
    information = np.log(counts.data * uses.sum() / (uses[counts.row] * uses[counts.col]))
    counts.data = np.maximum(information, 0)
    dimension = min(DIMENSION, len(words) - 2)
    left, values, _ = svds(counts.tocsr(), dimension, rng=np.random.default_rng(0))
    vectors = left * np.sqrt(values)
    return words, vectors / vectors.std()  # the scale of random vectors


def write_vectors(path: Path, words: list[str], vectors: np.ndarray) -> None:
    """Write GloVe's text format: the words by frequency, followed by words that occur in no text."""
    others = np.random.default_rng(0).standard_normal((1000, vectors.shape[1]))
    lines = [" ".join(f"{number:.5f}" for number in vector) for vector in others]
    with path.open("w", encoding="utf-8") as file:
        for word, vector in zip(words, vectors, strict=True):
            file.write(f"{word} {' '.join(f'{number:.5f}' for number in vector)}\n")
        for number in range(NUM_OTHERS):
            file.write(f"other-{number} {lines[number % 1000]}\n")


def train(folder: Path, name: str, embeddings: dict[str, Any], args: argparse.Namespace) -> Figures:
    job = {
        "model": {"architecture": "gru", "hidden_size": 96, "embedding_size": args.dimension, "dropout": 0.2},
        "task": "classification",
        "data": {"train": str(folder / "texts.tsv"), "label": "label", "text": "text", "validation": 0.2},
        "tokenizer": {"train": "words", "vocab_size": NUM_WORDS, "lowercase": True},
        "sequence_length": 64, "batch_size": 32, "steps": args.steps, "evaluate_every": args.steps,
        "optimizer": {"name": "adam", "lr": 1e-3},
    }  # fmt: skip
    if embeddings:
        job["embeddings"] = {"path": str(folder / "vectors.txt")} | embeddings
    file = folder / f"{name.replace(' ', '-')}.yaml"
    file.write_text(yaml.safe_dump(job))
    command = [
        sys.executable, "-m", "plimsoll", "train", str(file), "--out", str(file.with_suffix("")), "--budget",
        args.budget, "--no-plan", "--cache", str(folder / "cache"), "--json",
    ]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    record = json.loads(done.stdout.splitlines()[-1])
    steps = record["steps"]
    last = record["evaluations"][-1]
    return {
        "accuracy": last["accuracy"],
        "loss": last["loss"],
        "step_seconds": float(np.median([step["step_seconds"] for step in steps])),
        "peak_bytes": max(step["peak_bytes"] or 0 for step in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="csv file without a header: label, title, body")
    parser.add_argument(
        "--text", type=Path, action="append", default=[], help="more text for the vectors; can be repeated"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--budget", default="450MiB")
    add_out(parser)
    args = parser.parse_args()
    printed = keep_printed()
    with tempfile.TemporaryDirectory(prefix="plimsoll-") as temporary:
        folder = Path(temporary)
        rows = rows_of(args.data)
        with (folder / "texts.tsv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter="\t").writerows([("label", "text"), *rows])
        more = [line for path in args.text for line in path.read_text(encoding="utf-8").splitlines()]
        words, vectors = vectors_of([*(text for _, text in rows), *more])
        write_vectors(folder / "vectors.txt", words, vectors)
        args.dimension = vectors.shape[1]
        figures: Figures = {name: train(folder, name, embeddings, args) for name, embeddings in ARMS.items()}
        all_bytes = int(subprocess.run([sys.executable, "-c", LOAD_ALL, str(folder / "vectors.txt")], check=True,
                                       capture_output=True, text=True).stdout)  # fmt: skip
        file_bytes = (folder / "vectors.txt").stat().st_size
    title = (
        f"{len(rows):,} texts, {len(words):,} words with vectors of {args.dimension} numbers in a file of "
        f"{len(words) + NUM_OTHERS:,} ({file_bytes / 2**20:,.0f} MiB), {args.steps} steps of 32 within {args.budget}"
    )
    table = Table("vectors", "accuracy on a held-out fifth", "loss", "ms a step", "peak private memory", title=title)
    for name, found in figures.items():
        table.add_row(
            name, f"{found['accuracy']:.1%}", f"{found['loss']:.3f}", f"{found['step_seconds'] * 1e3:.0f}",
            f"{found['peak_bytes'] / 2**20:.0f} MiB",
        )  # fmt: skip
    Console(width=120).print(table)
    print(f"all of the file as a dictionary of arrays: {all_bytes / 2**20:,.0f} MiB of private memory")
    shares = [f"{figures[name]['accuracy']:.0%}" for name in ("drawn at random, trained", "from the file, frozen")]
    part = (
        f"A GRU on {len(rows):,} texts within {args.budget}: {shares[0]} right with embeddings drawn at random, "
        f"{shares[1]} with frozen vectors of these texts, {args.steps} steps each."
    )
    title = "A GRU classifier with word vectors"
    file_result(args.out, "embeddings-classifier", title, fenced(printed.text), part)
    print(json.dumps({"arms": figures, "all_bytes": all_bytes, "file_bytes": file_bytes}))


if __name__ == "__main__":
    main()
