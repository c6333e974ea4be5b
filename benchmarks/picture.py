"""The report picture in README.md: a real run, rendered in headless Chromium, with the upper part saved as a PNG.

    python benchmarks/picture.py [--run RUN] [--out docs/pictures/report.png]

Without ``--run``, a small GPT-2 is trained on the standard library's sources inside a budget that is too small for it,
without a plan. The page then shows how memory runs out and the training continues. Without Chromium, a message is
printed and the existing picture is kept.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from demo import prepared_job

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import browser  # noqa: E402

WIDTH_PIXELS = 1000
LAST_SHOWN = "Memory over time"  # the picture ends below the section with this heading
JOB = {"sequence_length": 128, "checkpoint": {"every": 20}}
STEPS, BUDGET = 16, "600MiB"


def main() -> None:
    """Train if no run is given, render it, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="run directory to show")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures" / "report.png")
    arguments = parser.parse_args()
    program = browser.chromium()
    if program is None:
        print(f"there is no Chromium here (looked for {', '.join(browser.NAMES)}): {arguments.out.name} stays as it is")
        return
    with tempfile.TemporaryDirectory(prefix="plimsoll-picture-") as temporary:
        folder = Path(temporary)
        run = arguments.run or trained(folder)
        page = folder / "page.html"
        plimsoll("report", run, "-o", page)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with browser.opened(program) as tab:
            tab.show(page, width=WIDTH_PIXELS)
            tab.picture(arguments.out, height=tab.value(END_OF_SHOWN))
    print(f"{arguments.out.name}: {arguments.out.stat().st_size / 1024:.0f} KiB")


END_OF_SHOWN = (
    f"(heads => heads[heads.findIndex(one => one.textContent === {LAST_SHOWN!r}) + 1].getBoundingClientRect().top)"
    "([...document.querySelectorAll('h2')])"
)


def trained(folder: Path) -> Path:
    """Train inside the budget, and return the run directory."""
    demo_job, _ = prepared_job(None, STEPS, folder / "demo")
    job = folder / "job.yaml"
    job.write_text(yaml.safe_dump(yaml.safe_load(demo_job.read_text()) | JOB), encoding="utf-8")
    run = folder / "gpt2"
    plimsoll("train", job, "--budget", BUDGET, "--no-plan", "--cache", folder / "demo" / "data", "--out", run)
    return run


def plimsoll(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "plimsoll", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
