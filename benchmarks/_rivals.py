"""Other tools: the interpreters of ``make rivals``, and how a comparison with them is filed.

``make rivals`` makes an environment for each file of ``rivals/``. A result is a Markdown file whose last line says what
made it; what README.md shows of it stands between ``<!-- readme -->`` and ``<!-- /readme -->``.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent


def python_of(name: str) -> Path | None:
    """The interpreter of the environment that ``rivals/NAME.txt`` describes, ``None`` where it is not installed."""
    if not (HERE / "rivals" / f"{name}.txt").is_file():
        raise ValueError(f"no rivals/{name}.txt")
    python = HERE.parent / ".rivals" / name / "bin" / "python"
    return python if (python.parents[1] / ".installed").is_file() else None


def versions_of(python: Path | str, packages: Iterable[str]) -> dict[str, str]:
    """The versions that an interpreter finds of these packages."""
    code = "import json, sys; from importlib.metadata import version; " + (
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    command = [str(python), "-c", code, *packages]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def made_by(others: dict[str, str], own: Sequence[str] = ("torch", "transformers")) -> str:
    """The last line of a result: command, date, processor, cores, load and versions."""
    script, *words = sys.argv
    words = [Path(word).name if word.startswith("/") else word for word in words]
    if "--out" in words:
        place = words.index("--out")
        del words[place : place + 2]
    command = shlex.join(["python", f"benchmarks/{Path(script).name}", *words])
    versions = [f"{name} {number}" for name, number in ({name: version(name) for name in own} | others).items()]
    machine = f"{processor()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[1]:.1f}"
    python = f"Python {platform.python_version()}"
    return f"Made by `{command}` on {datetime.date.today()}: {machine}; {', '.join([python, *versions])}."


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; all columns but the first are numbers."""
    rule = ["---"] + ["--:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


def file_result(folder: Path, name: str, title: str, readme: str, text: str, made: str) -> None:
    """Write ``NAME-cpu-DATE.md``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-cpu-{datetime.date.today()}.md"
    part = f"<!-- readme -->\n{readme.strip()}\n<!-- /readme -->"
    path.write_text(f"# {title}\n\n{part}\n\n{text.strip()}\n\n{made}\n", encoding="utf-8")
    print(f"filed {path.name}", file=sys.stderr)
