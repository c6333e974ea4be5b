"""Runs the benchmarks, files their results, and rewrites what README.md shows of them.

    python benchmarks/bench.py                 # what fits into 30 minutes on 2 cores
    python benchmarks/bench.py --all           # everything, hours
    python benchmarks/bench.py --only demo     # one; --list names them, with the minutes that each takes
    python benchmarks/bench.py --news agnews-test.csv --text wikitext2-valid.txt --text wikitext2-test.txt

Each runs in a process of its own, one after the other, and its result goes to `benchmarks/results`: written by the
script itself where README.md shows a part of it, else what it prints. One that fails is said at the end, which is then
1; the others run all the same. Some need real text that is not in the repository: AG News as a csv file (`--news`), and
WikiText-2 as text (`--text`); without it they are left out, and that is said. Other tools are compared with where
`make rivals` has installed them. What is written beside the results goes to a temporary folder, or to `--folder`.
"""

from __future__ import annotations

import argparse
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
    """One result; `minutes` is on 2 cores, and what `is_usual` is part of the 30 minutes.

    Of its arguments `NEWS` and `TEXT` stand for the text that is given, `FOLDER` for a folder to work in.
    """

    name: str
    minutes: float
    arguments: tuple[str, ...] = ()
    script: str = ""
    is_usual: bool = False

    @property
    def path(self) -> Path:
        return HERE / (self.script or f"{self.name.replace('-', '_')}.py")


BENCHMARKS = (Benchmark("headline", 10, is_usual=True),)


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also those that do not fit into 30 minutes")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this one; can be given several times")
    parser.add_argument("--list", action="store_true", help="say which there are, and run none")
    parser.add_argument("--news", type=Path, help="AG News: a csv file of class, title, description")
    parser.add_argument("--text", type=Path, action="append", default=[], help="a text file, a paragraph a line")
    parser.add_argument("--folder", type=Path, help="where large files are made and stay; default: a temporary one")
    arguments = parser.parse_args()
    known = {one.name: one for one in BENCHMARKS}
    if unknown := set(arguments.only or ()) - known.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}: choose of {', '.join(known)}")
    chosen = [
        one for one in BENCHMARKS if (one.name in arguments.only if arguments.only else arguments.all or one.is_usual)
    ]
    if arguments.list:
        print(
            "\n".join(f"{one.name:26}{one.minutes:6g} min{'' if one.is_usual else '  (not usual)'}" for one in chosen)
        )
        return
    with tempfile.TemporaryDirectory(prefix="plimsoll-bench-") as temporary:
        given = {"NEWS": [arguments.news], "TEXT": arguments.text, "FOLDER": [arguments.folder or Path(temporary)]}
        said = [run(one, number, len(chosen), given) for number, one in enumerate(chosen, start=1)]
    subprocess.run([sys.executable, HERE / "readme.py"], check=True)
    for kind in ("left out", "failed"):
        if found := [one for one in said if one.startswith(kind)]:
            print("\n".join(found))
    sys.exit(any(one.startswith("failed") for one in said))


def run(one: Benchmark, number: int, num_all: int, given: dict[str, list[Path]]) -> str:
    """Run one and file its result; returns what is to be said of it at the end, if anything."""
    words = words_of(one, given)
    if isinstance(words, str):
        print(f"[{number}/{num_all}] {one.name}: {words}", flush=True)
        return f"left out: {one.name}: {words}"
    print(f"[{number}/{num_all}] {one.name}, about {one.minutes:g} min", flush=True)
    started = time.time()
    command = [sys.executable, str(one.path), *words]
    files_itself = "file_result(" in one.path.read_text(encoding="utf-8")
    out = [] if not files_itself else ["--result" if one.name == "demo" else "--out", str(RESULTS)]
    log = given["FOLDER"][0] / f"{one.name}.log"
    with log.open("w") as errors:
        done = subprocess.run([*command, *out], stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
    seconds = time.time() - started
    print(f"    {'done' if not done.returncode else f'failed with {done.returncode}'} in {seconds:.0f} s", flush=True)
    if done.returncode:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        return f"failed: {one.name}: {last[0]}"
    if not files_itself:
        file_result(RESULTS, one.name, title_of(one.path), fenced(done.stdout), command=command[1:])
    elif (result := newest(one.name)) is None or result.path.stat().st_mtime < started:
        return f"failed: {one.name}: it filed no result"
    return ""


def words_of(one: Benchmark, given: dict[str, list[Path]]) -> list[str] | str:
    """The arguments of a benchmark, or why it cannot run."""
    if not one.path.is_file():
        return f"there is no {one.path.name}"
    words: list[str] = []
    for word in one.arguments:
        option, _, name = word.rpartition("=")
        paths = given.get(name, [])
        if name in given and not all(paths):
            return f"it needs {'--news' if name == 'NEWS' else '--text'}"
        if name in given and not paths:
            return "it needs --text"
        words += [f"{option}={path}" if option else str(path) for path in paths] if name in given else [word]
    return words


def title_of(script: Path) -> str:
    """The first sentence of a script's docstring."""
    return script.read_text(encoding="utf-8").removeprefix('"""').split("\n")[0].removesuffix(".")


if __name__ == "__main__":
    main()
