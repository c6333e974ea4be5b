"""The programs and commands on the pages of docs/, extracted and run as by a reader.

A block of `python` is a program. A block of `python` or `yaml` is a file if it begins with a comment of one word, such
as `# train.py` or `# job.yaml`. A block of `console` is a session. A line that begins with `$ ` is a command, and the
following lines are its output; a line `...` stands for any lines. A block below a line `<!-- not run: why -->` is not
run.

    python tests/pages.py docs/tutorial.md     # prints the page's sessions with the complete output of the commands
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"(?:^<!-- (not run: .+?) -->\n)?^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w.-]+\.\w+)\n")
_MARK = "\x1e"
_LONGEST_SECONDS = 800
_LEAST_SHARE_OF_WORDS = 0.8


@dataclass(frozen=True)
class Command:
    """One command of a session, and its output on the page."""

    text: str
    shown: str


@dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file name that the block declares, or None."""
        found = _FILE.match(self.text)
        return found[1] if found and self.language in {"yaml", "python"} else None

    @property
    def commands(self) -> list[Command]:
        """The commands of a session; after a backslash or an open quote, a command continues in the next line."""
        found: list[Command] = []
        for line in self.text.splitlines():
            if found and _goes_on(found[-1]):
                found[-1] = Command(f"{found[-1].text}\n{line.removeprefix('> ')}", "")
            elif line.startswith("$ "):
                found.append(Command(line[2:], ""))
            elif found:
                found[-1] = Command(found[-1].text, f"{found[-1].shown}{line}\n")
        return found


def _goes_on(command: Command) -> bool:
    try:
        shlex.split(command.text)
    except ValueError:  # an open quote
        return not command.shown
    return not command.shown and command.text.endswith("\\")


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page that are run."""
    for skipped, language, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if not skipped:
            yield Block(language, text)


def program_done(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program of a page."""
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment(), capture_output=True, text=True, timeout=240
    )


def session_done(block: Block, folder: Path) -> list[tuple[Command, int, str]]:
    """Run the commands of a session in one shell with job control; return each with its exit code and its output."""
    marked = [f"{command.text}\nprintf '{_MARK}%d{_MARK}' $?" for command in block.commands]
    shell = subprocess.Popen(
        ["bash", "-c", "\n".join(["set -m", *marked])], cwd=folder, env=environment(), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        printed, _ = shell.communicate(timeout=_LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        for process in [*psutil.Process(shell.pid).children(recursive=True), shell]:
            process.kill()
        raise
    pieces = printed.split(_MARK)
    return list(zip(block.commands, map(int, pieces[1::2]), pieces[0::2], strict=False))


def environment() -> dict[str, str]:
    """Return this environment, changed so that `plimsoll` and `python` are those that run the tests."""
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    variables = {
        "PATH": os.pathsep.join(folders),
        "PYTHONPATH": str(ROOT / "src"),
        "COLUMNS": "80",
        "OMP_NUM_THREADS": "2",
    }
    return os.environ | variables | {"NO_COLOR": "1"}


def words(text: str) -> list[str]:
    """Return the words of a text without numbers, units and table lines, which differ from machine to machine."""
    return re.findall(r"[a-z]{3,}", re.sub(r"\b[KMGT]iB\b", "", text), re.IGNORECASE)


def faults_of(page: Path, folder: Path) -> Iterator[str]:
    """Run a page, and yield commands that fail or print other words than the page. Exit code 1, "no", is accepted."""
    for block in blocks_of(page):
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            done = program_done(block.text, folder)
            if done.returncode:
                yield f"a program ended with {done.returncode}: {done.stderr}"
        elif block.language == "console":
            ended = session_done(block, folder)
            yield from (fault for command, code, printed in ended if (fault := _fault(command, code, printed)))
            if len(ended) < len(block.commands):
                yield f"the session ended before $ {block.commands[len(ended)].text}"


def _fault(command: Command, code: int, printed: str) -> str | None:
    shown, real = words(command.shown), set(words(printed))
    same = sum(word in real for word in shown)
    is_broken = "Traceback" in real and "Traceback" not in command.text
    if code > 1 or is_broken or same < _LEAST_SHARE_OF_WORDS * len(shown):
        return f"$ {command.text}\nended with {code}, {same} of {len(shown)} words are there:\n{printed}"
    return None


def main() -> None:
    """Print the sessions of a page with their output on this machine."""
    page = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        os.environ["PLIMSOLL_CACHE"] = cache  # without knowledge from earlier runs
        for block in blocks_of(page):
            if block.file:
                Path(folder, block.file).write_text(block.text, encoding="utf-8")
            elif block.language == "python":
                done = program_done(block.text, Path(folder))
                print(f"{done.stdout}{done.stderr}", flush=True)
            elif block.language == "console":
                for command, code, printed in session_done(block, Path(folder)):
                    print(f"$ {command.text}\n{printed}[{code}]", flush=True)


if __name__ == "__main__":
    main()
