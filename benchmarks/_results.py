"""How a benchmark files what it found: `results/<what>-<device>-<date>.md`, whose last line says what made it.

What pages show of a result stands in it between `<!-- readme -->` and `<!-- /readme -->`, written by the same
script; `readme.py` copies it. (Of results that are older than this form it was put together by hand, and their last
line says so: the next run replaces it.) The last line names the command, the date, the processor, how many cores and
threads, how busy the machine was, and versions. Of a command's arguments that are paths only the last part is written
down.
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
KEPT_ELSEWHERE = ("--out", "--result", "--kept", "--keep", "--measured", "--work")  # options that decide no number
README = ("<!-- readme -->", "<!-- /readme -->")

_NAME = re.compile(r"(?P<what>[a-z0-9-]+?)-(?P<device>cpu|gpu|[a-z]+\d+)-(?P<date>\d{4}-\d\d-\d\d)")
_PART = re.compile(f"{README[0]}\n+(.*?)\n+{README[1]}", re.DOTALL)
_MADE = re.compile(
    r"^Made by `(?P<command>[^`]+)` on (?P<date>\d{4}-\d\d-\d\d): (?P<circumstances>.+)\.$", re.MULTILINE
)


@dataclass(frozen=True)
class Result:
    """One file of `results/`; ``part`` is what pages show of it, ``made`` the fields of its last line."""

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
    """The newest result of a name, if there is one."""
    found = [Result.read(path) for path in folder.glob(f"{what}-*.md") if (name := _NAME.fullmatch(path.stem))
             and name["what"] == what]  # fmt: skip
    return max(found, key=lambda result: (result.date, result.path.name), default=None)


def add_out(parser: argparse.ArgumentParser) -> None:
    """The option with which a benchmark is asked to file its result."""
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="file the result here, e.g. in benchmarks/results")


def check_only(parser: argparse.ArgumentParser, only: Iterable[str], names: Iterable[str]) -> None:
    """End with exit code 2 and a sentence if something that ``--only`` asks for is in none of the names."""
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
    """Write a result, unless there is no folder to write it to; ``others`` are versions of other environments."""
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
    """A command as it can be typed in the root of the repository, without where this machine keeps its files."""
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
    """The processor, cores, threads and load of this machine, and versions."""
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
    """The family of the processor, and its widest instructions, which decide how fast some numbers are."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", "").split()
    widest = next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), None)
    return (fields.get("model name") or platform.machine()) + (f" with {widest}" if widest else "")


def versions_in(python: Path, packages: Iterable[str]) -> list[str]:
    """Versions of packages in the environment of another interpreter."""
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
    """Markdown; the first column to the left, the others to the right."""
    rule = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in (header, rule, *rows))


def show(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print such a table."""
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
    """Standard output that keeps what is printed, to be filed too."""

    def __init__(self, to: TextIO) -> None:
        self.text, self._to = "", to

    def write(self, text: str) -> int:
        self.text += text
        return self._to.write(text)

    def flush(self) -> None:
        self._to.flush()


def keep_printed() -> Printed:
    """Keep what is printed from here on."""
    sys.stdout = kept = Printed(sys.stdout)
    return kept


# The header of what is trained or applied inside less memory than its weights take; such tables of several make one.
INSIDE_A_LIMIT = (
    "inside a limit on all private memory of the process",
    "limit",
    "peak",
    "predicted",
    "without a limit",
)


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest of the values that ``share`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered) - 1e-9) - 1]


def errors_table(*found: tuple[str, Sequence[float]]) -> str:
    """What predictions were held against, and by what share they were off; tables of several results make one."""
    header = ("predicted against", "runs", "median error", "90 % within", "worst")
    rows = []
    for name, errors in found:
        sizes = sorted(map(abs, errors))
        said = (statistics.median(sizes), quantile(sizes, 0.9), sizes[-1])
        rows.append((name, len(sizes), *(f"{size:.1%}" if size else "0" for size in said)))
    return table(header, rows)
