"""Tokenizing a file once, compared with a bare loop of the tokenizers library, and feeding from the tokens.

    python benchmarks/data_tokenize.py --mebibytes 32 --rounds 3

The bare loops hold all lines in memory and discard their results. Plimsoll reads the file, encodes, converts, and
writes and syncs the tokens. All arms use all cores, one after the other, in interleaved rounds. Feeding is timed in one
thread: shuffled windows of 1024 tokens as int64 tensors, through the training's loader. Prints tables, and one JSON
object with the figures as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from plimsoll.data.formats import Reading
from plimsoll.data.text.corpus import Corpus
from plimsoll.data.text.index import open_corpus
from plimsoll.data.tokens.store import open_tokens, tokenize
from plimsoll.data.tokens.tokenizer import Tokenizer, prepare_tokenizer, tokenizer_threads
from plimsoll.files.store import stored
from plimsoll.records.job import TokenizerSource

BATCH_BYTES = 1 << 20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="text file (default: the standard library's sources, repeated)")
    parser.add_argument("--mebibytes", type=int, default=32, help="size of the text")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--feed-tokens", type=int, default=200_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plimsoll-bench-") as name:
        folder = Path(name)
        text = text_of(options.data, options.mebibytes << 20, folder / "text.txt")
        corpus = open_corpus((str(text),), Reading(unit="line"), folder / "cache")
        tokenizer = prepare_tokenizer(TokenizerSource(vocab_size=options.vocabulary), corpus, folder / "cache")
        encoding = compared(corpus, tokenizer, folder / "tokens", options.rounds)
        feeding = fed(folder / "feed", options.feed_tokens, options.rounds)
    print(json.dumps({"cores": os.cpu_count(), "encoding": encoding, "feeding": feeding}))


def text_of(path: str | None, num_bytes: int, target: Path) -> Path:
    """Write ``num_bytes`` of text from the file, or from the standard library's sources."""
    sources = [Path(path)] if path else sorted(Path(os.__file__).parent.glob("**/*.py"))
    content = bytearray()
    for source in sources:
        raw = source.read_bytes()
        content += raw if raw.isascii() else b""
        if len(content) >= num_bytes:
            break
    while len(content) < num_bytes:
        content += content[: num_bytes - len(content)]
    target.write_bytes(content[:num_bytes])
    return target


def compared(corpus: Corpus, tokenizer: Tokenizer, cache: Path, rounds: int) -> dict[str, float]:
    """Return bytes of text per second for each arm, as medians of interleaved rounds."""
    batches = batches_of(corpus)
    arms: dict[str, Callable[[], object]] = {
        "encode_batch, bare": partial(bare, batches, tokenizer.backend.encode_batch),
        "encode_batch_fast, bare": partial(bare, batches, tokenizer.backend.encode_batch_fast),
        "plimsoll, file to file": partial(whole, corpus, tokenizer, cache),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            begun = time.perf_counter()
            arm()
            seconds[name].append(time.perf_counter() - begun)
    rates = {name: corpus.num_bytes / statistics.median(of_arm) for name, of_arm in seconds.items()}
    print(f"{corpus.num_bytes / 2**20:.0f} MiB in {len(corpus):,} lines, {os.cpu_count()} cores, {rounds} rounds")
    for name, rate in rates.items():
        spread = (max(seconds[name]) - min(seconds[name])) / statistics.median(seconds[name])
        share = rate / rates["encode_batch, bare"]
        print(f"{name:26} {rate / 2**20:7.2f} MiB/s   x {share:.2f} of encode_batch   spread {spread:.0%}")
    return rates


def batches_of(corpus: Corpus) -> list[list[str]]:
    """Load all lines into memory, in batches of 1 MiB as Plimsoll makes them."""
    batches: list[list[str]] = [[]]
    num_bytes = 0
    for piece, _ in corpus.pieces():
        if num_bytes >= BATCH_BYTES:
            batches.append([])
            num_bytes = 0
        batches[-1].append(piece)
        num_bytes += len(piece)
    return batches


def bare(batches: list[list[str]], encode: Callable[..., object]) -> None:
    """Run the reference loop."""
    with tokenizer_threads():
        for batch in batches:
            encode(batch, add_special_tokens=False)


def whole(corpus: Corpus, tokenizer: Tokenizer, cache: Path) -> None:
    """Do the work of `plimsoll data tokenize` with an empty cache."""
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    tokenize(corpus, tokenizer, cache)


def fed(folder: Path, num_tokens: int, rounds: int) -> dict[str, float]:
    """Measure the tokens per second of the loader in one thread."""
    import torch

    from plimsoll.data.batches.loader import Loader
    from plimsoll.data.samples.windows import WindowDataset

    torch.set_num_threads(1)

    def write(place: Path) -> dict[str, str]:
        np.random.default_rng(0).integers(0, 32_000, num_tokens).astype(np.uint16).tofile(place / "tokens.bin")
        np.array([num_tokens - 1]).tofile(place / "ends.bin")
        return {"dtype": "uint16"}

    stored(folder, write)
    windows = WindowDataset(open_tokens(folder), 1024)
    rates = []
    for _ in range(rounds):
        loader = Loader(windows, 32, seed=0)
        begun, num_fed = time.perf_counter(), 0
        while num_fed < num_tokens:
            num_fed += loader.peek().fields["input_ids"].numel()
            loader.advance()
        rates.append(num_fed / (time.perf_counter() - begun))
    print(f"fed from {num_tokens:,} tokens, one thread: {statistics.median(rates) / 1e6:.0f} million tokens/s")
    return {"tokens_per_second": statistics.median(rates)}


if __name__ == "__main__":
    main()
