"""Random access to the lines of a large text: indexing, opening and reading, with a warm and a cold page cache.

    python benchmarks/data_corpora.py                       # 10 million generated lines, some 1.3 GB
    python benchmarks/data_corpora.py --lines 1000000 --rounds 3 --out data-corpora.md
    python benchmarks/data_corpora.py --data corpus.txt     # any file of lines

Plimsoll is compared with the machine's limits (reading the file, `wc -l`) and with three other methods. These are
Hugging Face `datasets` (`load_dataset` of text, empty cache), a list of strings, and a memory map with all offsets.
Each arm runs in a separate process, in interleaved rounds; figures are medians.

Memory is the peak of private bytes, of all processes of an arm, sampled every 20 ms, above an interpreter with numpy.
Cold means that `posix_fadvise` dropped the file's pages before; if pages cannot be dropped, the remaining share is
shown. The generated text has Zipf-distributed words, lognormal line lengths and 1 % of words that are not ASCII.

The last table uses a sparse file of 100 GB with islands of lines between holes, in a process limited to 256 MiB. Prints
tables, and one JSON object with the figures as the last line. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import mmap
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from _private_memory import private_bytes
from _results import add_out, fenced, file_result, keep_printed, mib, table

SHOWN = Console(width=140)
LINES_PER_WRITE = 100_000
BATCH = 1024
LIMIT_BYTES = 256 << 20
SPARSE_BYTES = 100 << 30
Figures = dict[str, Any]


def generate(path: Path, num_lines: int, seed: int = 0) -> None:
    """Write lines of Zipf-distributed words; one word in a hundred has a letter that is not ASCII."""
    random = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(letters[random.integers(0, 26, length)]) for length in random.integers(2, 11, 50_000)]
    words[50::100] = [f"{word[:2]}\u00e9{word[2:]}" for word in words[50::100]]
    shares = 1 / np.arange(1, len(words) + 1)
    text = np.array(words, object)[random.choice(len(words), 4_000_000, p=shares / shares.sum())].tolist()
    with path.open("w", encoding="utf-8") as file:
        for begin in range(0, num_lines, LINES_PER_WRITE):
            num = min(LINES_PER_WRITE, num_lines - begin)
            lengths = np.clip(random.lognormal(2.75, 0.7, num), 1, 500).astype(int).tolist()
            starts = random.integers(0, len(text) - 500, num).tolist()
            file.writelines(" ".join(text[i : i + n]) + "\n" for i, n in zip(starts, lengths, strict=True))


# -- arms, each in a process of its own --------------------------------------------------------------------------------


@contextmanager
def peak_bytes() -> Iterator[list[int]]:
    """Yield a list whose only item becomes the peak of private bytes above the current value."""
    before = private_bytes()
    peaks, is_over = [before], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            peaks.append(max(peaks.pop(), private_bytes()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peaks
    finally:
        is_over.set()
        watcher.join()
        peaks.append(max(peaks.pop(), private_bytes()) - before)


def timed(work: Callable[[], object], prepare: Callable[[], object]) -> Figures:
    with peak_bytes() as peaks:
        prepare()
        begin = time.perf_counter()
        kept = work()
        seconds = time.perf_counter() - begin
    del kept
    return {"seconds": seconds, "peak_bytes": peaks[-1]}


def read_all(path: Path) -> None:
    buffer = bytearray(256 << 10)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def line_begins(path: Path) -> np.ndarray:
    """Return the offsets of all lines and of the end, in the obvious way: chunks of 256 KiB through numpy."""
    found, offset = [np.zeros(1, np.int64)], 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(256 << 10):
            found.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10) + (offset + 1))
            offset += len(chunk)
    return np.concatenate(found)


def opened(path: Path, cache: Path, **fields: Any) -> Any:
    from plimsoll.data.formats import Reading
    from plimsoll.data.text.index import open_corpus

    return open_corpus((str(path),), Reading("line", **fields), cache)


def hugging_face(path: Path, cache: Path) -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.load_dataset("text", data_files=str(path), cache_dir=str(cache / "hf"), split="train")


def list_of_lines(path: Path) -> list[str]:
    with path.open(encoding="utf-8", newline="\n") as file:
        return [line.removesuffix("\n") for line in file]


BUILD: dict[str, Callable[[Path, Path], object]] = {
    "reading the file": lambda path, cache: read_all(path),
    "wc -l": lambda path, cache: subprocess.run(["wc", "-l", path], check=True, stdout=subprocess.DEVNULL),
    "numpy, offsets in memory": lambda path, cache: line_begins(path),
    "Plimsoll": opened,
    "Plimsoll, opened again": opened,
    "list of str": lambda path, cache: list_of_lines(path),
    "Hugging Face datasets": hugging_face,
}


def build(way: str, path: Path, cache: Path) -> Figures:
    library = {"P": "plimsoll.data.text.index", "H": "datasets"}.get(
        way[0], "numpy"
    )  # imports take memory here, not time
    return timed(lambda: BUILD[way](path, cache), lambda: importlib.import_module(library))


class Mapped:
    """A memory map, with the offsets of all lines in memory."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.raw = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self.begins = line_begins(path)

    def texts(self, ids: np.ndarray) -> list[str]:
        raw = self.raw
        spans = zip(self.begins[ids].tolist(), self.begins[ids + 1].tolist(), strict=True)
        return [raw[begin : end - 1].decode() for begin, end in spans]


def readers(way: str, path: Path, cache: Path) -> dict[str, Callable[[np.ndarray | None], object]]:
    """Return functions with which an arm reads a random batch, single lines, and everything in order in two ways."""
    if way == "Plimsoll":
        corpus = opened(path, cache)
        return {
            "batch": corpus.texts,
            "one": lambda ids: [corpus[number] for number in ids.tolist()],
            "rows in order": lambda _: [0 for _ in corpus],
            "batches in order": lambda _: [len(corpus.texts(ids)) for ids in ordered(len(corpus))],
        }
    if way == "Hugging Face datasets":
        dataset = hugging_face(path, cache)
        return {
            "batch": lambda ids: dataset[ids]["text"][:],
            "one": lambda ids: [dataset[number]["text"] for number in ids.tolist()],
            "rows in order": lambda _: [0 for row in dataset.select(range(min(200_000, len(dataset)))) if row["text"]],
            "batches in order": lambda _: [len(rows["text"]) for rows in dataset.iter(BATCH)],
        }
    if way == "memory map":
        mapped = Mapped(path)
        return {
            "batch": mapped.texts,
            "one": lambda ids: [mapped.texts(ids[place : place + 1])[0] for place in range(len(ids))],
            "rows in order": lambda _: [0 for ids in ordered(len(mapped.begins) - 1) for _ in mapped.texts(ids)],
            "batches in order": lambda _: [len(mapped.texts(ids)) for ids in ordered(len(mapped.begins) - 1)],
        }
    lines = list_of_lines(path)
    return {
        "batch": lambda ids: [lines[number] for number in ids.tolist()],
        "one": lambda ids: [lines[number] for number in ids.tolist()],
        "rows in order": lambda _: [0 for _ in lines],
        "batches in order": lambda _: [len(lines[ids[0] : ids[-1] + 1]) for ids in ordered(len(lines))],
    }


def ordered(num_lines: int) -> Iterator[np.ndarray]:
    return (np.arange(begin, min(begin + BATCH, num_lines)) for begin in range(0, num_lines, BATCH))


def read(way: str, path: Path, cache: Path, num_lines: int) -> Figures:
    ways, random = readers(way, path, cache), np.random.default_rng(0)
    gc.collect()
    batches = [random.integers(0, num_lines, BATCH) for _ in range(200)]
    singles = random.integers(0, num_lines, 20_000)
    num_rows = min(200_000, num_lines) if way == "Hugging Face datasets" else num_lines
    ways["batch"](batches[0])
    return {
        "batch": len(batches) * BATCH / seconds_of(lambda: [ways["batch"](ids) and None for ids in batches]),
        "one": len(singles) / seconds_of(lambda: ways["one"](singles)),
        "rows in order": num_rows / seconds_of(lambda: ways["rows in order"](None)),
        "batches in order": num_lines / seconds_of(lambda: ways["batches in order"](None)),
        "private_bytes": private_bytes(),
    }


def seconds_of(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def drop_pages(path: Path) -> float:
    """Drop the pages of a file, and return the share of pages that stayed."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as mapped:
            states = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
            address = np.frombuffer(mapped, np.uint8).ctypes.data
            size, vector = ctypes.c_size_t(len(mapped)), states.ctypes.data_as(ctypes.c_void_p)
            ctypes.CDLL(None).mincore(ctypes.c_void_p(address), size, vector)
            gc.collect()
            return float((states & 1).mean())


def cold(way: str, path: Path, cache: Path, num_lines: int) -> Figures:
    """Measure lines per second after dropping the pages: at random through a map, or shuffled in pools of blocks."""
    random = np.random.default_rng(0)
    if way == "memory map, at random":
        mapped = Mapped(path)
        stayed, ids = drop_pages(path), random.integers(0, num_lines, 4000)
        return {"lines_per_second": len(ids) / seconds_of(lambda: mapped.texts(ids)), "stayed": stayed}
    from plimsoll.data.batches.order import BlockShuffle, drawn

    corpus = opened(path, cache).with_blocks()
    before = private_bytes()
    shuffle = BlockShuffle(corpus.texts_per_block)
    order = drawn(num_lines, 0, shuffle)
    num_drawn = min(num_lines, 4 * shuffle.pool_blocks * shuffle.block_samples)  # some 64 MiB of text
    batches = [order.ids(0, start, min(start + BATCH, num_drawn)) for start in range(0, num_drawn, BATCH)]
    stayed = drop_pages(path)
    seconds = seconds_of(lambda: [corpus.texts(ids) and None for ids in batches])
    return {
        "lines_per_second": num_drawn / seconds,
        "stayed": stayed,
        "private_bytes": private_bytes() - before,
    }


def sparse(way: str, path: Path, cache: Path) -> Figures:
    """Index a file of holes and islands under a memory limit."""
    island = b"\n" + b"".join(b"line %d\n" % number for number in range(2000))
    with path.open("wb") as file:
        for place in (0, 3 << 20, SPARSE_BYTES // 2 + 12_345, SPARSE_BYTES - len(island)):
            file.seek(place)
            file.write(island)
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    begin = time.perf_counter()
    corpus = opened(path, cache, on_error="skip")
    seconds = time.perf_counter() - begin
    assert (len(corpus), corpus[-1], corpus.num_skipped) == (8000, "line 1999", 3)
    return {"seconds": seconds, "disk_bytes": path.stat().st_blocks * 512}


ARMS: dict[str, Callable[..., Figures]] = {"build": build, "read": read, "cold": cold, "sparse": sparse}


# -- rounds ------------------------------------------------------------------------------------------------------------


def in_new_process(arm: str, *arguments: str | Path | int) -> Figures:
    one = json.dumps([arm, *map(str, arguments)])
    command = [sys.executable, __file__, "--one", one]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    print(f"{arm}, {arguments[0]}: {done.stdout.strip()}", file=sys.stderr, flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def medians(rounds: list[Figures]) -> Figures:
    return {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}


def measured(path: Path, folder: Path, num_lines: int, num_rounds: int, with_hf: bool) -> dict[str, dict[str, Figures]]:
    """Run all arms, round by round; at the first read of every round, the file is in the page cache."""
    others = ["Hugging Face datasets"] if with_hf else []
    rounds: dict[str, dict[str, list[Figures]]] = {"build": {}, "read": {}, "cold": {}}
    for number in range(num_rounds):
        read_all(path)
        cache = folder / f"round-{number}"
        for way in BUILD:
            if way in others or "Hugging" not in way:
                rounds["build"].setdefault(way, []).append(in_new_process("build", way, path, cache))
        for way in ("list of str", "memory map", "Plimsoll", *others):
            rounds["read"].setdefault(way, []).append(in_new_process("read", way, path, cache, num_lines))
        for way in ("memory map, at random", "Plimsoll, shuffled in blocks"):
            rounds["cold"].setdefault(way, []).append(in_new_process("cold", way, path, cache, num_lines))
        subprocess.run(["rm", "-rf", cache], check=True)
    return {arm: {way: medians(found) for way, found in ways.items()} for arm, ways in rounds.items()}


def tables(figures: dict[str, dict[str, Figures]], num_bytes: int, num_lines: int) -> list[Table]:
    first = Table(title=f"{num_bytes / 1e9:.2f} GB, {num_lines:,} lines: from the file to random access")
    for name in ("way", "seconds", "GB/s", "memory over numpy's"):
        first.add_column(name, justify="left" if name == "way" else "right")
    for way, found in figures["build"].items():
        speed = f"{num_bytes / found['seconds'] / 1e9:.2f}"
        first.add_row(way, f"{found['seconds']:.3f}", speed, f"{found['peak_bytes'] / 2**20:,.0f} MiB")
    second = Table(title="lines a second, warm")
    names = ("batch", "one", "rows in order", "batches in order")
    for name in ("way", f"{BATCH} at random", "one by one", *names[2:], "private memory"):
        second.add_column(name, justify="left" if name == "way" else "right")
    for way, found in figures["read"].items():
        memory = f"{found['private_bytes'] / 2**20:,.0f} MiB"
        second.add_row(way, *(f"{found[name] / 1e3:,.0f} k" for name in names), memory)
    third = Table(title="lines a second, cold")
    for name in ("way", "lines/s", "pages that had stayed"):
        third.add_column(name, justify="left" if name == "way" else "right")
    for way, found in figures["cold"].items():
        third.add_row(way, f"{found['lines_per_second'] / 1e3:,.1f} k", f"{found['stayed']:.1%}")
    return [first, second, third]


def part_of(figures: dict[str, dict[str, Figures]], num_bytes: int, num_lines: int) -> str:
    """Return the part that pages show."""
    build, read, cold = figures["build"], figures["read"], figures["cold"]
    ways = [way for way in ("Plimsoll", "Hugging Face datasets", "list of str") if way in read]
    again = [f"{build['Plimsoll, opened again']['seconds'] * 1e3:.0f} ms"]
    rows: list[list[str]] = [
        ["from the file to random access", *(f"{build[way]['seconds']:.1f} s" for way in ways)],
        ["private memory of that, over numpy's", *(mib(build[way]["peak_bytes"]) for way in ways)],
        ["opened again", *again, *[""] * (len(ways) - 1)],
    ]
    for title, name in (
        (f"lines a second, {BATCH:,} at random", "batch"),
        ("lines a second, one by one at random", "one"),
        ("lines a second, one by one in order", "rows in order"),
        ("lines a second in batches, in order", "batches in order"),
    ):
        rows.append([title, *(f"{read[way][name] / 1e3:,.0f} k" for way in ways)])
    times = cold["Plimsoll, shuffled in blocks"]["lines_per_second"] / cold["memory map, at random"]["lines_per_second"]
    header = [f"{num_lines:,} lines, {num_bytes / 1e9:.1f} GB", *ways]
    return (
        f"{table(header, rows)}\n\nShuffled in blocks from a cold page cache: {times:,.0f} times the lines a second of "
        "random reads through a memory map."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a file of lines instead of generated text")
    parser.add_argument(
        "--lines", type=int, default=10_000_000, help="number of lines to generate (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--without-datasets", action="store_true", help="leave Hugging Face datasets out")
    parser.add_argument("--folder", help="folder for files and caches (default: a temporary one)")
    add_out(parser)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        arm, way, path, cache, *rest = json.loads(options.one)
        print(json.dumps(ARMS[arm](way, Path(path), Path(cache), *map(int, rest))))
        return
    with tempfile.TemporaryDirectory(prefix="plimsoll-bench-", dir=options.folder) as name:
        folder = Path(name)
        path = options.data or folder / "lines.txt"
        if options.data is None:
            generate(path, options.lines)
        num_lines = int(subprocess.check_output(["wc", "-l", path]).split()[0])
        figures = measured(path, folder, num_lines, options.rounds, not options.without_datasets)
        holes = in_new_process("sparse", "Plimsoll", folder / "sparse.txt", folder / "cache")
        num_bytes = path.stat().st_size
    printed = keep_printed()
    for shown in tables(figures, num_bytes, num_lines):
        SHOWN.print(shown)
    title = f"{SPARSE_BYTES >> 30} GiB of holes on {holes['disk_bytes'] >> 10} KiB of disk, within 256 MiB"
    SHOWN.print(f"{title}: indexed, opened and its last line read in {holes['seconds']:.1f} s")
    part, packages = part_of(figures, num_bytes, num_lines), ("numpy", "pyarrow", "datasets")
    title = "Random access to the lines of a large text"
    file_result(options.out, "data-corpora", title, fenced(printed.text), part, threads=1, packages=packages)
    print(json.dumps({"num_bytes": num_bytes, "num_lines": num_lines, **figures, "sparse": holes}))


if __name__ == "__main__":
    main()
