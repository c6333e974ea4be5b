"""`plimsoll explain` on corrupted inputs: it must raise only Plimsoll's own errors.

    python benchmarks/fuzz_explain.py                           # 55,000 snapshots and 55,000 logs, some minutes
    python benchmarks/fuzz_explain.py --number 1000 --seed 7

``tests/fuzz_inputs.py`` corrupts snapshots and logs. Inputs that raise any other error are stored in ``--failed``.
Prints a table, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from fuzz_inputs import explained_snapshot, explained_text, fuzz, snapshot_inputs, text_inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=55_000, help="inputs of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--failed", type=Path, default=Path("fuzz-input"))
    args = parser.parse_args()
    kinds = {"snapshots": (snapshot_inputs, explained_snapshot), "logs": (text_inputs, explained_text)}
    table = Table("inputs", "number", "explained", "refused", "seconds")
    figures = {}
    for name, (inputs, explained) in kinds.items():
        started = time.perf_counter()
        counts = fuzz(inputs(random.Random(args.seed)), explained, args.number, args.failed)
        figures[name] = counts | {"seconds": time.perf_counter() - started}
        numbers = (args.number, counts["explained"], counts["refused"], round(figures[name]["seconds"]))
        table.add_row(name, *(f"{number:,}" for number in numbers))
    args.failed.unlink(missing_ok=True)
    Console(width=100).print(table)
    print(json.dumps(figures | {"seed": args.seed}))


if __name__ == "__main__":
    main()
