"""Feeding text that is larger than memory: Plimsoll compared with other libraries.

    make rivals && python benchmarks/rivals_streaming.py [--lines 250000] [--rounds 3] [--out benchmarks/results]
    python benchmarks/rivals_streaming.py --data corpus.txt          # any file of lines

The libraries are Hugging Face datasets (mapped Arrow files, and streaming), litdata, mosaicml-streaming, Plimsoll, and
a list of str for scale. Each has a separate environment and is set up as its documentation recommends (see
`rivals/streams.py`). The text is lines of Zipf-distributed words in eight files; every line begins with its number, so
that its occurrences can be counted. The work is the same for all: batches of 256 lines, shuffled with the library's
method, and two workers that turn the bytes of a batch into a tensor. There is no tokenizer, so that only feeding is
measured. Texts are in the page cache.

Each round prepares a new folder and reads an epoch, one library after the other; figures are medians, with the minimum
and maximum of the rounds. Memory is private and shared memory of all processes together (shared pages count once), read
20 times per second, above the process after its imports. Processor seconds include all processes. They hardly depend on
other programs, whereas lines per second do. In the last round, each library is also stopped after 40 % of the epoch and
resumed from its state in another process. One of its workers is killed, too. The cost per sample matters less for
longer samples, so the same text is read a second time with 16 lines as one. Prints tables, and one JSON object with the
figures as the last line. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from _results import add_out, file_result, show, versions_in
from _results import table as markdown
from _rivals import python_of
from data_corpora import generate

PROGRAM = Path(__file__).parent / "rivals" / "streams.py"
MIB = 1 << 20
NUM_FILES = 8
NUM_JOINED = 16
FEWEST_LINES = NUM_JOINED * 256  # a batch of `rivals/streams.py` with joined lines
POLL_SECONDS = 0.05
# The environment of each library; None is this one.
STORES = {
    "plimsoll": None, "list of str": None, "datasets": "huggingface", "datasets-streaming": "huggingface",
    "litdata": "litdata", "mosaicml-streaming": "streaming",
}  # fmt: skip
LABELS = {
    "plimsoll": "Plimsoll",
    "datasets": "HF datasets, mapped",
    "datasets-streaming": "HF datasets, streaming",
}
PACKAGES = {"huggingface": ("datasets",), "litdata": ("litdata",), "streaming": ("mosaicml-streaming",)}
GOES_ON = "goes on"
Figures = dict[str, Any]


# -- the text ----------------------------------------------------------------------------------------------------------


def write_files(data: Path, folder: Path, num_joined: int = 1) -> tuple[list[Path], int]:
    """Write the text into files, joining ``num_joined`` lines into a numbered one; return the files and line counts."""
    with data.open("rb") as file:
        num_lines = sum(1 for _ in file) // num_joined
    folder.mkdir(exist_ok=True)
    paths = [folder / f"part-{number}.txt" for number in range(NUM_FILES)]
    per_file = -(-num_lines // NUM_FILES)
    with data.open(encoding="utf-8", newline="\n") as file:
        for place, path in enumerate(paths):
            with path.open("w", encoding="utf-8", newline="\n") as out:
                for number in range(place * per_file, min((place + 1) * per_file, num_lines)):
                    out.write(f"{number} {' '.join(line.rstrip() for line in islice(file, num_joined))}\n")
    return paths, num_lines


# -- one process -------------------------------------------------------------------------------------------------------


def run(mode: str, store: str, folder: Path, num_lines: int, paths: Sequence[Path]) -> Figures:
    """Run a mode in a separate process and observe its memory; on failure, exit with its error output."""
    name = STORES[store]
    python = sys.executable if name is None else str(python_of(name))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    if name is not None:
        environment.pop("PYTHONPATH", None)
    command = [python, str(PROGRAM), mode, store, str(folder), str(num_lines), *map(str, paths)]
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, env=environment
    ) as child:  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        while (line := child.stdout.readline()) and line != "begin\n":
            pass
        used_seconds: dict[int, float] = {}
        before_bytes, peaks, is_over = use_of(child.pid, used_seconds), [0], threading.Event()
        before_seconds = sum(used_seconds.values())
        watcher = threading.Thread(target=watch, args=(child.pid, peaks, used_seconds, is_over))
        watcher.start()
        child.stdin.write("go\n")
        child.stdin.close()
        output = child.stdout.read()
        is_over.set()
        watcher.join()
        child.wait()
        found = [line for line in output.splitlines() if line.startswith("{")]
        if not found:
            said.seek(0)
            raise SystemExit(f"{store} could not {mode}:\n{said.read()[-3000:]}")
    figures = json.loads(found[-1]) | {"memory_bytes": max(0, peaks[0] - before_bytes)}
    figures["processor_seconds"] = sum(used_seconds.values()) - before_seconds
    print(f"{store}, {mode}: {json.dumps(figures)}", file=sys.stderr, flush=True)
    return figures


def watch(number: int, peaks: list[int], used_seconds: dict[int, float], is_over: threading.Event) -> None:
    while not is_over.wait(POLL_SECONDS):
        peaks[0] = max(peaks[0], use_of(number, used_seconds))


def use_of(number: int, used_seconds: dict[int, float]) -> int:
    """Return private and shared memory of a process tree, and record the processor seconds of each process."""
    num_bytes = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(number)
        for one in [root, *root.children(recursive=True)]:
            with suppress(OSError, psutil.NoSuchProcess):  # it may have ended
                times = one.cpu_times()
                used_seconds[one.pid] = times.user + times.system
                for line in Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                        num_bytes += int(line.split()[1]) << 10
    return num_bytes


def written_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


# -- rounds ------------------------------------------------------------------------------------------------------------


def measure(
    stores: Sequence[str], paths: Sequence[Path], num_lines: int, num_rounds: int, work: Path, with_stops: bool
) -> dict[str, Figures]:
    """Run all libraries round by round; each round starts with another one."""
    found: dict[str, Figures] = {store: {"rounds": []} for store in stores}
    for number in range(num_rounds):
        start = number % len(stores)
        for store in [*stores[start:], *stores[:start]]:
            folder = work / store
            prepared = run("prepare", store, folder, num_lines, paths)
            epoch = run("epoch", store, folder, num_lines, paths)
            found[store]["rounds"].append({
                "prepare_seconds": prepared["seconds"],
                "prepare_bytes": prepared["memory_bytes"],
                "written_bytes": written_bytes(folder),
                "first_seconds": epoch["first_seconds"],
                "lines_per_second": epoch["lines"] / epoch["seconds"],
                "epoch_bytes": epoch["memory_bytes"],
                "processor_seconds": 1e6 * epoch["processor_seconds"] / epoch["lines"],
                "missing": epoch["missing"],
                "repeated": epoch["repeated"],
            })  # fmt: skip
            if with_stops and number == num_rounds - 1:
                run("resume-first", store, folder, num_lines, paths)
                found[store]["resumed"] = run("resume-rest", store, folder, num_lines, paths)
                found[store]["killed"] = run("kill", store, folder, num_lines, paths)
            shutil.rmtree(folder, ignore_errors=True)
    return found


def middle(found: Figures, name: str) -> float:
    return statistics.median(one[name] for one in found["rounds"])


def spread(found: Figures, name: str, unit: float = 1, digits: int = 0) -> str:
    """Return the median of the rounds, with their minimum and maximum."""
    values = sorted(one[name] / unit for one in found["rounds"])
    if values[-1] < 0.5 * 10**-digits:
        return "0"
    shown = [f"{value:,.{digits}f}" for value in (statistics.median(values), values[0], values[-1])]
    return shown[0] if shown[1] == shown[2] else f"{shown[0]} ({shown[1]} - {shown[2]})"


def ratio(own: Figures, other: Figures, name: str) -> str:
    """Return another library's figure relative to Plimsoll's, by round."""
    values = sorted(two[name] / one[name] for one, two in zip(own["rounds"], other["rounds"], strict=True))
    return f"{statistics.median(values):.2f} ({values[0]:.2f} - {values[-1]:.2f})"


# -- tables ------------------------------------------------------------------------------------------------------------


def times_text(missing: int, repeated: int) -> str:
    if not missing and not repeated:
        return "each once"
    return f"{missing:,} missing, {repeated:,} twice"


Shown = tuple[list[str], list[list[str]]]


def speeds(found: dict[str, Figures]) -> dict[str, Shown]:
    first, second = [], []
    for store, one in found.items():
        name = LABELS.get(store, store)
        first.append([name, spread(one, "prepare_seconds", digits=2), spread(one, "written_bytes", MIB),
                      spread(one, "prepare_bytes", MIB)])  # fmt: skip
        second.append([name, spread(one, "first_seconds", digits=2), spread(one, "lines_per_second", 1000, 1),
                       ratio(found["plimsoll"], one, "lines_per_second"), spread(one, "processor_seconds", digits=1),
                       ratio(found["plimsoll"], one, "processor_seconds"), spread(one, "epoch_bytes", MIB),
                       ratio(found["plimsoll"], one, "epoch_bytes")])  # fmt: skip
    return {
        "Preparing": (["library", "seconds", "MiB written", "memory, MiB"], first),
        "An epoch of shuffled batches, two workers": (
            [
                "library",
                "seconds to the first batch",
                "1,000 lines/s",
                "x Plimsoll's",
                "processor seconds, 1,000,000 lines",
                "x Plimsoll's",
                "memory, MiB",
                "x Plimsoll's",
            ],
            second,
        ),
    }


def stops(found: dict[str, Figures]) -> dict[str, Shown]:
    rows = []
    for store, one in found.items():
        last, resumed, killed = one["rounds"][-1], one["resumed"], one["killed"]
        alone = " (without workers)" if resumed["resuming_workers"] == 0 else ""
        outcome = re.sub(r" \(pid(\(s\))? \d+\)", "", killed["outcome"])
        if outcome.startswith(GOES_ON):
            outcome += f" ({times_text(killed['missing'], killed['repeated'])})"
        rows.append([LABELS.get(store, store), times_text(last["missing"], last["repeated"]),
                     times_text(resumed["missing"], resumed["repeated"]) + alone, outcome])  # fmt: skip
    head = ["library", "an epoch", "stopped after 40 %, the rest in another process", "a worker is killed"]
    return {"Which lines came": (head, rows)}


MEASURES = {
    "prepare_seconds": ("prepare in less time", 1), "written_bytes": ("write less", 1),
    "first_seconds": ("have the first batch sooner", 1), "lines_per_second": ("feed more lines a second", -1),
    "processor_seconds": ("need fewer processor seconds in an epoch", 1),
    "epoch_bytes": ("need less memory in an epoch", 1),
}  # fmt: skip


def winners(found: dict[str, Figures], of_what: str) -> str:
    """List in words the measures in which another library is better than Plimsoll."""
    lines, own = [], found["plimsoll"]
    for name, (text, sign) in MEASURES.items():
        better = []
        for store, one in found.items():
            if store != "plimsoll" and sign * middle(one, name) < sign * middle(own, name):
                always = all(sign * two[name] < sign * its[name]
                             for two, its in zip(one["rounds"], own["rounds"], strict=True))  # fmt: skip
                better.append(LABELS.get(store, store) + ("" if always else " (not in every round)"))
        if better:
            lines.append(f"- These {text} than Plimsoll: {', '.join(better)}.")
    return "\n".join([f"Where another is better with {of_what}, by the medians:", "", *(lines or ["- nowhere."])])


def readme_part(found: dict[str, Figures], num_lines: int, text_bytes: int) -> str:
    head = [f"{num_lines:,} lines, {text_bytes / 1e6:,.0f} MB, 2 workers", "seconds to prepare", "lines/s, shuffled",
            "processor seconds",
            "memory of an epoch", "stopped and gone on", "a worker is killed"]  # fmt: skip
    rows = []
    for store, one in found.items():
        resumed, outcome = one["resumed"], one["killed"]["outcome"]
        killed = GOES_ON if outcome.startswith(GOES_ON) else outcome.split(" ")[0].strip(",")
        rows.append([LABELS.get(store, store), f"{middle(one, 'prepare_seconds'):.1f}",
                     f"{middle(one, 'lines_per_second') / 1000:,.0f} k",
                     f"{middle(one, 'processor_seconds') * num_lines / 1e6:.1f}",
                     f"{middle(one, 'epoch_bytes') / MIB:,.0f} MiB",
                     times_text(resumed["missing"], resumed["repeated"]), killed])  # fmt: skip
    return markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=250_000, help="lines of generated text (default: %(default)s)")
    parser.add_argument("--data", type=Path, help="file of lines to read instead")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: %(default)s)")
    add_out(parser)
    arguments = parser.parse_args()
    if arguments.data is None and arguments.lines < FEWEST_LINES:
        parser.error(f"--lines {arguments.lines}: give {FEWEST_LINES}, a batch of joined lines, or more")
    missing = {name for name in STORES.values() if name is not None and python_of(name) is None}
    stores = [store for store, name in STORES.items() if name not in missing]
    if missing:
        print(f"make rivals has not been run for {sorted(missing)}: left out", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        text = arguments.data or Path(folder) / "text"
        if arguments.data is None:
            generate(text, arguments.lines)
        work = Path(folder) / "work"
        paths, num_lines = write_files(text, Path(folder) / "lines")
        text_bytes = sum(path.stat().st_size for path in paths)
        found = measure(stores, paths, num_lines, arguments.rounds, work, with_stops=True)
        paths, num_long = write_files(text, Path(folder) / "long", NUM_JOINED)
        long = measure(stores, paths, num_long, arguments.rounds, work, with_stops=False)
    parts = [__doc__.split("\n\n", 2)[2].strip()]
    sizes = (num_lines, text_bytes / num_lines), (num_long, text_bytes / num_long)
    for one, (number, size), shown in (
        (found, sizes[0], speeds(found) | stops(found)), (long, sizes[1], speeds(long))
    ):  # fmt: skip
        of_what = f"{number:,} lines of {size:,.0f} bytes on average"
        parts.append(f"# {of_what}")
        for title, (head, rows) in shown.items():
            show(f"{title}: {of_what}", head, rows)
            parts += [f"## {title}", markdown(head, rows)]
        parts.append(winners(one, of_what))
        print(parts[-1])
    pythons = {name: python for name in PACKAGES if (python := python_of(name))}
    others = [one for name, python in pythons.items() for one in versions_in(python, PACKAGES[name])]
    title = "Feeding text larger than memory, by Plimsoll and by others"
    part, text = readme_part(found, num_lines, text_bytes), "\n\n".join(parts)
    packages = ("torch", "numpy")
    file_result(arguments.out, "rivals-streaming", title, text, part, packages=packages, others=others)
    print(json.dumps({"lines": num_lines, "text_bytes": text_bytes, "stores": found, "joined": long}))


if __name__ == "__main__":
    main()
