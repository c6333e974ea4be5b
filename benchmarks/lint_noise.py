"""Findings of `plimsoll lint` in good code: installed packages, per 1,000 lines.

    python benchmarks/lint_noise.py                       # transformers and accelerate, 30 random findings to judge
    python benchmarks/lint_noise.py --packages torch peft --sample 10

Prints a table per package, and a sample of findings with their lines, drawn with a fixed seed. A person must judge
whether they are right; the results file contains that judgement.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from _results import add_out, fenced, file_result, keep_printed
from plimsoll.diagnose.check_code import check_code
from plimsoll.diagnose.lint import every_rule
from plimsoll.records.lint import LintReport


def main() -> None:
    """Check the packages, and print the findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", nargs="+", default=["transformers", "accelerate"], help="installed packages")
    parser.add_argument("--sample", type=int, default=30, help="number of findings to print")
    add_out(parser)
    options = parser.parse_args()
    printed = keep_printed()
    reports: dict[str, LintReport] = {}
    began = time.perf_counter()
    for name in options.packages:
        folder = Path(find_spec(name).submodule_search_locations[0])
        reports[name] = check_code([folder])
        found, lines = len(reports[name].findings), reports[name].num_lines
        print(f"{name} {version(name)}: {found} findings in {lines:,} lines, {found / lines * 1000:.3f} per 1,000")
    seconds = time.perf_counter() - began
    findings = [one for report in reports.values() for one in report.findings]
    num_lines = sum(report.num_lines for report in reports.values())
    print(f"\n{num_lines:,} lines in {seconds:.0f} s\n")
    for rule, count in Counter(one.rule for one in findings).most_common():
        print(f"| {rule} | {count} |")
    print()
    for one in random.Random(0).sample(findings, min(options.sample, len(findings))):
        print(f"- {one.file.split('site-packages/')[-1]}:{one.line} {one.rule}: `{one.code[:100]}`")
    per_thousand = len(findings) / num_lines * 1000
    part = (
        f"`plimsoll lint` has {len(every_rule())} rules, and reports {per_thousand:.2f} findings per 1,000 lines of "
        f"{' and '.join(options.packages)}: {len(findings)} in {num_lines:,} lines."
    )
    title = "What `plimsoll lint` reports in good code"
    file_result(options.out, "lint-noise", title, fenced(printed.text), part, packages=options.packages)
    print(json.dumps({"num_lines": num_lines, "num_findings": len(findings), "per_thousand_lines": per_thousand}))


if __name__ == "__main__":
    main()
