"""Run the benchmarks, file their results, and rewrite the tables that pages show.

    python benchmarks/bench.py                 # all that fit into 30 minutes on 2 cores
    python benchmarks/bench.py --all           # everything, hours
    python benchmarks/bench.py --only demo     # one; --list prints the names and minutes
    python benchmarks/bench.py --news agnews-test.csv --text wikitext2-valid.txt --text wikitext2-test.txt

The benchmarks run one after the other, each in a separate process. Results go to `benchmarks/results`. A script writes
the result itself if a page shows a part of it; otherwise its output is filed. Failures are listed at the end, and the
exit code is then 1; the other benchmarks still run.

Some benchmarks need real text that is not in the repository: AG News as a csv file (`--news`), and WikiText-2 as text
(`--text`). Without it they are skipped and listed. Comparisons with other tools need `make rivals`. Other files go to a
temporary folder, or to `--folder`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from _results import RESULTS, fenced, file_result, newest

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Benchmark:
    """One script.

    In ``arguments``, `NEWS`, `TEXT`, `RECORDS` and `FOLDER` stand for given paths; those with `?` are optional.
    ``minutes`` are measured on 2 cores; None means unknown. ``usual`` benchmarks are part of the 30 minutes. If
    ``prints`` is set, the driver files the output. Otherwise the script files ``results``, by default one with its own
    name.
    """

    name: str
    minutes: float | None
    arguments: tuple[str, ...] = ()
    usual: bool = False
    prints: bool = False
    script: str = ""
    results: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return HERE / (self.script or f"{self.name.replace('-', '_')}.py")

    @property
    def about(self) -> str:
        return "time unknown" if self.minutes is None else f"about {self.minutes:g} min"


BENCHMARKS = (
    # Shown on pages.
    Benchmark("headline", None, ("--folder=FOLDER",)),
    Benchmark("endurance", 110, ("--folder=FOLDER",)),
    Benchmark("rivals-prediction", 12, ("--records=RECORDS?",)),
    Benchmark("rivals-streaming", 3.5, ("--lines", "100000")),
    Benchmark("demo", 3, usual=True),
    Benchmark("lint-noise", 1, usual=True),
    Benchmark("predict-live", 2.5, script="predict_live_cpu.py", usual=True),
    Benchmark("latency", 10),
    Benchmark("waiting-threads", 5),
    Benchmark("predict-time", 3, ("--rounds", "2"), usual=True),
    Benchmark("recurrent-prediction", 5, usual=True),
    Benchmark("screens", 2, usual=True, results=("screen-predict", "screen-plan")),
    Benchmark("overhead", 3, ("--seconds", "40"), usual=True),
    Benchmark("data-padding", 2, usual=True),
    Benchmark("storm", 12, ("--failures", "25")),
    Benchmark("embeddings-subset", 4, ("--rounds", "1", "--without-archives"), usual=True),
    Benchmark("shrink-distill", 2, usual=True),
    Benchmark("predict-gpu-measured", 7, ("--plain", "--records=RECORDS")),
    Benchmark("predict-rss", 30, script="predict_cpu_rss.py"),
    Benchmark("ranks-prediction", 12),
    Benchmark("data-corpora", None, ("--rounds", "2")),
    Benchmark("data-loader", None, ("--kills", "200")),
    Benchmark("embeddings-host", None, ("--rounds", "15")),
    Benchmark("embeddings-classifier", None, ("--data=NEWS", "--text=TEXT")),
    Benchmark("recurrent-exact", None),
    Benchmark("recurrent-by-length", None, ("--data=NEWS",)),
    Benchmark("train-larger-than-memory", None, ("--data=TEXT", "--steps", "3")),
    Benchmark("weights-loading", None, ("--folder=FOLDER", "--rounds", "2", "--no-limits")),
    Benchmark(
        "apply-larger-than-memory", None, ("--texts=NEWS", "--folder=FOLDER", "--num-texts", "500", "--length", "12")
    ),
    Benchmark("shrink-vocabulary", None, ("--texts=NEWS", "--compared", "100", "--rows", "2000")),
    Benchmark("shrink-table", None, ("--data=NEWS", "--steps", "500", "--recover", "40")),
    Benchmark("plan-budgets", None, ("--work=FOLDER",)),
    Benchmark("plan-fast", None, ("--work=FOLDER",)),
    Benchmark("plan-deep", None),
    # Only named by the documentation.
    Benchmark("adapters-overhead-trainer", None, script="adapters_overhead.py", prints=True),
    Benchmark("adapters-overhead-others", None, prints=True),
    Benchmark("data-remote", None, prints=True),
    Benchmark("data-tokenize", None, ("--mebibytes", "16"), prints=True),
    Benchmark("explain-growth", None),
    Benchmark("explain-log", None, prints=True),
    Benchmark("explain-snapshot", None, ("--mib", "256"), prints=True),
    Benchmark("loss-memory", None, prints=True),
    Benchmark("optimizer-kernels", None, prints=True),
    Benchmark("plan-by-length", None),
    Benchmark("plan-heap", None),
    Benchmark("plan-quick", None),
    Benchmark("plan-time-model", None),
    Benchmark("planted-faults", None, ("--savings",), prints=True),
    Benchmark("recurrent-budgets", None, ("--work=FOLDER",)),
    Benchmark("recurrent-output", None, prints=True),
    Benchmark("recurrent-streams", None, ("--text=TEXT",), prints=True),
    Benchmark("recurrent-tagger", None, prints=True),
    Benchmark("shards-memory", None),
    Benchmark("shrink-quantized", None, prints=True),
    Benchmark("technique-checkpointing", None, prints=True),
    Benchmark("technique-lora", None, prints=True),
    Benchmark("watch-overhead", 10, prints=True),
)

# Made by other commands, with special requirements.
ELSEWHERE = ("make-gpu",)


def main() -> None:
    """Run the requested benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also run benchmarks that do not fit into 30 minutes")
    parser.add_argument("--only", action="append", metavar="NAME", help="run only this benchmark; can be repeated")
    parser.add_argument("--list", action="store_true", help="list the benchmarks and exit")
    parser.add_argument("--news", type=Path, help="AG News: a csv file of class, title, description")
    parser.add_argument(
        "--text", type=Path, action="append", default=[], help="text file with one paragraph per line; can be repeated"
    )
    parser.add_argument("--records", type=Path, help="csv file of the xMem authors with runs measured on GPUs")
    parser.add_argument("--folder", type=Path, help="folder in which large files are kept (default: a temporary one)")
    arguments = parser.parse_args()
    known = {one.name: one for one in BENCHMARKS}
    if unknown := set(arguments.only or ()) - known.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    if arguments.list:
        print("\n".join(f"{one.name:28}{one.about:18}{'usual' if one.usual else ''}".rstrip() for one in BENCHMARKS))
        return
    names = arguments.only or [one.name for one in BENCHMARKS if arguments.all or one.usual]
    with tempfile.TemporaryDirectory(prefix="plimsoll-bench-") as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        given = {
            "NEWS": [arguments.news] if arguments.news else [],
            "TEXT": arguments.text,
            "RECORDS": [arguments.records] if arguments.records else [],
            "FOLDER": [folder],
        }
        said = [run(known[name], f"[{number}/{len(names)}]", given) for number, name in enumerate(names, start=1)]
    if subprocess.run([sys.executable, HERE / "readme.py"], check=False).returncode:
        said.append("failed: the pages are as they were")
    for kind in ("left out", "failed"):
        if found := [one for one in said if one.startswith(kind)]:
            print("\n".join(found))
    sys.exit(any(one.startswith("failed") for one in said))


def run(one: Benchmark, count: str, given: dict[str, list[Path]]) -> str:
    """Run a benchmark and file its result; return a line for the final list, or an empty string."""
    folder = given["FOLDER"][0]
    words = words_of(one, given | {"FOLDER": [folder / one.name]})
    if isinstance(words, str):
        print(f"{count} {one.name}: {words}", flush=True)
        return f"left out: {one.name}: {words}"
    print(f"{count} {one.name}, {one.about}", flush=True)
    started = time.time()
    if any(word.endswith("FOLDER") for word in one.arguments):
        (folder / one.name).mkdir(exist_ok=True)
    # A calibration from earlier runs on this machine would change plans.
    environment = os.environ | {"PLIMSOLL_CACHE": str(folder / "known" / one.name)}
    more = {"demo": ["--out", str(folder / "demo"), "--result"]}.get(one.name, ["--out"])
    command = [str(one.path), *words, *([] if one.prints else [*more, str(RESULTS)])]
    with (folder / f"{one.name}.log").open("w+", encoding="utf-8") as log:
        done = subprocess.run(
            [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=log, text=True, check=False
        )
        log.seek(0)
        last = log.read().strip().splitlines()[-1:] or ["it said nothing"]
    ended = f"failed with {done.returncode}" if done.returncode else "done"
    print(f"    {ended} in {time.time() - started:.0f} s", flush=True)
    if done.returncode:
        return f"failed: {one.name}: {last[0]}"
    if one.prints:
        file_result(RESULTS, one.name, title_of(one.path), fenced(done.stdout), command=command)
        return ""
    found = [newest(name) for name in one.results or (one.name,)]
    is_filed = all(result is not None and result.path.stat().st_mtime >= started for result in found)
    return "" if is_filed else f"failed: {one.name}: it filed no result"


def words_of(one: Benchmark, given: dict[str, list[Path]]) -> list[str] | str:
    """Return the arguments of a benchmark, or the reason why it cannot run."""
    if not one.path.is_file():
        return f"there is no {one.path.name}"
    words: list[str] = []
    for word in one.arguments:
        option, _, wanted = word.rpartition("=")
        name = wanted.removesuffix("?")
        if name == wanted and name in given and not given[name]:
            return f"needs --{name.lower()}"
        words += [f"{option}={path}" for path in given[name]] if name in given else [word]
    return words


def title_of(script: Path) -> str:
    """Return the first line of a script's docstring, without a final period."""
    return script.read_text(encoding="utf-8").removeprefix('"""').split("\n")[0].removesuffix(".")


if __name__ == "__main__":
    main()
