"""Output of `plimsoll predict` and `plan` for the job in docs/benchmarks.md, on the standard library's sources.

python benchmarks/screens.py [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from _results import add_out, fenced, file_result
from demo import standard_library
from plimsoll.data.text.sources import find_files

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
COMMANDS = {
    "screen-predict": "predict job.yaml --device rtx3060 --search",
    "screen-plan": "plan job.yaml --budget 450MiB",
}
_TEXT_BYTES = 4 << 20


def main() -> None:
    """Run both commands in a folder with the job and a corpus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_out(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_job(Path(folder))
        screens = {name: printed(command.split(), folder) for name, command in COMMANDS.items()}
    for name, screen in screens.items():
        session = f"$ plimsoll {COMMANDS[name]}"
        print(f"{session}\n{screen}")
        panel = screen[: screen.index("╯") + 1]
        title = f"What `plimsoll {COMMANDS[name].split()[0]}` prints"
        part = f"```console\n{session}\n{panel}\n```"
        file_result(arguments.out, name, title, fenced(f"{session}\n{screen}"), part)
    print(json.dumps({name: len(screen.splitlines()) for name, screen in screens.items()}))


def write_job(folder: Path) -> None:
    """Write the job that docs/benchmarks.md shows, and a text at its data path."""
    found = re.search(r"^```yaml\n(# job\.yaml\n.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit("docs/benchmarks.md shows no job.yaml")
    (folder / "job.yaml").write_text(found[1], encoding="utf-8")
    (folder / "corpus").mkdir()
    text = ""
    for source in find_files(standard_library()).files:
        text += Path(source.path).read_text(encoding="utf-8", errors="replace")
        if len(text) > _TEXT_BYTES:
            break
    (folder / "corpus" / "sources.txt").write_text(text, encoding="utf-8")


def printed(words: list[str], folder: str) -> str:
    """Return a command's output on a terminal of 80 columns, without colours and with an empty cache."""
    environment = os.environ | {"COLUMNS": "80", "NO_COLOR": "1", "PLIMSOLL_CACHE": f"{folder}/cache"}
    command = [sys.executable, "-m", "plimsoll", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode > 1:  # 1 is the answer "no"
        raise SystemExit(done.stderr)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
