"""Predicted memory of recurrent trainings, compared with the private memory of their processes.

    PYTHONPATH=src python benchmarks/recurrent_prediction.py [--case gru] [--out table.md] [--measured measured.json]

The cases are LSTM, GRU and plain RNN without any technique. They have one or two layers and one or both directions.
They are padded, packed, projected, with dropout, or under bfloat16 autocast, from 32 to 4,000 steps, as language models
and classifiers. Each trains for four steps on random tokens in a separate process: inside a budget and, with
``--default-malloc``, also without one. Measurement and prediction are as in `predict_cpu_rss.py`.

``--measured`` stores measurements in a file and reuses them, for work on the predictor. The last line is one JSON
object. Not covered: CUDA, data loading, checkpoints, evaluation, states carried from batch to batch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from _results import add_out, errors_table, file_result
from predict_cpu_rss import (
    LARGE,
    TWO,
    Case,
    Measurements,
    Predictor,
    Row,
    cells_of,
    figures_of,
    lines_of,
    recurrent,
    row_of,
)

HERE = Path(__file__).parent
BF16 = {"precision": "bf16"}


def own(name: str) -> str:
    """Return the reference to a model of `_recurrent_models`."""
    return f"_recurrent_models:{name}"


CASES = (
    # Language models: oneDNN computes an LSTM; the others are a loop of small ops.
    Case("lstm-1x256-T32", recurrent("lstm", 1, 256), (128, 32)),
    Case("lstm-2x256-T512", recurrent("lstm", 2, 256), (16, 512), vocab_size=2000),
    Case("lstm-1x256-T4000", recurrent("lstm", 1, 256), (4, 4000), vocab_size=500),
    Case("lstm-2x512-dropout-T256", recurrent("lstm", 2, 512, dropout=0.2), (32, 256), vocab_size=1000),
    Case("lstm-1x256-50k", recurrent("lstm", 1, 256), (8, 128), vocab_size=50257),
    Case("lstm-2x256-bf16-T512", recurrent("lstm", 2, 256), (16, 512), vocab_size=1000, **BF16),
    Case("lstm-2x256-projected-T512", own("lstm_projected"), (16, 512), vocab_size=500),
    Case("gru-1x256-T32", recurrent("gru", 1, 256), (128, 32), vocab_size=2000),
    Case("gru-2x256-dropout-T256", recurrent("gru", 2, 256, dropout=0.2), (16, 256), vocab_size=1000),
    Case("gru-1x256-T2000", recurrent("gru", 1, 256), (4, 2000), vocab_size=500),
    Case("gru-1x256-30k", recurrent("gru", 1, 256), (16, 128), **LARGE),
    Case("gru-2x256-bf16-T256", recurrent("gru", 2, 256), (16, 256), vocab_size=1000, **BF16),
    Case("rnn-1x256-T32", recurrent("rnn", 1, 256), (256, 32), vocab_size=2000),
    Case("rnn-2x256-T512", recurrent("rnn", 2, 256), (16, 512), vocab_size=1000),
    Case("rnn-1x256-T4000", recurrent("rnn", 1, 256), (4, 4000), vocab_size=500),
    Case("rnn-2x256-bf16-T512", recurrent("rnn", 2, 256), (16, 512), vocab_size=1000, **BF16),
    # Classifiers of padded batches, bidirectional.
    Case("lstm-2x256-both-ways-T256", own("lstm_both_ways"), (32, 256), **TWO),
    Case("lstm-2x256-both-ways-T2000", own("lstm_both_ways"), (4, 2000), **TWO),
    Case("lstm-2x256-both-ways-bf16", own("lstm_both_ways"), (32, 256), **TWO, **BF16),
    Case("gru-2x256-both-ways-T256", own("gru_both_ways"), (16, 256), **TWO),
    Case("rnn-relu-1x256-both-ways-T512", own("rnn_relu_both_ways"), (16, 512), **TWO),
    # Packed batches, which no kernel of oneDNN supports: the LSTM is a loop, too.
    Case("lstm-packed-1x256-T128", recurrent("lstm", 1, 256), (64, 128), **TWO),
    Case("lstm-packed-2x256-both-ways-T256", recurrent("lstm", 2, 256, bidirectional=True), (16, 256), **TWO),
    Case("lstm-packed-1x256-bf16", recurrent("lstm", 1, 256), (64, 128), **TWO, **BF16),
    Case("lstm-packed-1x256-uneven", own("lstm_packed"), (64, 256), **TWO),
    Case("lstm-packed-2x256-both-ways-uneven", own("lstm_packed_both_ways"), (16, 256), **TWO),
    Case("lstm-packed-1x256-projected-uneven", own("lstm_packed_projected"), (64, 128), **TWO),
    Case("gru-packed-1x256-both-ways-T256", recurrent("gru", 1, 256, bidirectional=True), (32, 256), **TWO),
    Case("gru-packed-1x256-both-ways-uneven", own("gru_packed_both_ways"), (32, 256), **TWO),
    Case("rnn-packed-1x256-T256", recurrent("rnn", 1, 256), (64, 256), **TWO),
)


def run(cases: list[Case], is_limited: bool, measurements: Measurements, predictor: Predictor) -> list[Row]:
    """Predict and measure each case, and print it."""
    rows = []
    for case in cases:
        rows.append(row_of(case, is_limited, measurements, predictor))
        print("  " + "  ".join(cells_of(rows[-1])), flush=True)
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="only cases whose name contains this")
    parser.add_argument(
        "--default-malloc", action="store_true", help="also without a limit, with glibc's default malloc"
    )
    add_out(parser)
    parser.add_argument("--measured", type=Path, help="file that stores the measurements")
    arguments = parser.parse_args()
    cases = [case for case in CASES if not arguments.case or any(part in case.name for part in arguments.case)]
    if not cases:
        sys.exit(
            f"no case has {' or '.join(arguments.case)} in its name: choose from {', '.join(c.name for c in CASES)}"
        )
    # For models that are named by a function, here and in the processes.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    measurements, predictor = Measurements(arguments.measured), Predictor()
    rows = {"inside a budget": run(cases, True, measurements, predictor)}
    if arguments.default_malloc:
        rows["without a limit: glibc's own malloc"] = run(cases, False, measurements, predictor)
    part = errors_table(
        ("private memory of recurrent nets on the CPU inside a budget", [row.error for row in rows["inside a budget"]])
    )
    title = "Predicted and measured private memory of recurrent CPU trainings"
    file_result(arguments.out, "recurrent-prediction", title, "\n".join(lines_of(rows)), part)
    figures = [figures_of(body) for body in rows.values()]
    worst = max(rows["inside a budget"], key=lambda row: abs(row.error))
    print(json.dumps({**figures[0], "worst": worst.name, **({"default_malloc": figures[1]} if figures[1:] else {})}))


if __name__ == "__main__":
    main()
