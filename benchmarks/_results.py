"""Files of benchmark results: `results/<what>-<device>-<date>.md`, whose last line names their source.

The part between `<!-- readme -->` and `<!-- /readme -->` is shown on pages; `readme.py` copies it there. (In results
from before this format, the part was written by hand and the last line tells so; the next run replaces it.) The last
line has the command, date, processor, cores, threads, load and versions. Of path arguments only the last component is
recorded.
"""

from __future__ import annotations

import argparse
import datetime
import io
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TextIO

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers")
KEPT_ELSEWHERE = ("--out", "--result", "--kept", "--keep", "--measured", "--work")  # these change no number
README = ("<!-- readme -->", "<!-- /readme -->")

_NAME = re.compile(r"(?P<what>[a-z0-9-]+?)-(?P<device>cpu|gpu|[a-z]+\d+)-(?P<date>\d{4}-\d\d-\d\d)")
_PART = re.compile(f"{README[0]}\n+(.*?)\n+{README[1]}", re.DOTALL)
_MADE = re.compile(
    r"^Made by `(?P<command>[^`]+)` on (?P<date>\d{4}-\d\d-\d\d): (?P<circumstances>.+)\.$", re.MULTILINE
)


@dataclass(frozen=True)
class Result:
    """One file of `results/`; ``part`` is the text that pages show, ``made`` the fields of the last line."""

    path: Path
    what: str
    date: str
    part: str
    made: dict[str, str]

    @staticmethod
    def read(path: Path) -> Result:
        name, text = _NAME.fullmatch(path.stem), path.read_text(encoding="utf-8")
        if name is None:
            raise SystemExit(f"{path.name} is not named <what>-<device>-<date>.md: rename it")
        part, made = _PART.search(text), _MADE.search(text)
        return Result(path, name["what"], name["date"], part[1] if part else "", made.groupdict() if made else {})


def newest(what: str, folder: Path = RESULTS) -> Result | None:
    """Return the newest result with a name, or None."""
    found = [Result.read(path) for path in folder.glob(f"{what}-*.md") if (name := _NAME.fullmatch(path.stem))
             and name["what"] == what]  # fmt: skip
    return max(found, key=lambda result: (result.date, result.path.name), default=None)


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add the option for the folder of the result."""
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="file the result here, e.g. in benchmarks/results")


def check_only(parser: argparse.ArgumentParser, only: Iterable[str], names: Iterable[str]) -> None:
    """Exit with code 2 and a message if some text of ``--only`` occurs in none of the names."""
    known = list(names)
    if lacking := [part for part in only if not any(part in name for name in known)]:
        parser.error(f"--only {shlex.join(lacking)}: none of the {len(known)} recorded rows has that in its name")


def file_result(
    folder: Path | None,
    what: str,
    title: str,
    text: str,
    readme: str = "",
    *,
    threads: int | None = None,
    packages: Iterable[str] = PACKAGES,
    others: Sequence[str] = (),
    device: str = "cpu",
    command: Sequence[str] | None = None,
) -> None:
    """Write a result unless ``folder`` is None; ``others`` are versions in other environments."""
    if folder is None:
        return
    today = datetime.date.today().isoformat()
    part = f"{README[0]}\n{readme.strip()}\n{README[1]}\n\n" if readme else ""
    machine = ", ".join([circumstances(threads, packages), *others])
    made = f"Made by `{shown(command or sys.argv)}` on {today}: {machine}."
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{what}-{device}-{today}.md"
    path.write_text(f"# {title}\n\n{part}{text.strip()}\n\n{made}\n", encoding="utf-8")
    print(f"filed {path.name}", file=sys.stderr)


def shown(command: Sequence[str]) -> str:
    """Return a command as it can be typed in the repository root, without this machine's folders."""
    script, *words = command
    kept, skip = [], False
    for word in words:
        if skip or word in KEPT_ELSEWHERE:
            skip = not skip
        elif word.partition("=")[0] not in KEPT_ELSEWHERE:
            option, equals, value = word.rpartition("=")
            kept.append(f"{option}{equals}{Path(value).name}" if Path(value).is_absolute() else word)
    return shlex.join([*(["make"] if script == "make" else ["python", f"benchmarks/{Path(script).name}"]), *kept])


def circumstances(threads: int | None = None, packages: Iterable[str] = PACKAGES) -> str:
    """Describe this machine, with its processor, cores, threads and load, and list versions."""
    num_cores = len(os.sched_getaffinity(0))
    if threads is None:
        torch = sys.modules.get("torch")
        threads = torch.get_num_threads() if torch else int(os.environ.get("OMP_NUM_THREADS", num_cores))
    machine = [processor(), counted(num_cores, "core"), counted(threads, "thread"), f"load {os.getloadavg()[1]:.1f}"]
    versions = [f"Python {platform.python_version()}", *filter(None, map(installed, packages))]
    return f"{', '.join(machine)}; {', '.join([*versions, ' '.join(platform.libc_ver())])}"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def processor() -> str:
    """Return the processor's name and its widest vector instructions, which affect some measured speeds."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", "").split()
    widest = next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), None)
    return (fields.get("model name") or platform.machine()) + (f" with {widest}" if widest else "")


def versions_in(python: Path, packages: Iterable[str]) -> list[str]:
    """Return package versions in the environment of another interpreter."""
    program = "import sys; from importlib.metadata import version; [print(one, version(one)) for one in sys.argv[1:]]"
    done = subprocess.run([python, "-c", program, *packages], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()


def installed(package: str) -> str | None:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return None


# -- tables ------------------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; the first column is aligned left, the others right."""
    rule = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in (header, rule, *rows))


def show(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table on the terminal."""
    from rich.console import Console  # not in the environments of other tools
    from rich.table import Table

    printed = Table(title=title)
    for place, name in enumerate(header):
        printed.add_column(name, justify="right" if place else "left")
    for row in rows:
        printed.add_row(*row)
    Console(width=180).print(printed)


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


def fenced(text: str) -> str:
    return f"```\n{text.strip()}\n```"


class Printed(io.TextIOBase):
    """Standard output that also keeps the printed text, to be filed."""

    def __init__(self, to: TextIO) -> None:
        self.text, self._to = "", to

    def write(self, text: str) -> int:
        self.text += text
        return self._to.write(text)

    def flush(self) -> None:
        self._to.flush()


def keep_printed() -> Printed:
    """Replace standard output by a stream that keeps the printed text."""
    sys.stdout = kept = Printed(sys.stdout)
    return kept


# The header for trainings or inference inside less memory than the weights need; tables with it are merged on pages.
INSIDE_A_LIMIT = (
    "inside a limit on all private memory of the process",
    "limit",
    "peak",
    "predicted",
    "without a limit",
)


def quantile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that is not exceeded by ``share`` of the values."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered) - 1e-9) - 1]


def errors_table(*found: tuple[str, Sequence[float]]) -> str:
    """Return a table of prediction errors relative to measurements; tables of several results are merged on pages."""
    header = ("predicted against", "runs", "median error", "90 % within", "worst")
    rows = []
    for name, errors in found:
        sizes = sorted(map(abs, errors))
        said = (statistics.median(sizes), quantile(sizes, 0.9), sizes[-1])
        rows.append((name, len(sizes), *(f"{size:.1%}" if size else "0" for size in said)))
    return table(header, rows)
