"""The planner's time model on this CPU: predicted and measured order of two plans.

    python benchmarks/plan_time_model.py [--steps 3] [--only gpt2] [--out FOLDER]

A case is a model with a batch; its variants are sets of techniques with a micro-batch. Each variant is dry-run, its
step time predicted, and then it is really run with the block sizes of a budget (mapped from 4 MiB). Everything uses one
thread and processor seconds, so that other programs do not decide which of two is faster. If two variants of a case
differ by more than 7 %, the model should predict the right order. The data are random tokens. Prints a table, and one
JSON object as the last line; ``--out`` files the table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
import transformers

from _results import add_out, file_result
from plimsoll.data.quick_facts import TextSketch
from plimsoll.device.cpu.heap import FAST_BYTES, map_blocks_from
from plimsoll.device.speed import measured_speed
from plimsoll.errors import PlimsollError
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.predict import count_on_cpu
from plimsoll.models.build import build_model
from plimsoll.models.optimizers import build_optimizer
from plimsoll.planning.dry_run.step import _batch, dry_run_job, dry_run_samples
from plimsoll.planning.search.time_model import step_duration
from plimsoll.records.allocator import FAST_HEAP
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.records.prediction import Estimate
from plimsoll.step.job_step import step_of

SMALL = {"n_layer": 4, "n_embd": 256, "n_head": 4}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ALL = Choice(technique="checkpointing", options={"blocks": "all"})
HALF = Choice(technique="checkpointing", options={"blocks": "every 2"})
CHUNKED = Choice(technique="chunked_loss", options={"chunk_tokens": 1024})
SMALL_CHUNKS = Choice(technique="chunked_loss", options={"chunk_tokens": 256})
SHORT_SEGMENTS = Choice(technique="time_segments", options={"steps": 64})
LONG_SEGMENTS = Choice(technique="time_segments", options={"steps": 256})
OFFLOAD = Choice(technique="optimizer_offload", options={"to": "disk"})
FOREACH = Choice(technique="optimizer_kernel", options={"kernel": "foreach"})
FUSED = Choice(technique="optimizer_kernel", options={"kernel": "fused"})

# model, task, vocabulary, sequence length, batch, micro-batches, techniques in addition to the micro-batch
CASES = {
    "GPT-2 4 x 256": (
        {"architecture": "gpt2", **SMALL}, "language-modeling", 8000, 128, 16, (16, 4, 1),
        ((), (ALL,), (HALF,), (CHUNKED,), (OFFLOAD,), (FUSED,)),
    ),
    "GPT-2 4 x 256, no dropout, 256 tokens": (
        {"architecture": "gpt2", **SMALL, **NO_DROPOUT}, "language-modeling", 8000, 256, 16, (16, 2),
        ((), (ALL,), (CHUNKED,)),
    ),
    "GPT-2 12 x 768": (
        {"architecture": "gpt2"}, "language-modeling", 50257, 128, 4, (4, 1),
        ((), (ALL,), (CHUNKED,), (OFFLOAD,), (FUSED,)),
    ),
    "BERT 4 x 256, classifier": (
        {"architecture": "bert", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
         "intermediate_size": 1024},
        "classification", 8000, 128, 32, (32, 2), ((), (ALL,), (OFFLOAD,)),
    ),
    "T5 3 + 3 x 256": (
        {"architecture": "t5", "num_layers": 3, "d_model": 256, "d_ff": 1024, "num_heads": 4, "d_kv": 64},
        "seq2seq", 8000, 128, 16, (16, 2), ((), (ALL,)),
    ),
    "LSTM 2 x 256, 50k vocabulary": (
        {"architecture": "lstm", "embedding_size": 256, "hidden_size": 256, "num_layers": 2}, "language-modeling",
        50000, 64, 16, (16, 4), ((), (CHUNKED,), (OFFLOAD,), (FUSED,)),
    ),
    "GRU 2 x 256, classifier": (
        {"architecture": "gru", "embedding_size": 256, "hidden_size": 256, "num_layers": 2}, "classification", 8000,
        128, 32, (32, 8), ((),),
    ),
    "LSTM 2 x 256, 1,024 tokens": (
        {"architecture": "lstm", "embedding_size": 256, "hidden_size": 256, "num_layers": 2}, "language-modeling", 8000,
        1024, 8, (8, 4, 2, 1), ((SMALL_CHUNKS,), (SMALL_CHUNKS, SHORT_SEGMENTS), (SMALL_CHUNKS, LONG_SEGMENTS)),
    ),
}  # fmt: skip
WORTH_TELLING = 0.07


def job_of(case: str) -> tuple[Job, TextSketch]:
    model, task, vocab_size, length, batch_size, *_ = CASES[case]
    fields = {
        "model": model, "task": task, "data": {"train": "nowhere.txt"}, "sequence_length": length,
        "batch_size": batch_size, "tokenizer": {"train": "bpe", "vocab_size": vocab_size},
    }  # fmt: skip
    return Job.from_fields(fields), TextSketch(vocab_size, 2 if task == "classification" else None, 0)


def predict(job: Job, texts: TextSketch, choices: tuple[Choice, ...], micro_batch: int, speed) -> float:
    trace = dry_run_job(job, texts, CpuLowering(), choices, is_short=True)
    samples = dry_run_samples(job.batch_size, micro_batch)
    counted = count_on_cpu(trace, Estimate(likely_bytes=0, low_bytes=0, high_bytes=0), FAST_HEAP)
    duration = step_duration(
        counted, speed, batch_size=job.batch_size, micro_batch=micro_batch, dry_run_samples=samples
    )
    return duration.likely_seconds


def measure(job: Job, texts: TextSketch, choices: tuple[Choice, ...], steps: int) -> float:
    torch.manual_seed(0)
    model = build_model(job, *texts.of_model).train()
    step = step_of(job, model, build_optimizer(job.optimizer, model.parameters()), [choices])
    batch, seconds = _batch(job, texts, job.batch_size, job.sequence_length), []
    for _ in range(steps + 1):
        started = time.process_time()
        step(batch)
        seconds.append(time.process_time() - started)
    return statistics.median(seconds[1:])


def run_case(case: str, steps: int, speed, known: dict[tuple[str, str], float]) -> list[dict]:
    job, texts = job_of(case)
    rows = []
    for techniques, micro_batch in itertools.product(CASES[case][6], CASES[case][5]):
        choices = (*techniques, micro_batch_choice(micro_batch))
        name = " ".join(map(str, choices))
        if known and (case, name) not in known:
            continue
        try:
            predicted = predict(job, texts, choices, micro_batch, speed)
            measured = known.get((case, name)) or measure(job, texts, choices, steps)
        except PlimsollError as error:  # a technique may refuse a model: it is reported and skipped
            print(f"{case}: {name}: {error}", file=sys.stderr)
            continue
        rows.append({"case": case, "variant": name, "predicted": predicted, "measured": measured})
        print(f"{case}: {name}: {predicted:.3f} s predicted, {measured:.3f} s measured", file=sys.stderr)
    return rows


def judge(rows: list[dict]) -> dict:
    """Compute how often the faster of two variants is predicted, and the errors of the step times."""
    right, wrong, lost = 0, [], 0.0
    for first, second in itertools.combinations(rows, 2):
        if first["case"] != second["case"]:
            continue
        fast, slow = sorted((first, second), key=lambda row: row["measured"])
        if slow["measured"] < fast["measured"] * (1 + WORTH_TELLING):
            continue
        if fast["predicted"] < slow["predicted"]:
            right += 1
        else:
            wrong.append((fast["variant"], slow["variant"]))
    for case in dict.fromkeys(row["case"] for row in rows):
        group = [row for row in rows if row["case"] == case]
        chosen = min(group, key=lambda row: row["predicted"])
        lost = max(lost, chosen["measured"] / min(row["measured"] for row in group) - 1)
    errors = [abs(math.log(row["predicted"] / row["measured"])) for row in rows]
    return {
        "variants": len(rows), "pairs": right + len(wrong), "rank_agreement": right / max(right + len(wrong), 1),
        "median_ratio_error": math.exp(statistics.median(errors)) - 1, "worst_ratio_error": math.exp(max(errors)) - 1,
        "worst_loss_of_the_choice": lost, "wrong": wrong,
    }  # fmt: skip


def report(rows: list[dict], found: dict) -> str:
    lines = ["| model | variant | predicted | measured | ratio |", "| --- | --- | --: | --: | --: |"]
    lines += [
        f"| {row['case']} | {row['variant']} | {row['predicted']:.3f} s | {row['measured']:.3f} s | "
        f"{row['predicted'] / row['measured']:.2f} |"
        for row in rows
    ]
    pairs, told = f"{found['pairs']} pairs of variants of one model", f"{found['rank_agreement']:.1%}"
    error, worst = f"{found['median_ratio_error']:.0%}", f"{found['worst_ratio_error']:.0%}"
    return (
        f"Of {pairs} that differ by more than {WORTH_TELLING:.0%}, the faster was told in {told}. A step was off by "
        f"{error} in the median and {worst} at worst. The variant predicted to be fastest took at most "
        f"{found['worst_loss_of_the_choice']:.0%} longer than the fastest one.\n\n" + "\n".join(lines) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each variant")
    parser.add_argument("--only", default="", help="only cases whose names contain this")
    parser.add_argument("--data", help="ignored: the data are random tokens")
    add_out(parser)
    parser.add_argument(
        "--again", type=Path, help="file with the last line of an earlier run, whose measured steps are predicted again"
    )
    arguments = parser.parse_args()
    earlier = json.loads(arguments.again.read_text("utf-8"))["rows"] if arguments.again else []
    known = {(row["case"], row["variant"]): row["measured"] for row in earlier}
    torch.set_num_threads(1)
    map_blocks_from(FAST_BYTES)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    speed = measured_speed()
    rows = [row for case in CASES if arguments.only in case for row in run_case(case, arguments.steps, speed, known)]
    found = judge(rows)
    text = report(rows, found)
    print(text)
    file_result(arguments.out, "plan-time-model", "The planner's time model", text, threads=1)
    print(json.dumps({**found, "rows": rows}))


if __name__ == "__main__":
    main()
