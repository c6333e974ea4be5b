"""Rewrite the tables of README.md and other pages, between `<!-- table NAME -->` and `<!-- /table -->`.

    python benchmarks/readme.py            # rewrites README.md, docs/benchmarks.md and the other pages with tables
    python benchmarks/readme.py --check    # prints the differences, and exits with 1 if there are any

A table is copied word for word from the newest result with that name (see `_results.py`), followed by its source.
Several names, as in `<!-- table plan-fast plan-deep -->`, are shown one after the other; tables with the same header
are merged.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from pathlib import Path

from _results import RESULTS, Result, newest

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *(ROOT / "docs" / name for name in ("benchmarks.md", "what-is-put-back.md")))
MARKED = re.compile(r"(<!-- table ([a-z0-9 -]+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def rewritten(page: str, results: Path = RESULTS, to_root: str = "") -> str:
    """Return the page with the newest results; ``to_root`` is the relative path from the page to the root."""
    return MARKED.sub(lambda found: f"{found[1]}{shown(found[2].split(), results, to_root)}\n{found[3]}", page)


def names_on(page: str) -> list[str]:
    """Return the names of all results that a page shows."""
    return [name for found in MARKED.finditer(page) for name in found[2].split()]


def shown(names: list[str], folder: Path, to_root: str = "") -> str:
    """Return the parts of several results, followed by their sources."""
    found = [newest(name, folder) for name in names]
    missing = [f"`{name}`" for name, result in zip(names, found, strict=True) if result is None]
    results = [result for result in found if result is not None]
    for result in results:
        if not result.part or not result.made:
            raise SystemExit(f"{result.path.name} has no part for README.md or does not name its source: run it again")
    pieces = [joined([result.part for result in results])]
    if missing:
        pieces.append(f"Not measured yet: {', '.join(missing)}.")
    if results:
        pieces.append(f"<sub>{'<br>'.join(source(result, to_root) for result in results)}</sub>")
    return "\n\n".join(filter(None, pieces))


def joined(parts: list[str]) -> str:
    """Join the blocks of all parts; tables with the same header are merged, and so are lists."""
    blocks: list[list[str]] = []
    for block in (piece.splitlines() for part in parts for piece in part.split("\n\n")):
        like = next((one for one in blocks if begin_of(one) == begin_of(block) != ""), None)
        if like is None:
            blocks.append(block)
        else:
            like += block[2:] if block[0].startswith("|") else block
    return "\n\n".join(map("\n".join, blocks))


def begin_of(block: list[str]) -> str:
    """Return the key of blocks that can be merged: the header of a table, or the mark of a list."""
    return block[0] if block[0].startswith("|") else "- " if block[0].startswith("- ") else ""


def source(result: Result, to_root: str = "") -> str:
    """Describe the source of a result in one line."""
    made, link = result.made, f"{to_root}benchmarks/results/{result.path.name}"
    return f"[{result.what}, {made['date']}]({link}): `{made['command']}`; {made['circumstances']}"


def to_root_from(path: Path) -> str:
    """Return the relative path from a page's folder to the root."""
    return "../" * (len(path.relative_to(ROOT).parts) - 1)


def main() -> None:
    """Rewrite or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, and exit with 1 if a page is out of date")
    arguments = parser.parse_args()
    stale = []
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        new = rewritten(page, to_root=to_root_from(path))
        if not arguments.check:
            path.write_text(new, encoding="utf-8")
        elif new != page:
            stale.append(path.name)
            sys.stdout.writelines(
                difflib.unified_diff(page.splitlines(True), new.splitlines(True), path.name, "what the results have")
            )
    if stale:
        sys.exit(f"{' and '.join(stale)} do not show the newest results: run `python benchmarks/readme.py`")


if __name__ == "__main__":
    main()
