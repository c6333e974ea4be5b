"""Loading 20,000 of 400,000 word vectors: time and memory, compared with all common methods.

    python benchmarks/embeddings_subset.py                               # generates 1.0 GB; 5 rounds
    python benchmarks/embeddings_subset.py --rivals .rivals/bin/python   # with gensim and pytorch-nlp
    python benchmarks/embeddings_subset.py --words 2196017 --rounds 3    # the size of glove.840B.300d.txt, 5.6 GB
    python benchmarks/embeddings_subset.py --vectors glove.6B.300d.txt   # any file in GloVe's text format

Each arm runs in a new interpreter, in interleaved rounds; its libraries are imported before the clock starts. Figures
are medians. All arms must return the same rows:

- reading the file without parsing;
- scanning lines as bytes and parsing only wanted ones, with two parsers (the best short Python code);
- the usual tutorial loop;
- Plimsoll with an empty cache, synced to the disk;
- PyTorch-NLP with ``is_include``;
- gensim, which loads everything (one round).

Memory is the peak of private memory of all processes above the interpreter with its imports; in brackets, above a bare
interpreter. Plimsoll's rows are in a memory-mapped file and count separately. Further parts measure opening from the
cache, four processes with the same rows, and archives compared with bare decompression. Prints tables, and one JSON
object as the last line. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from _private_memory import private_bytes
from _results import add_out, fenced, file_result, keep_printed, mib, table, versions_in
from _rivals import python_of

NUM_WANTED, NUM_ABSENT = 20_000, 100
CHUNK_BYTES = 1 << 20
Figures = dict[str, Any]


def generate(path: Path, num_words: int, dimension: int) -> None:
    """Write words of one to thirteen letters and vectors of five decimals in GloVe's text format."""
    import numpy as np

    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwygpbvkxqjz"))
    words: dict[str, None] = {}
    while len(words) < num_words:
        lengths = random.integers(1, 14, 100_000).tolist()
        drawn = random.choice(letters, (100_000, 13), p=(1 / np.arange(2, 28)) / (1 / np.arange(2, 28)).sum())
        words |= dict.fromkeys("".join(row[:length]) for row, length in zip(drawn, lengths, strict=True))
    numbers = [f"{value:.5f}" for value in random.standard_normal(1 << 16) * 0.4]
    numbers = [number.rstrip("0") if place % 7 else number for place, number in enumerate(numbers)]
    listed = list(words)[:num_words]
    temporary = path.with_suffix(".part")
    with temporary.open("w") as file:
        for begin in range(0, num_words, 2000):
            places = random.integers(0, len(numbers), (len(listed[begin : begin + 2000]), dimension)).tolist()
            for word, row in zip(listed[begin : begin + 2000], places, strict=True):
                file.write(f"{word} {' '.join([numbers[place] for place in row])}\n")
    temporary.rename(path)


def choose(path: Path, target: Path) -> None:
    """Write the wanted words: a random sample of the file, and some absent words."""
    import random

    with path.open("rb") as file:
        words = [line.split(b" ", 1)[0] for line in file]
    drawn = random.Random(0).sample(words, NUM_WANTED - NUM_ABSENT)
    target.write_bytes(b"\n".join([*drawn, *(b"absent-%d" % number for number in range(NUM_ABSENT))]) + b"\n")


# -- arms, each in a process of its own; what they return is timed -----------------------------------------------------


def read_all(path: Path, wanted: list[str], cache: Path) -> Callable[[], Any]:
    def work() -> None:
        buffer = bytearray(CHUNK_BYTES)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    return work


def bytes_scan(parse: Callable[[bytes], Any]) -> Callable[[Path, list[str], Path], Callable[[], Any]]:
    def prepare(path: Path, wanted: list[str], cache: Path) -> Callable[[], Any]:
        import numpy as np

        def work() -> Any:
            row_of = {word.encode(): row for row, word in enumerate(wanted)}
            rows = None
            with path.open("rb") as file:
                for line in file:
                    end = line.find(b" ")
                    row = row_of.get(line[:end])
                    if row is not None:
                        vector = parse(line[end + 1 :])
                        rows = np.zeros((len(wanted), len(vector)), np.float32) if rows is None else rows
                        rows[row] = vector
            return rows

        return work

    return prepare


def _from_text(text: bytes) -> Any:
    import numpy as np

    return np.fromstring(text, np.float32, sep=" ")


def _from_fields(text: bytes) -> Any:
    import numpy as np

    return np.array(text.split(), np.float32)


def tutorial_loop(path: Path, wanted: list[str], cache: Path) -> Callable[[], Any]:
    import numpy as np

    def work() -> Any:
        vocabulary = {word: row for row, word in enumerate(wanted)}
        rows: Any = None
        with path.open(encoding="utf-8") as file:
            for line in file:
                values = line.split(" ")
                if values[0] in vocabulary:
                    vector = np.asarray(values[1:], dtype="float32")
                    rows = np.zeros((len(wanted), len(vector)), np.float32) if rows is None else rows
                    rows[vocabulary[values[0]]] = vector
        return rows

    return work


def plimsoll(path: Path, wanted: list[str], cache: Path) -> Callable[[], Any]:
    import pyarrow.compute  # noqa: F401  -- before the clock, as all libraries

    from plimsoll.embeddings.subsets import take_subset

    return lambda: take_subset(path, wanted, missing="zeros", cache=cache).rows


def pytorch_nlp(path: Path, wanted: list[str], cache: Path) -> Callable[[], Any]:
    from torchnlp.word_to_vector.pretrained_word_vectors import _PretrainedWordVectors

    def work() -> Any:
        words = set(wanted)
        vectors = _PretrainedWordVectors(path.name, cache=str(cache), is_include=lambda word: word in words)
        return vectors[wanted].numpy()

    cache.mkdir(parents=True)
    (cache / path.name).symlink_to(path)
    return work


def with_gensim(path: Path, wanted: list[str], cache: Path) -> Callable[[], Any]:
    import numpy as np
    from gensim.models import KeyedVectors

    def work() -> Any:
        vectors = KeyedVectors.load_word2vec_format(str(path), binary=False, no_header=True)
        rows = np.zeros((len(wanted), vectors.vector_size), np.float32)
        for row, word in enumerate(wanted):
            if word in vectors:
                rows[row] = vectors[word]
        return rows

    return work


def decompress(path: Path, wanted: list[str], cache: Path) -> Callable[[], Any]:
    """Return the fastest decompression in Python: zlib by hand takes a third less time than `gzip.open`."""

    def work() -> None:
        with path.open("rb", buffering=0) as raw, contextlib.ExitStack() as stack:
            if path.suffix == ".zip":
                archive = stack.enter_context(zipfile.ZipFile(raw))
                file = stack.enter_context(archive.open(archive.namelist()[0]))
                while file.read(CHUNK_BYTES):
                    pass
                return
            engine = zlib.decompressobj(31)
            while packed := raw.read(256 << 10):
                while packed:
                    engine.decompress(packed, CHUNK_BYTES)
                    packed = engine.unconsumed_tail

    return work


ARMS: dict[str, Callable[[Path, list[str], Path], Callable[[], Any]]] = {
    "reading the file": read_all,
    "bytes scan, np.fromstring": bytes_scan(_from_text),
    "bytes scan, np.array(split)": bytes_scan(_from_fields),
    "tutorial loop": tutorial_loop,
    "Plimsoll": plimsoll,
    "PyTorch-NLP": pytorch_nlp,
    "gensim": with_gensim,
    "decompression": decompress,
}
RIVALS = ("PyTorch-NLP", "gensim")
ONCE = ("gensim",)


def arm_process(name: str, path: Path, wanted_file: Path, cache: Path) -> None:
    """Do the work of an arm once, and print its figures."""
    bare_bytes = private_bytes()
    work = ARMS[name](path, wanted_file.read_text().split(), cache)
    before_bytes = private_bytes()
    peaks, is_over = [before_bytes], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.01):
            peaks.append(max(peaks.pop(), private_bytes()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    rows = work()
    seconds = time.perf_counter() - begin
    is_over.set()
    watcher.join()
    figures: Figures = {"seconds": seconds, "peak_bytes": peaks[-1] - before_bytes, "over_bare": peaks[-1] - bare_bytes}
    if rows is not None:
        import hashlib

        found = rows[rows.any(axis=1)]
        figures["rows"] = [len(found), hashlib.sha256(found.tobytes()).hexdigest()[:12]]
    print(json.dumps(figures))


def run_arm(name: str, path: Path, wanted: Path, folder: Path, rivals: Path | None) -> Figures:
    python = str(rivals) if name in RIVALS else sys.executable
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    done = subprocess.run(
        [python, __file__, "--arm", name, "--vectors", str(path), "--wanted", str(wanted), "--folder", str(cache)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def rounds(names: list[str], num_rounds: int, run: Callable[[str], Figures]) -> dict[str, list[Figures]]:
    found: dict[str, list[Figures]] = {name: [] for name in names}
    for number in range(num_rounds):
        for name in names:
            if name not in ONCE or not number:
                found[name].append(run(name))
                print(f"round {number + 1}: {name}: {found[name][-1]['seconds']:.3f} s", file=sys.stderr)
    return found


def median(figures: list[Figures], key: str) -> float:
    return statistics.median(figure[key] for figure in figures)


def compare(path: Path, wanted: Path, folder: Path, args: argparse.Namespace) -> Figures:
    """Time all arms on the uncompressed file."""
    from rich.console import Console
    from rich.table import Table

    names = [name for name in ARMS if name != "decompression" and (args.rivals or name not in RIVALS)]
    found = rounds(names, args.rounds, lambda name: run_arm(name, path, wanted, folder, args.rivals))
    digests = {tuple(figure["rows"]) for figures in found.values() for figure in figures if "rows" in figure}
    if len(digests) != 1:
        raise SystemExit(f"the arms do not agree: {digests}")
    scan = min(median(found[name], "seconds") for name in names if name.startswith("bytes scan"))
    title = f"{path.stat().st_size / 1e9:.2f} GB, {NUM_WANTED:,} words wanted, {next(iter(digests))[0]:,} found"
    table = Table("way", "seconds", "range", "x reading", "x bytes scan", "memory MiB (over bare)", title=title)
    for name, figures in found.items():
        seconds = median(figures, "seconds")
        all_seconds = [figure["seconds"] for figure in figures]
        memory = f"{median(figures, 'peak_bytes') / 2**20:,.0f} ({median(figures, 'over_bare') / 2**20:,.0f})"
        table.add_row(
            name, f"{seconds:.3f}", f"{min(all_seconds):.2f} to {max(all_seconds):.2f}",
            f"{seconds / median(found['reading the file'], 'seconds'):.1f}", f"{seconds / scan:.2f}", memory,
        )  # fmt: skip
    Console(width=120).print(table)
    return {
        name: {key: median(figures, key) for key in ("seconds", "peak_bytes", "over_bare")}
        for name, figures in found.items()
    }


def compare_archives(path: Path, wanted: Path, folder: Path, args: argparse.Namespace) -> Figures:
    """Time archives of the file, and their bare decompression."""
    from rich.console import Console
    from rich.table import Table

    table = Table("archive", "decompression", "Plimsoll", "ratio", "ratios of pairs")
    ratios: Figures = {}
    for archive in archives_of(path):
        run = partial(run_arm, path=archive, wanted=wanted, folder=folder, rivals=None)
        found = rounds(["decompression", "Plimsoll"], args.rounds, run)
        pairs = [
            ours["seconds"] / bare["seconds"]
            for ours, bare in zip(found["Plimsoll"], found["decompression"], strict=True)
        ]
        bare, ours = median(found["decompression"], "seconds"), median(found["Plimsoll"], "seconds")
        ratios[archive.suffix] = ours / bare
        table.add_row(
            archive.suffix, f"{bare:.2f} s", f"{ours:.2f} s", f"{ours / bare:.2f}", " ".join(f"{x:.2f}" for x in pairs)
        )
    Console(width=120).print(table)
    return ratios


def archives_of(path: Path) -> Iterator[Path]:
    """Yield the file as gzip and as zip; archives are written if they do not exist."""
    packed = path.with_name(path.name + ".gz")
    if not packed.exists():
        temporary = packed.with_suffix(".part")
        with path.open("rb") as file, gzip.open(temporary, "wb", compresslevel=6) as target:
            shutil.copyfileobj(file, target, CHUNK_BYTES)
        temporary.rename(packed)
    yield packed
    packed = path.with_name(path.name + ".zip")
    if not packed.exists():
        temporary = packed.with_suffix(".part")
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
            archive.write(path, path.name)
        temporary.rename(packed)
    yield packed


LOADING = """
import json, sys, time
from pathlib import Path
from plimsoll.embeddings.subsets import take_subset
from plimsoll.embeddings.vocabulary import vocabulary_of

vocabulary = vocabulary_of(sys.argv[2])
vocabulary.key
take = lambda: take_subset(sys.argv[1], vocabulary, missing="zeros", cache=Path(sys.argv[3]))
take()
times = []
for _ in range(20):
    begin = time.perf_counter()
    subset = take()
    times.append(time.perf_counter() - begin)
subset.rows.sum()  # every page is looked at
print(json.dumps(sorted(times)[len(times) // 2]), flush=True)
sys.stdin.readline()
lines = open("/proc/self/smaps").read().split("\\n")
at = [i for i, line in enumerate(lines) if "table.safetensors" in line]
print(sum(int(line.split()[1]) for i in at for line in lines[i : i + 20] if line.startswith("Pss:")), flush=True)
sys.stdin.readline()
"""


def compare_loading(path: Path, wanted: Path, folder: Path) -> Figures:
    """Open the rows from the cache, in four processes at the same time."""
    cache = folder / "kept"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LOADING, str(path), str(wanted), str(cache)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(4)
    ]  # fmt: skip
    said = [[float(read_line(process)) for process in processes]]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    said.append([float(read_line(process)) for process in processes])
    for process in processes:
        process.communicate("\n")
    num_bytes = next(cache.glob("subset-*/table.safetensors")).stat().st_size
    alone = subprocess.run(
        [sys.executable, "-c", LOADING, str(path), str(wanted), str(cache)],
        input="\n\n", check=True, capture_output=True, text=True,
    )  # fmt: skip
    figures = {
        "open_seconds": float(alone.stdout.splitlines()[0]),
        "pss_of_four_bytes": sum(said[1]) * 1024,
        "table_bytes": num_bytes,
    }
    print(
        f"opened from the cache, words and bits checked: {figures['open_seconds'] * 1e3:.1f} ms; four processes that "
        f"look at all rows: {figures['pss_of_four_bytes'] / 2**20:.1f} MiB together, the file has "
        f"{num_bytes / 2**20:.1f} MiB"
    )
    return figures


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def part_of(figures: Figures, args: argparse.Namespace) -> str:
    """Return the part that pages show."""
    arms, of_rows = figures["arms"], mib(figures["table_bytes"])
    names = {
        "Plimsoll": f"Plimsoll, the first time (and {of_rows} of a mapped file)",
        "bytes scan, np.fromstring": "lines scanned as bytes, only wanted ones parsed, in Python",
        "tutorial loop": "the loop of the tutorials",
        "PyTorch-NLP": "PyTorch-NLP",
        "gensim": "gensim",
    }
    rows = [
        [said, f"{arms[name]['seconds']:.1f}", mib(arms[name]["peak_bytes"])]
        for name, said in names.items()
        if name in arms
    ]
    rows.insert(1, ["Plimsoll, from the cache", f"{figures['open_seconds']:.3f}", ""])
    size = f"{figures['file_bytes'] / 1e9:.1f} GB"
    header = f"{NUM_WANTED:,} of {args.words:,} vectors of {args.dimension} numbers, a file of {size}"
    more = f"Four processes with the same rows hold {mib(figures['pss_of_four_bytes'])} of them together."
    for suffix, ratio in figures.get("archives", {}).items():
        more += f" From `{suffix}` it takes {ratio:.2f} times as long as unpacking alone."
    return f"{table([header, 'seconds', 'private memory'], rows)}\n\n{more}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=400_000)
    parser.add_argument("--dimension", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rivals", type=Path, default=python_of("vectors"), help="a Python with gensim, pytorch-nlp")
    parser.add_argument("--vectors", type=Path, help="file in GloVe's text format (default: a generated one)")
    parser.add_argument("--data", help="ignored")
    parser.add_argument(
        "--folder", type=Path, help="folder in which generated files are kept (default: a temporary one)"
    )
    add_out(parser)
    parser.add_argument("--without-archives", action="store_true")
    parser.add_argument("--arm", choices=[*ARMS], help=argparse.SUPPRESS)
    parser.add_argument("--wanted", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        arm_process(args.arm, args.vectors, args.wanted, args.folder)
        return
    printed = keep_printed()
    with tempfile.TemporaryDirectory(prefix="plimsoll-") as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        path = args.vectors or folder / f"glove-{args.words}-{args.dimension}.txt"
        if not path.exists():
            print(f"writing {path.name}", file=sys.stderr)
            generate(path, args.words, args.dimension)
        wanted = Path(temporary) / "wanted.txt"
        choose(path, wanted)
        figures: Figures = {"file_bytes": path.stat().st_size, "arms": compare(path, wanted, Path(temporary), args)}
        figures |= compare_loading(path, wanted, Path(temporary))
        if not args.without_archives:
            figures["archives"] = compare_archives(path, wanted, Path(temporary), args)
        title = f"{NUM_WANTED:,} of {args.words:,} word vectors"
        part, packages = part_of(figures, args), ("torch", "numpy", "pyarrow")
        others = (
            versions_in(args.rivals, ("gensim", "pytorch-nlp")) if args.rivals else ["gensim and PyTorch-NLP left out"]
        )
        text = fenced(printed.text)
        file_result(args.out, "embeddings-subset", title, text, part, threads=1, packages=packages, others=others)
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
