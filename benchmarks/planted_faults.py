"""Faults planted in real training scripts: the cause, line and working remedy that `plimsoll.explained` must find.

The first line of each script of ``benchmarks/planted`` names the planted cause. The faulty line is marked ``# FAULT
fixed: CODE``. The script runs in a separate process under ``RLIMIT_DATA`` until memory really runs out, and the cause
and line of the first finding are compared. Then the line is replaced by CODE, which follows the finding's remedy, and
the script must end. ``# ALSO NAME`` marks another line that is accepted for the fault NAME: the operation that creates
the tensors.

The measured saving is the difference between the peaks of both scripts without a limit. Both end after the model call
in which memory ran out. The predicted saving is the finding's; findings without a number are not compared.

    python benchmarks/planted_faults.py [NAME...] [--savings]
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import plimsoll

SCRIPTS = Path(__file__).parent / "planted"
MIB = 1 << 20


def run(script: Path, **variables: str) -> tuple[int, dict[str, Any], str]:
    """Run a script, and return its exit status, its result file and its standard error."""
    result = script.with_suffix(".json")
    result.unlink(missing_ok=True)
    path = os.pathsep.join([str(Path(plimsoll.__file__).parents[1]), str(script.parent)])
    environment = os.environ | {"PYTHONPATH": path, "PLANTED_RESULT": str(result), "OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=script.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, json.loads(result.read_text()) if result.exists() else {}, done.stderr


def examine(name: str, folder: Path, measure_savings: bool) -> dict[str, Any]:
    """Run one fault and its remedy."""
    source = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    planted = source.split('"""')[1].partition(":")[0]
    faulty, fixed = folder / f"{name}.py", folder / f"{name}_fixed.py"
    faulty.write_text(source, encoding="utf-8")
    fixed.write_text(with_remedy(source), encoding="utf-8")
    status, result, errors = run(faulty)
    diagnosis = result.get("diagnosis")
    row: dict[str, Any] = {"fault": name, "planted": planted, "ran_out": diagnosis is not None and status != 0}
    if diagnosis is None:
        return row | {"error": errors[-2000:]}
    first = (diagnosis["findings"] or [{}])[0]
    row |= {
        "found": first.get("cause", ""),
        "others": [one["cause"] for one in diagnosis["findings"][1:]],
        "place": first.get("place", ""),
        "place_is_right": Path(first.get("place", "").rpartition(" ")[2]).name in places(name, source),
        "steps": diagnosis["num_steps"],
        "predicted_bytes": first.get("effect_bytes"),
    }
    status, _, errors = run(fixed)
    row |= {"fixed_ends": status == 0} | ({} if status == 0 else {"error": errors[-600:]})
    if measure_savings and row["predicted_bytes"]:
        row["measured_bytes"] = saving(faulty, fixed, result["calls"])
    return row


def lines_of_fault(source: str) -> tuple[int, int]:
    """Return the first and the last line of the marked statement; the mark is at its end."""
    (marked,) = [number for number, line in enumerate(source.splitlines(), 1) if "# FAULT fixed: " in line]
    found = [one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.stmt) and one.end_lineno == marked]
    first = max(one.lineno for one in found)
    return first, marked


def with_remedy(source: str) -> str:
    """Return a script with the marked statement replaced."""
    first, last = lines_of_fault(source)
    lines = source.splitlines()
    indent = lines[first - 1][: len(lines[first - 1]) - len(lines[first - 1].lstrip())]
    remedy = lines[last - 1].partition("# FAULT fixed: ")[2]
    return "\n".join([*lines[: first - 1], indent + remedy, *lines[last:], ""])


def places(name: str, source: str) -> set[str]:
    """Return the lines that a finding may name."""
    first, last = lines_of_fault(source)
    own = {f"{name}.py:{number}" for number in range(first, last + 1)}
    common = (SCRIPTS / "_common.py").read_text(encoding="utf-8").splitlines()
    own |= {f"{name}.py:{number}" for number, line in enumerate(source.splitlines(), 1) if f"# ALSO {name}" in line}
    return own | {f"_common.py:{number}" for number, line in enumerate(common, 1) if line.endswith(f"# ALSO {name}")}


def saving(faulty: Path, fixed: Path, num_calls: int) -> int | None:
    """Measure the reduction of the peak without a limit, up to the end of the call in which memory ran out.

    Both scripts end before the next call of the model, so that neither includes a later evaluation or loader.
    """
    variables = {"PLANTED_MIB": "0", "PLANTED_CALLS": str(num_calls)}
    peaks = [run(script, **variables)[1].get("peak_bytes") for script in (faulty, fixed)]
    return None if None in peaks else peaks[0] - peaks[1]


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print("| fault | planted | first cause | line | line right | others | remedy ends | predicted | measured |")
    print("| --- | --- | --- | --- | --- | --- | --- | --: | --: |")
    for row in rows:
        sizes = [f"{row[key] / MIB:.0f}" if row.get(key) else "" for key in ("predicted_bytes", "measured_bytes")]
        words = [row["fault"], row["planted"], row.get("found", "-"), row.get("place", "")]
        words += ["yes" if row.get("place_is_right") else "no", ", ".join(row.get("others", ()))]
        words += ["yes" if row.get("fixed_ends") else "no", *sizes]
        print(f"| {' | '.join(words)} |")


def main() -> None:
    """Run every fault, and print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="faults (default: all)")
    parser.add_argument("--savings", action="store_true", help="also measure the savings of the remedies")
    arguments = parser.parse_args()
    names = arguments.names or sorted(path.stem for path in SCRIPTS.glob("[a-z]*.py"))
    rows = []
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        (folder / "_common.py").write_text((SCRIPTS / "_common.py").read_text(encoding="utf-8"), encoding="utf-8")
        for name in names:
            rows.append(examine(name, folder, arguments.savings))
            print(rows[-1], file=sys.stderr, flush=True)  # partial results, in case it is stopped
            if "error" in rows[-1]:
                print(f"{name}: {rows[-1]['error']}", file=sys.stderr)
    show(rows)
    right = [row for row in rows if row.get("found") == row["planted"]]
    errors = [
        abs(row["predicted_bytes"] - row["measured_bytes"]) / row["measured_bytes"]
        for row in rows
        if row.get("measured_bytes") and row["measured_bytes"] > 0
    ]
    print(
        json.dumps(
            {
                "faults": len(rows),
                "cause_first": len(right),
                "cause_first_and_line": sum(row["place_is_right"] for row in right),
                "remedy_ends": sum(bool(row.get("fixed_ends")) for row in rows),
                "median_error_of_saving": round(statistics.median(errors), 3) if errors else None,
            }
        )
    )


if __name__ == "__main__":
    main()
