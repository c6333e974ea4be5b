"""Effect of the heap settings on memory and time of CPU trainings, compared with the predictions.

    python benchmarks/plan_heap.py [--case NAME ...] [--steps 6] [--out table.md]

Each case trains inside a generous budget, in a separate process, with each choice of the technique `heap`. Measured are
private memory (as in `predict_cpu_rss.py`) and the processor seconds of a step, the minimum without the first one.
Other processes on the machine increase wall time, but hardly processor time.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import predict_cpu_rss as rss
from _results import add_out, file_result
from plimsoll.records.plan import Choice

MIB = 1 << 20
CASES = ("gpt2-4x192", "bert-4x256", "lstm-2x256-micro16")
SETTINGS = (
    None,
    {"mapped_from": "never"},
    {"mapped_from": "32MiB"},
    {"mapped_from": "4MiB", "trim": True},
    {"mapped_from": "1MiB"},
    {"mapped_from": "128KiB"},
)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case", action="append", help=f"case of predict_cpu_rss.py; can be repeated (default: {', '.join(CASES)})"
    )
    parser.add_argument("--steps", type=int, default=6)
    add_out(parser)
    arguments = parser.parse_args()
    rss.NUM_STEPS = rss.NUM_STEPS_KEPT = arguments.steps
    predictor = rss.Predictor()
    header = ["case", "heap", "predicted MiB", "measured MiB", "error", "CPU seconds a step"]
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header))]
    print("\n".join(lines), flush=True)
    errors = []
    for name in arguments.case or CASES:
        case = next(case for case in rss.CASES if case.name == name)
        for setting in SETTINGS:
            others = () if setting is None else (Choice(technique="heap", options=setting),)
            changed = replace(case, others=others)
            predicted_bytes = predictor.counted(changed, True).peak.likely_bytes
            measured_bytes, steps = rss.measured_run(changed, True)
            seconds = min(step["cpu_seconds"] for step in steps[1:])
            errors.append(predicted_bytes / measured_bytes - 1)
            word = "as a budget sets it" if setting is None else " ".join(map(str, others))
            sizes = f"{predicted_bytes / MIB:,.0f} | {measured_bytes / MIB:,.0f}"
            lines.append(f"| {name} | {word} | {sizes} | {errors[-1]:+.1%} | {seconds:.2f} |")
            print(lines[-1], flush=True)
    file_result(arguments.out, "plan-heap", "What the heap settings do", "\n".join(lines))
    print(json.dumps({"n": len(errors), "largest_error": round(max(map(abs, errors)), 4)}))


if __name__ == "__main__":
    main()
