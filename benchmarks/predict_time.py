"""Time and memory of a prediction after the imports, compared with torch's own tracker on the same models.

    python benchmarks/predict_time.py [--rounds 3] [--out FOLDER]

Each arm runs in a separate process: three training steps on fake tensors with AdamW in float32 and the given batches.
`plimsoll` is the whole of `plimsoll.predict_job` for an RTX 3060 (an H100 for Qwen3): model, trace, allocator, record.
`MemTracker` is ``torch.distributed._tools.mem_tracker`` under ``FakeTensorMode``, with two steps as in its
documentation; it refuses a second call of the model, so its statistics are reset between them. Prints a table, and one
JSON object as the last line; ``--out`` files the table.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

from _results import add_out, file_result

CASES = {
    "GPT-2 124M, 32 x 128": ({"architecture": "gpt2"}, "language-modeling", 50257, 32, "rtx3060"),
    "BERT-base, 32 x 128": ({"architecture": "bert"}, "language-modeling", 30522, 32, "rtx3060"),
    "LSTM 2 x 512, 32 x 128": (
        {"architecture": "lstm", "embedding_size": 512, "hidden_size": 512, "num_layers": 2},
        "language-modeling", 20000, 32, "rtx3060",
    ),
    "Qwen3-4B, 1 x 128": (
        {
            "architecture": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
        },
        "language-modeling", 151936, 1, "h100",
    ),
}  # fmt: skip
SEQUENCE_LENGTH = 128
ARMS = ("plimsoll", "MemTracker")


def job_of(case: str):
    from plimsoll.records.job import Job

    model, task, vocab_size, batch_size, _ = CASES[case]
    fields = {
        "model": model, "task": task, "data": {"train": "nowhere.txt"}, "sequence_length": SEQUENCE_LENGTH,
        "batch_size": batch_size, "tokenizer": {"train": "bpe", "vocab_size": vocab_size},
    }  # fmt: skip
    return Job.from_fields(fields)


def run_arm(arm: str, case: str) -> None:
    """Run one arm in this process, and print its seconds and peak memory."""
    import torch
    import transformers  # noqa: F401

    from plimsoll.models.build import build_model, loss_of
    from plimsoll.planning.predict_job import predict_job

    job, device = job_of(case), CASES[case][4]
    if arm == "MemTracker":
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.distributed._tools.mem_tracker import MemTracker
    started, processor = time.perf_counter(), time.process_time()
    if arm == "plimsoll":
        peak_bytes = predict_job(job, device=device).peak.likely_bytes
    else:
        loss, _ = loss_of(job.task)
        with FakeTensorMode():
            model = build_model(job, CASES[case][2], None, 0).train()
            optimizer = torch.optim.AdamW(model.parameters())
            tracker = MemTracker()
            tracker.track_external(model, optimizer)
            with tracker:
                for step in range(2):
                    ids = torch.randint(1000, (job.batch_size, job.sequence_length))
                    loss(model, {"input_ids": ids, "labels": ids}).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if step == 0:
                        tracker.reset_mod_stats()
            peak_bytes = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    seconds, processor_seconds = time.perf_counter() - started, time.process_time() - processor
    memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps([seconds, processor_seconds, memory_bytes, peak_bytes]))


def measure(arm: str, case: str, rounds: int) -> dict[str, float] | None:
    """Run an arm ``rounds`` times; return None if it fails."""
    rows = []
    for _ in range(rounds):
        command = [sys.executable, __file__, "--arm", arm, "--case", case]
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        if child.returncode != 0:
            print(f"{arm} fails on {case}: {child.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            return None
        rows.append(json.loads(child.stdout.splitlines()[-1]))
    columns = list(zip(*rows, strict=True))
    return {
        "seconds": min(columns[0]),
        "seconds_most": max(columns[0]),
        "processor_seconds": statistics.median(columns[1]),
        "memory_gib": max(columns[2]) / 2**30,
        "peak_gib": columns[3][0] / 2**30,
    }


def table(found: dict[str, dict[str, dict[str, float] | None]]) -> str:
    lines = [
        "| training step | tool | seconds, best (worst) | processor seconds | host memory | says |",
        "| --- | --- | --: | --: | --: | --: |",
    ]
    for case, arms in found.items():
        for arm, row in arms.items():
            cells = (
                "fails | | | "
                if row is None
                else f"{row['seconds']:.1f} ({row['seconds_most']:.1f}) | {row['processor_seconds']:.1f} | "
                f"{row['memory_gib']:.2f} GiB | {row['peak_gib']:.2f} GiB"
            )
            lines.append(f"| {case} | {arm} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", help="ignored")
    add_out(parser)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        run_arm(arguments.arm, arguments.case)
        return
    found = {case: {arm: measure(arm, case, arguments.rounds) for arm in ARMS} for case in CASES}
    text = (
        "Seconds after the imports; memory is the process's largest, libraries included. MemTracker's answer is live "
        f"bytes only, of the CPU's kernels.\n\n{table(found)}"
    )
    print(text)
    ours = {case: row for case, arms in found.items() if (row := arms["plimsoll"]) is not None}
    said = "{processor_seconds:.1f} s for {case} ({memory_gib:.2f} GiB)"
    listed = [said.format(case=case, **row) for case, row in ours.items()]
    part = f"Seconds of the processor (after the imports) and memory of a prediction: {', '.join(listed)}."
    file_result(arguments.out, "predict-time", "Time to predict", text, part)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
