"""Padding and useful tokens: rows padded to a fixed length, to the longest of a shuffled batch, and packed.

    python benchmarks/data_padding.py
    python benchmarks/data_padding.py --data corpus.txt   # any text, one text per line

Lengths are lognormal (mean 28, 99th percentile 118, at most 512, as in lines of English text). With --data, they are
the lengths of a text, tokenized by byte-level BPE trained on it.

The first table counts cells over one shuffled epoch; packed batches have as many cells as those padded to their
longest. The second trains a small GPT on the CPU with steps of about the same number of cells; all methods run in each
round. Tokens/s are predicted tokens, from the batch to the end of the optimizer step, as the median of the rounds.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel

from _results import add_out, fenced, file_result, keep_printed
from plimsoll.data.batches.order import Order
from plimsoll.data.formats import Reading
from plimsoll.data.samples.packing import PackedDataset, pack
from plimsoll.data.samples.text_windows import cut_texts
from plimsoll.data.samples.texts import DocumentDataset
from plimsoll.data.samples.windows import IGNORED_LABEL, Samples
from plimsoll.data.text.index import open_corpus
from plimsoll.data.tokens.store import TokenStore, open_tokens, tokenize
from plimsoll.data.tokens.tokenizer import prepare_tokenizer
from plimsoll.files.store import stored
from plimsoll.records.job import TokenizerSource

SHOWN = Console(stderr=False, width=120)
LOG_MEAN, LOG_DEVIATION = 3.05, 0.735
VOCAB_SIZE, PAD_ID = 2000, 0


@dataclass(frozen=True)
class Counted:
    """One method over one epoch: the cells of all batches and their contents."""

    way: str
    batches: int
    cells: int
    tokens: int

    @property
    def padding_share(self) -> float:
        return 1 - self.tokens / self.cells


@dataclass(frozen=True)
class Trained:
    """One method of training; numbers per step are medians over the rounds."""

    way: str
    cells_per_step: float
    tokens_per_step: float
    seconds_per_step: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds_per_step


def drawn_store(folder: Path, num_texts: int, most: int) -> TokenStore:
    """Write a store of random texts with lognormal lengths; 0 is the end token."""
    generator = np.random.default_rng(0)
    lengths = generator.lognormal(LOG_MEAN, LOG_DEVIATION, num_texts).astype(np.int64).clip(1, most - 1)
    tokens = generator.integers(1, VOCAB_SIZE, lengths.sum() + num_texts).astype(np.uint16)
    ends = np.cumsum(lengths + 1) - 1
    tokens[ends] = PAD_ID

    def write(place: Path) -> dict[str, str]:
        tokens.tofile(place / "tokens.bin")
        ends.tofile(place / "ends.bin")
        return {"dtype": "uint16"}

    stored(folder / "tokens", write)
    return open_tokens(folder / "tokens")


def real_store(folder: Path, data: str) -> TokenStore:
    corpus = open_corpus((data,), Reading(unit="line"), folder)
    tokenizer = prepare_tokenizer(TokenizerSource(vocab_size=VOCAB_SIZE), corpus, folder)
    return tokenize(corpus, tokenizer, folder)


def batches_of(dataset: Samples, batch_size: int) -> list[NDArray[np.int64]]:
    """Return the sample ids of each batch of one shuffled epoch."""
    order = Order(len(dataset), seed=0)
    stops = [*range(batch_size, len(dataset), batch_size), len(dataset)]
    return [order.ids(0, begin, stop) for begin, stop in zip([0, *stops], stops, strict=False)]


def counted(documents: DocumentDataset, packed: PackedDataset, batch_size: int) -> list[Counted]:
    batches = batches_of(documents, batch_size)
    lengths = [documents.lengths(ids) for ids in batches]
    widths = [documents.padded_length(int(rows.max())) for rows in lengths]
    num_tokens, most = int(sum(rows.sum() for rows in lengths)), documents.sequence_length
    dynamic_cells = sum(width * len(ids) for width, ids in zip(widths, batches, strict=True))
    packed_batches = batches_of(packed, max(round(dynamic_cells / len(batches) / most), 1))
    return [
        Counted(f"padded to {most}", len(batches), len(documents) * most, num_tokens),
        Counted("padded to the longest of the batch", len(batches), dynamic_cells, num_tokens),
        Counted("packed", len(packed_batches), len(packed) * most, num_tokens),
    ]


def small_gpt(most: int, vocab_size: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 128, "n_positions": most, "vocab_size": vocab_size}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))


class Training:
    """The steps of one method; every epoch has the same batches."""

    def __init__(self, way: str, dataset: Samples, batch_size: int, most: int) -> None:
        self.way, self.dataset = way, dataset
        self.batches = batches_of(dataset, batch_size)
        self.model = small_gpt(most, VOCAB_SIZE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.done: list[tuple[int, int, float]] = []

    def step(self) -> None:
        begin = time.perf_counter()
        batch = self.dataset.batch(self.batches[len(self.done) % len(self.batches)])
        self.model(**batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - begin
        num_tokens = int((batch["labels"] != IGNORED_LABEL).sum())
        self.done.append((batch["input_ids"].numel(), num_tokens, seconds))

    def result(self) -> Trained:
        cells, tokens, seconds = zip(*self.done[1:], strict=True)  # the first step creates states and threads
        per_token = statistics.median(second / token for second, token in zip(seconds, tokens, strict=True))
        mean_tokens = statistics.mean(tokens)
        return Trained(self.way, statistics.mean(cells), mean_tokens, per_token * mean_tokens)


def trained(documents: DocumentDataset, packed: PackedDataset, batch_size: int, num_rounds: int) -> list[Trained]:
    most = documents.sequence_length
    widths = [documents.padded_length(int(documents.lengths(ids).max())) for ids in batches_of(documents, batch_size)]
    num_cells = statistics.mean(widths) * batch_size
    ways = (
        Training(f"padded to {most}", to_most(documents), max(round(num_cells / most), 1), most),
        Training("padded to the longest of the batch", documents, batch_size, most),
        Training("packed", packed, max(round(num_cells / most), 1), most),
    )
    for _ in range(num_rounds + 1):
        for way in ways:
            way.step()
    return [way.result() for way in ways]


def to_most(documents: DocumentDataset) -> DocumentDataset:
    return DocumentDataset(documents.spans, None, PAD_ID, pad_multiple=documents.sequence_length)


def tables(counts: list[Counted], trainings: list[Trained], title: str) -> list[Table]:
    first = Table(title=title)
    for name in ("rows", "batches", "tokens per step", "padding"):
        first.add_column(name, justify="left" if name == "rows" else "right")
    for one in counts:
        first.add_row(one.way, str(one.batches), f"{one.tokens / one.batches:,.0f}", f"{one.padding_share:.2%}")
    second = Table(title="training a small GPT, fp32, on the processor")
    for name in ("rows", "cells per step", "tokens per step", "s per step", "tokens/s"):
        second.add_column(name, justify="left" if name == "rows" else "right")
    for run in trainings:
        numbers = f"{run.cells_per_step:,.0f}", f"{run.tokens_per_step:,.0f}", f"{run.seconds_per_step:.3f}"
        second.add_row(run.way, *numbers, f"{run.tokens_per_second:,.0f}")
    return [first, second] if trainings else [first]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="text file, folder or glob, one text per line, instead of random lengths")
    parser.add_argument("--texts", type=int, default=200_000, help="number of random lengths (default: %(default)s)")
    parser.add_argument("--sequence-length", type=int, default=512, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="texts of a padded batch (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=10, help="steps of each method; 0: no training (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    add_out(parser)
    arguments = parser.parse_args()
    printed = keep_printed()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as name:
        folder, most = Path(name), arguments.sequence_length
        store = real_store(folder, arguments.data) if arguments.data else drawn_store(folder, arguments.texts, most)
        spans = cut_texts(store, most, with_end=True)
        documents = DocumentDataset(spans, None, PAD_ID)
        begin = time.perf_counter()
        packs = pack(spans)
        pack_seconds = time.perf_counter() - begin
        packed = PackedDataset(packs, PAD_ID)
        counts = counted(documents, packed, arguments.batch_size)
        trainings = trained(documents, packed, arguments.batch_size, arguments.rounds) if arguments.rounds else []
        lengths = spans.lengths(np.arange(len(spans)))
    title = f"{len(spans):,} texts: mean {lengths.mean():.1f} tokens, 99th percentile {np.percentile(lengths, 99):.0f}"
    for table in tables(counts, trainings, title):
        SHOWN.print(table)
    figures = {
        "data": arguments.data and Path(arguments.data).name,
        "texts": len(spans),
        "mean_tokens": float(lengths.mean()),
        "packed_texts_per_second": len(spans) / pack_seconds,
        "counted": [asdict(one) | {"padding_share": one.padding_share} for one in counts],
        "trained": [asdict(one) | {"tokens_per_second": one.tokens_per_second} for one in trainings],
    }
    shares = {one.way: one.padding_share for one in counts}
    part = (
        f"{title}: {shares['padded to the longest of the batch']:.0%} is padding in batches of {arguments.batch_size}"
    )
    part += f", packed {shares['packed']:.2%}"
    speeds = {run.way: run.tokens_per_second for run in trainings}
    if speeds:
        times = speeds["packed"] / speeds["padded to the longest of the batch"]
        part += f"; a small GPT trains {times:.1f} times as fast packed"
    file_result(arguments.out, "data-padding", "Padding and useful tokens", fenced(printed.text), f"{part}.")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
