"""Precision and recall of `plimsoll lint` by rule and line, on scripts whose mistakes were labelled in advance.

    python benchmarks/lint_score.py                       # benchmarks/lint_corpus: 40 scripts, 97 mistakes
    python benchmarks/lint_score.py DIR                   # a folder with labels.jsonl: file, mistakes: line, rule, ...

A label may have ``accept_lines``, which are right as well, and may be ``uncertain``: neither required nor wrong. The
rules were corrected after the corpus had been read once. The score shows known omissions, not the quality on unseen
code.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from plimsoll.diagnose.check_code import check_code

Place = tuple[int, str]


def judged(mistakes: list[dict[str, Any]], found: set[Place]) -> tuple[set[Place], list[Place], set[Place]]:
    """Return the right, the missed and the wrong findings in a file."""
    right, missed, wrong = set[Place](), list[Place](), set(found)
    for mistake in mistakes:
        lines = (mistake["line"], *mistake.get("accept_lines", ()))
        hits = {(line, mistake["rule"]) for line in lines} & found
        wrong -= hits
        if mistake.get("uncertain"):
            continue
        right |= hits
        if not hits:
            missed.append((mistake["line"], mistake["rule"]))
    return right, missed, wrong


def main() -> None:
    """Check the scripts, and print a table with the missed and the wrong findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "lint_corpus")
    folder = parser.parse_args().folder
    counts: dict[str, Counter[str]] = {"right": Counter(), "missed": Counter(), "wrong": Counter()}
    for label in map(json.loads, (folder / "labels.jsonl").read_text("utf-8").splitlines()):
        if not label["parses"]:
            continue
        path = folder / label["file"]
        found = {(one.line, one.rule) for one in check_code([path]).findings}
        for name, places in zip(counts, judged(label["mistakes"], found), strict=True):
            counts[name].update(rule for _, rule in places)
            if name != "right":
                code = path.read_text("utf-8").splitlines()
                for line, rule in sorted(places):
                    print(f"{name}: {label['file']}:{line} {rule}: {code[line - 1].strip()[:80]}")
    print("\n| rule | right | missed | wrong |\n| --- | --: | --: | --: |")
    for rule in sorted({rule for counted in counts.values() for rule in counted}):
        print(f"| {rule} | {' | '.join(str(counted[rule]) for counted in counts.values())} |")
    right, missed, wrong = (counted.total() for counted in counts.values())
    print(json.dumps({"precision": right / (right + wrong), "recall": right / (right + missed), "num_right": right}))


if __name__ == "__main__":
    main()
