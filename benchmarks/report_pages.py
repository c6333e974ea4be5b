"""Size of each kind of page, and time for headless Chromium to open it.

    python benchmarks/report_pages.py PAGE.html [PAGE.html ...] [--repeats 5] [--pictures FOLDER]

Each page is opened in a new browser (``first``: nothing compiled or cached), and again in the same one (the median of
``--repeats``). A page counts as open when it is loaded and every chart is drawn; ``words`` is the time of the first
painted text. Pictures are taken at 1280 and 360 pixels, light and dark. Needs Chromium.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from plimsoll.records.units import format_bytes, format_seconds

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import browser

_PAINTED = "performance.getEntriesByName('first-contentful-paint').map(entry => entry.startTime / 1000)[0] ?? null"


def main() -> None:
    """Open each page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument(
        "--repeats", type=int, default=5, help="number of times that a page is opened again (default: %(default)s)"
    )
    parser.add_argument("--pictures", type=Path, help="folder for a PNG of each page")
    arguments = parser.parse_args()
    program = browser.chromium()
    if program is None:
        raise SystemExit(f"there is no Chromium here (looked for {', '.join(browser.NAMES)}): install it")
    missing = [str(page) for page in arguments.pages if not page.is_file()]
    if missing:
        raise SystemExit(f"there is no page at {', '.join(missing)}: write it with `plimsoll report RUN -o PAGE.html`")
    rows = [measure(page, program, arguments.repeats, arguments.pictures) for page in arguments.pages]
    table = Table("page", "size", "words, first", "open, first", "open, again", "console", "phone overflows")
    for row in rows:
        seconds = (format_seconds(row[name]) for name in ("words_seconds", "first_seconds", "again_seconds"))
        says = (str(row["num_console"]), "yes" if row["overflows"] else "no")
        table.add_row(str(row["page"]), format_bytes(row["num_bytes"]), *seconds, *says)
    Console().print(table)
    load = os.getloadavg()[0]
    print(f"load average {load:.1f} on {os.cpu_count()} cores")
    print(json.dumps({"pages": rows, "load_average": load, "num_cores": os.cpu_count()}))


def measure(path: Path, program: str, repeats: int, pictures: Path | None) -> dict[str, object]:
    """Open one page in a new browser, and again in the same one."""
    with browser.opened(program) as tab:
        first_seconds = tab.show(path)
        words_seconds = tab.value(_PAINTED)
        num_console = len(tab.errors())
        again_seconds = statistics.median(tab.show(path) for _ in range(repeats)) if repeats else None
        tab.show(path, width=360, height=780)
        overflows = tab.value("document.documentElement.scrollWidth > 360")  # innerWidth grows with it
        if pictures is not None:
            take(tab, path, pictures)
    return {
        "page": path.stem,
        "num_bytes": path.stat().st_size,
        "words_seconds": words_seconds,
        "first_seconds": first_seconds,
        "again_seconds": again_seconds,
        "num_console": num_console,
        "overflows": overflows,
    }


def take(tab: browser.Page, path: Path, folder: Path) -> None:
    """Write the pictures of one page."""
    folder.mkdir(parents=True, exist_ok=True)
    for scheme in ("light", "dark"):
        for name, width in (("desktop", 1280), ("phone", 360)):
            tab.show(path, width=width, scheme=scheme)
            tab.picture(folder / f"{path.stem}-{scheme}-{name}.png")


if __name__ == "__main__":
    main()
