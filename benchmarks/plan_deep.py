"""The smallest memory in which one step of GPT-2 124M on 64 x 512 tokens trains exactly, in three arms.

    python benchmarks/plan_deep.py [--data TEXT] [--out FOLDER] [--whole] [--arms plain,plimsoll,trainer]

- `plain`: the plain PyTorch loop. Its need exceeds most machines and is predicted; for a few smaller batches it is
  measured as well and compared with the prediction.
- `plimsoll`: `plan_job` gets an impossible budget and names the smallest possible one; its plan is then trained.
- `trainer`: Hugging Face Trainer with its exact options: gradient checkpointing, one sample at a time with
  accumulation, and the optimizer kernel that needs less memory (`adamw_torch`, `adamw_torch_fused`).

The last two train inside a limit on private memory (RLIMIT_DATA). `plimsoll.device.cpu.data_limit` sets it for both
after the imports, together with its heap settings. The limit is bisected until a step succeeds and slightly less fails.
An accumulated step needs no more memory after its second sample, so the bisection uses two steps of two samples; the
second step has the optimizer states. With ``--whole``, both arms also perform one whole step of 64 samples. Dropout is
on, and weights and samples are equal. Each arm draws different masks, so the first losses differ in the fourth digit or
less. Private memory (RssAnon) is measured from outside. Trainer needs `accelerate`; without it, its arm is skipped.

`plimsoll` is the step as `plimsoll train` sets it up, without the loader, checkpoints and the final model.

The text is Python's standard library by default; its tokens are from a BPE trained on it. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from _results import add_out, file_result
from plimsoll.device.process import private_bytes

MIB, GIB = 1 << 20, 1 << 30
VOCAB_SIZE, LENGTH, BATCH_SIZE, FEW = 50257, 512, 64, 2
PLAIN_SIZES = (2, 8)
IMPOSSIBLE_BYTES = 128 * MIB  # planned and found too small; smaller values are refused without a plan
TRAINER_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
LEARNING_RATE, CLIP_NORM = 1e-4, 1.0
_TEXT_BYTES, _POLL_SECONDS, _STEP_SHARE = 4 * MIB, 0.005, 0.04
_LONGEST_SECONDS = 3600


def job_of(batch_size: int) -> Any:
    from plimsoll.records.job import Job

    fields = {
        "model": {"architecture": "gpt2"}, "task": "language-modeling", "data": {"train": "nowhere.txt"},
        "tokenizer": {"train": "bpe", "vocab_size": VOCAB_SIZE}, "sequence_length": LENGTH, "batch_size": batch_size,
        "optimizer": {"name": "adamw", "lr": LEARNING_RATE, "clip_norm": CLIP_NORM}, "device": "cpu",
    }  # fmt: skip
    return Job.from_fields(fields)


def make_tokens(data: str | None, path: Path) -> None:
    """Write the ids of 64 samples of real text."""
    from tokenizers import ByteLevelBPETokenizer

    from demo import standard_library
    from plimsoll.data.text.sources import find_files

    text = ""
    for source in find_files(standard_library() if data is None else (data,)).files:
        text += Path(source.path).read_text("utf-8", errors="replace")
        if len(text) > _TEXT_BYTES:
            break
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(text.splitlines(keepends=True), vocab_size=VOCAB_SIZE, show_progress=False)
    ids = tokenizer.encode(text).ids[: BATCH_SIZE * LENGTH]
    np.save(path, np.asarray(ids, dtype=np.int64).reshape(BATCH_SIZE, LENGTH))


# -- one training, in a process of its own -----------------------------------------------------------------------------


def train_here(run: dict[str, Any]) -> None:
    """Train according to ``run``, and print a line of JSON for each step."""
    import torch
    import transformers  # noqa: F401  -- before the limit, like all imports

    ids = torch.from_numpy(np.load(run["tokens"])[: run["samples"]])
    {"plain": _train_plainly, "plimsoll": _train_planned, "trainer": _train_with_trainer}[run["arm"]](run, ids)


def _model(job: Any, **options: Any) -> Any:
    import torch

    from plimsoll.models.build import build_model

    torch.manual_seed(0)
    return build_model(job, VOCAB_SIZE, None, 0, **options).train()


def _say(loss: float, started: tuple[float, float]) -> tuple[float, float]:
    line = {"loss": loss, "seconds": time.perf_counter() - started[0], "cpu_seconds": time.process_time() - started[1]}
    print(json.dumps(line), flush=True)
    return _now()


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _train_plainly(run: dict[str, Any], ids: Any) -> None:
    import torch

    model = _model(job_of(run["samples"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    started = _now()
    for _ in range(run["steps"]):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        started = _say(loss.item(), started)


def _train_planned(run: dict[str, Any], ids: Any) -> None:
    from plimsoll.device.base import backend_for
    from plimsoll.device.mapped_memory import MappedPool
    from plimsoll.models import assemble  # noqa: F401  -- as a training process imports
    from plimsoll.models.optimizers import build_optimizer
    from plimsoll.planning.baseline import load_libraries
    from plimsoll.planning.lean_imports import leave_out_unused
    from plimsoll.records.plan import Choice
    from plimsoll.step.job_step import step_of
    from plimsoll.techniques.mechanisms.allocators import set_up_as_with, set_up_for_steps
    from plimsoll.techniques.mechanisms.building import builds_outside
    from plimsoll.training import loop  # noqa: F401

    job = job_of(run["samples"])
    leave_out_unused(job, is_own=True)
    load_libraries(job)
    _model(job, device="meta")  # imports the modules that the model needs
    choices = [Choice(**one) for one in run["choices"]]
    with backend_for("cpu").limited(run["limit_bytes"]):
        set_up_as_with(choices, "cpu")
        files = MappedPool() if builds_outside(choices, "cpu") else None
        model = _model(job, files=files)
        step = step_of(job, model, build_optimizer(job.optimizer, model.parameters()), [choices], files=files)
        set_up_for_steps(choices)
        started = _now()
        for _ in range(run["steps"]):
            result = step({"input_ids": ids, "labels": ids})
            if result.oom_events:
                raise MemoryError(result.oom_events[0].shortage)
            started = _say(result.loss, started)
        os._exit(0)  # skip uninstalling the techniques, which would load all states into memory


def _train_with_trainer(run: dict[str, Any], ids: Any) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from plimsoll.device.base import backend_for

    class Lines(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.started = _now()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if "loss" in logs:
                self.started = _say(logs["loss"], self.started)

    with tempfile.TemporaryDirectory() as folder, backend_for("cpu").limited(run["limit_bytes"]):
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=1, gradient_accumulation_steps=run["samples"],
            gradient_checkpointing=True, optim=run["optimizer"], learning_rate=LEARNING_RATE, weight_decay=0.01,
            max_grad_norm=CLIP_NORM, lr_scheduler_type="constant", max_steps=run["steps"], logging_steps=1,
            save_strategy="no", report_to=[], use_cpu=True, dataloader_pin_memory=False, disable_tqdm=True, seed=0,
        )  # fmt: skip
        samples = [{"input_ids": row, "labels": row} for row in ids]
        Trainer(_model(job_of(run["samples"])), arguments, train_dataset=samples, callbacks=[Lines()]).train()


# -- measuring ---------------------------------------------------------------------------------------------------------


def measured(run: dict[str, Any]) -> dict[str, Any] | None:
    """Run a training in a new process; return its output and peak, or None if memory runs out."""
    peak_bytes = 0
    with subprocess.Popen(
        [sys.executable, __file__, "--worker", json.dumps(run)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip

        def watch() -> None:
            nonlocal peak_bytes
            while child.poll() is None:
                try:
                    peak_bytes = max(peak_bytes, private_bytes(child.pid))
                except (OSError, ProcessLookupError):
                    return
                time.sleep(_POLL_SECONDS)

        watcher = threading.Thread(target=watch)
        watcher.start()
        output, errors = child.communicate(timeout=_LONGEST_SECONDS)
        watcher.join()
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"loss"')]
    said = (errors.strip().splitlines() or ["nothing"])[-1][:150]
    is_done = child.returncode == 0 and len(lines) == run["steps"]
    limit = f" in {run['limit_bytes'] / MIB:.0f} MiB" if "limit_bytes" in run else ""
    found = f"peak {peak_bytes / MIB:.0f} MiB, {lines[-1]['seconds']:.1f} s" if is_done else f"fails: {said}"
    print(f"{run['arm']}, {run['samples']} samples{limit}: {found}", file=sys.stderr, flush=True)
    return {"peak_bytes": peak_bytes, "steps": lines} if is_done else None


def smallest(run: dict[str, Any], fails_bytes: int, passes_bytes: int) -> tuple[int, dict[str, Any]]:
    """Bisect the limit to a relative width of `_STEP_SHARE`, after raising ``passes_bytes`` until training succeeds."""
    best = measured({**run, "limit_bytes": passes_bytes})
    while best is None:
        fails_bytes, passes_bytes = passes_bytes, int(1.05 * passes_bytes)
        best = measured({**run, "limit_bytes": passes_bytes})
    while passes_bytes - fails_bytes > _STEP_SHARE * passes_bytes:
        middle_bytes = (fails_bytes + passes_bytes) // 2
        found = measured({**run, "limit_bytes": middle_bytes})
        if found is None:
            fails_bytes = middle_bytes
        else:
            passes_bytes, best = middle_bytes, found
    return passes_bytes, best


def plain_arm(tokens: Path) -> dict[str, Any]:
    from plimsoll.planning.predict_job import predict_job

    def predicted_bytes(batch_size: int) -> int:
        return int(predict_job(job_of(batch_size), device="cpu").peak.likely_bytes)

    rows = []
    for size in PLAIN_SIZES:
        found = measured({"arm": "plain", "samples": size, "steps": 2, "tokens": str(tokens)})
        if found is not None:
            rows.append({"samples": size, "predicted_bytes": predicted_bytes(size), **found})
    return {"need_bytes": predicted_bytes(BATCH_SIZE), "smaller": rows}


def plimsoll_arm(tokens: Path, is_whole: bool) -> dict[str, Any]:
    from plimsoll.planning.plan import plan_job

    plan = plan_job(job_of(BATCH_SIZE), device="cpu", limit_bytes=IMPOSSIBLE_BYTES)
    said_bytes = plan.smallest_budget_bytes
    assert said_bytes is not None
    choices = [choice.model_dump() for choice in plan.choices]
    run = {"arm": "plimsoll", "samples": FEW, "steps": 2, "tokens": str(tokens), "choices": choices}
    limit_bytes, found = smallest(run, int(0.8 * said_bytes), said_bytes)
    return {
        "says_bytes": said_bytes, "choices": " ".join(map(str, plan.choices)), "smallest_bytes": limit_bytes,
        "few": found, "whole": measured({**run, "samples": BATCH_SIZE, "steps": 1, "limit_bytes": said_bytes})
        if is_whole else None,
    }  # fmt: skip


def trainer_arm(tokens: Path, is_whole: bool) -> dict[str, Any]:
    if importlib.util.find_spec("accelerate") is None:
        return {"reason": "`accelerate`, which Trainer needs, is not installed"}
    run = {"arm": "trainer", "samples": FEW, "steps": 2, "tokens": str(tokens)}
    kernels = {name: measured({**run, "optimizer": name, "limit_bytes": 8 * GIB}) for name in TRAINER_OPTIMIZERS}
    peaks = {name: one["peak_bytes"] for name, one in kernels.items() if one is not None}
    best = min(peaks, key=lambda name: peaks[name])
    run["optimizer"] = best
    limit_bytes, found = smallest(run, int(0.8 * peaks[best]), peaks[best])
    whole = measured({**run, "samples": BATCH_SIZE, "steps": 1, "limit_bytes": limit_bytes}) if is_whole else None
    return {"unlimited_bytes": peaks, "choices": f"gradient checkpointing, 1 sample at a time, {best}",
            "smallest_bytes": limit_bytes, "few": found, "whole": whole}  # fmt: skip


# -- the report --------------------------------------------------------------------------------------------------------


def report(found: dict[str, Any]) -> str:
    lines = []
    plain = found.get("plain")
    if plain:
        lines += ["| plain loop, samples | predicted | measured | error |", "| --: | --: | --: | --: |"]
        for row in plain["smaller"]:
            error = row["predicted_bytes"] / row["peak_bytes"] - 1
            predicted, peak = _gib(row["predicted_bytes"]), _gib(row["peak_bytes"])
            lines.append(f"| {row['samples']} | {predicted} | {peak} | {100 * error:+.1f} % |")
        lines.append(f"| {BATCH_SIZE} | {_gib(plain['need_bytes'])} | | |")
    lines += ["", "| one step of 64 x 512 tokens | with | smallest limit | of the plain loop | peak | seconds |",
              "| --- | --- | --: | --: | --: | --: |"]  # fmt: skip
    if plain:
        lines.append(f"| plain loop (predicted) | | {_gib(plain['need_bytes'])} | | | |")
    for name in ("trainer", "plimsoll"):
        arm = found.get(name)
        if arm and "reason" in arm:
            lines.append(f"| {name} | left out: {arm['reason']} | | | | |")
        elif arm:
            share = f"1 / {plain['need_bytes'] / arm['smallest_bytes']:.1f}" if plain else ""
            one = arm["whole"] or arm["few"]
            of = "" if arm["whole"] else f" ({FEW} samples)"
            lines.append(
                f"| {name} | {arm['choices']} | {_gib(arm['smallest_bytes'])} | {share} | {_gib(one['peak_bytes'])} | "
                f"{one['steps'][-1]['seconds']:.0f}{of} |"
            )
    return "\n".join(lines)


def first_losses(found: dict[str, Any]) -> dict[str, float]:
    """Return the losses of the first step with few samples."""
    losses = {name: found[name]["few"]["steps"][0]["loss"] for name in ("plimsoll", "trainer") if _has_few(found, name)}
    few = [row for row in found.get("plain", {}).get("smaller", []) if row["samples"] == FEW]
    return losses if not few else {**losses, "plain": few[0]["steps"][0]["loss"]}


def _has_few(found: dict[str, Any], name: str) -> bool:
    return "few" in found.get(name, {})


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def part_of(found: dict[str, Any]) -> str:
    """Return the part that pages show."""
    least = {
        name: _gib(found[name]["smallest_bytes"])
        for name in ("plimsoll", "trainer")
        if "smallest_bytes" in found.get(name, {})
    }
    if "plimsoll" not in least:
        return ""
    step = f"one step of GPT-2 124M on {BATCH_SIZE} x {LENGTH} tokens"
    text = f"- It finds the smallest memory: {step} in {least['plimsoll']}"
    if "trainer" in least:
        text += f", where Hugging Face Trainer needs {least['trainer']}"
    plain = found.get("plain")
    return text + (f"; the plain loop needs {_gib(plain['need_bytes'])} (predicted)." if plain else ".")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="text file, folder or pattern")
    add_out(parser)
    parser.add_argument("--whole", action="store_true", help="also run whole steps, which takes minutes")
    parser.add_argument("--arms", default="plain,plimsoll,trainer")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        train_here(json.loads(arguments.worker))
        return
    arms = arguments.arms.split(",")
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.npy"
        make_tokens(arguments.data, tokens)
        found = {
            **({"plain": plain_arm(tokens)} if "plain" in arms else {}),
            **({"plimsoll": plimsoll_arm(tokens, arguments.whole)} if "plimsoll" in arms else {}),
            **({"trainer": trainer_arm(tokens, arguments.whole)} if "trainer" in arms else {}),
        }
    losses = ", ".join(f"{name} {loss:.4f}" for name, loss in first_losses(found).items())
    text = f"{report(found)}\n\nLoss of the first step of {FEW} samples: {losses}."
    print(text)
    title = "The smallest memory for a step of GPT-2 124M"
    file_result(arguments.out, "plan-deep", title, text, part_of(found), threads=1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
