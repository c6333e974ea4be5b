"""The planner's time model, compared with recorded step times of GPUs; predicted without a GPU.

    python benchmarks/plan_time_gpu.py [--only gpt2] [--hold-out] [--out FOLDER]
    python benchmarks/plan_time_gpu.py --replay [--limits 4 8] [--out FOLDER]

The rows are from `benchmarks/recorded` (README there): forward and backward of one micro-batch in plain PyTorch,
updates, and steps of one job by hand and with techniques. Recordings of `make gpu` on any GPU are included. Each row is
dry-run with the kernels of its GPU, and predicted as `plimsoll plan` would for that GPU, with the speed from the table.
Errors are relative errors of seconds. If two settings of a job differ by more than 10 %, the model should predict the
right order. For forward and backward, the job is the model in one precision, and the time per sample counts.

``--hold-out`` selects the costs of calls from a grid, each time without one model, and predicts that model.
``--replay`` plans the job of the grid at limits from 1.2 to 32 GiB, and compares each plan with the fastest recorded
setting that fits. Recorded plans have their recorded time, others the predicted time.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu import files, part_job
from benchmarks.gpu.cases import Case

from _results import add_out, check_only, file_result, keep_printed, quantile, table
from plimsoll.data.quick_facts import TextSketch
from plimsoll.device.cuda.gpus import find_gpu, spec_of
from plimsoll.device.speed import speed_of
from plimsoll.memory.predict import count_on_cuda
from plimsoll.memory.trace import DryRun, dry_run
from plimsoll.models.workload import model_loss
from plimsoll.planning.dry_run.step import dry_run_samples, dry_run_step
from plimsoll.planning.plan import planner_of
from plimsoll.planning.search.time_model import step_duration
from plimsoll.planning.targets import gpu_target
from plimsoll.records.device import Device, DeviceSpec, MemoryUse
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice
from plimsoll.records.speed import Speed
from plimsoll.records.trace import Phase, Trace
from plimsoll.techniques import in_order, technique_of

RECORDED = Path(__file__).parent / "recorded"
ROWS, GRID = RECORDED / "h200-times-torch2.11.0.json.gz", RECORDED / "h200-gpt2-grid-torch2.11.0.csv"
CARD = find_gpu("H200")
SPEED = speed_of(CARD)
OUTSIDE_BYTES = 502 << 20  # memory of the recorded processes outside the allocator
WORTH_TELLING = 0.1
MENDED = "layer_streaming"  # recorded with code that was slower than the current code (README there)
LIMITS_GIB = (1.2, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
CALLS = [(module * 1e-6, backward * 1e-6) for module in range(22, 59, 4) for backward in range(8, 27, 2)]

# model, vocabulary
MODELS: dict[str, tuple[Callable[[], torch.nn.Module], int]] = {
    "gpt2-124m": (lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config()), 50257),
    "bert-base": (lambda: transformers.BertForMaskedLM(transformers.BertConfig()), 30522),
    "t5-small": (
        lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(
            d_model=512, d_ff=2048, num_layers=6, num_heads=8, decoder_start_token_id=0)),
        32128,
    ),
    "llama-1b-gqa": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_attention_heads=32,
            num_key_value_heads=8)),
        32000,
    ),
    "qwen3-0.6b": (
        lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
            vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)),
        151936,
    ),
}  # fmt: skip
OPTIONS = {
    "micro_batch": "samples", "checkpointing": "blocks", "optimizer_offload": "to", "activation_offload": "to",
    "chunked_loss": "chunk_tokens", "optimizer_kernel": "kernel", "layer_streaming": "blocks", "cuda_graph": "",
}  # fmt: skip
KERNELS = {"foreach": {}, "fused": {"fused": True}, "loop": {"foreach": False}}
BATCH_SIZE, VOCABULARY, LENGTH = 64, 8000, 512
JOB = Job.from_fields({
    "model": {"architecture": "gpt2", "n_positions": LENGTH}, "data": {"train": "nowhere.txt"},
    "tokenizer": {"train": "bpe", "vocab_size": VOCABULARY}, "sequence_length": LENGTH, "batch_size": BATCH_SIZE,
    "precision": "bf16", "optimizer": {"name": "adamw", "lr": 3e-4, "clip_norm": 1.0},
})  # fmt: skip
TEXTS = TextSketch(VOCABULARY, None, 0)


@dataclass(frozen=True)
class Row:
    """One recorded time. The settings of a ``group`` do the same work in ``samples`` steps, and can be compared."""

    kind: str
    group: str
    setting: str
    seconds: float
    samples: int
    fields: dict
    card: DeviceSpec = CARD
    speed: Speed = SPEED

    @property
    def task(self) -> tuple:
        """The inputs of the dry run with the GPU and its speed; equal for rows that share a dry run."""
        return (self.card.model_dump_json(), self.speed.to_json(), *self._in_dry_run)

    @property
    def _in_dry_run(self) -> tuple:
        if self.kind == "forward and backward":
            names = ("model", "precision", "checkpointing", "micro", "length")
            return ("passes", *(self.fields[name] for name in names))
        if self.kind == "update":
            return ("update", self.fields["model"], self.setting)
        if "techniques" in self.fields:
            return ("step", tuple(Choice(**one) for one in self.fields["techniques"]), False)
        is_plain = self.kind == "step by hand" and "checkpointing" in self.setting  # it switches the cache off
        return ("step", choices_of(self.fields["choices"]), not is_plain)

    @property
    def name(self) -> str:
        return f"{self.group} {self.setting}"


# -- what was recorded -------------------------------------------------------------------------------------------------


def recorded_rows() -> list[Row]:
    recorded = json.loads(gzip.decompress(ROWS.read_bytes()))["rows"]
    rows = [row for fields in recorded if "error" not in fields for row in rows_of(fields)]
    rows += [grid_row(fields) for fields in csv.DictReader(GRID.read_text("utf-8").splitlines())]
    return rows + [row for path in files.recordings() for row in rows_of_recording(files.read_recording(path))]


def rows_of_recording(recording: dict) -> Iterator[Row]:
    """Yield the steps of the job, by hand and as planned, that `make gpu` has recorded."""
    for fields in recording["runs"]:
        if fields["kind"] in {"planned", "technique"} and "step_seconds" in fields:
            yield planned_row(fields, recording)
        elif fields.get("case") and part_job.is_by_hand(fields) and fields["status"] == "ok":
            yield by_hand_row(fields, recording)


def by_hand_row(fields: dict, recording: dict) -> Row:
    words = part_job.setting_of(Case.from_dict(fields["case"]))
    group = f"the job by hand, {recording['header']['device']}"
    return Row("step by hand", group, words, part_job.seconds_of(fields), 1, {**fields, "choices": words},
               *card_and_speed(recording))  # fmt: skip


def planned_row(fields: dict, recording: dict) -> Row:
    group = f"the job, {recording['header']['device']}"
    seconds = part_job.seconds_of(fields)
    return Row("step with techniques", group, fields["choices"], seconds, 1, fields, *card_and_speed(recording))


def card_and_speed(recording: dict) -> tuple[DeviceSpec, Speed]:
    """Return a GPU and its speed, as measured by Plimsoll in the same session or as listed in the table."""
    card = card_of(recording["header"])
    measured = next((row["speed"] for row in recording["runs"] if row["kind"] == "speed"), None)
    return card, Speed.from_json(json.dumps(measured)) if measured else speed_of(card)


def card_of(header: dict) -> DeviceSpec:
    """Return Plimsoll's specification of a recorded GPU."""
    total_bytes = header["total_bytes"]
    device = Device(
        name=header["device"], kind="cuda", capacity_bytes=total_bytes, free_bytes=total_bytes,
        hardware_bytes=total_bytes, use=MemoryUse(used_bytes=0, peak_bytes=0, reserved_bytes=0),
        num_cores=header["num_sms"], architecture="sm_" + "".join(map(str, header["capability"])),
    )  # fmt: skip
    return spec_of(device)


def rows_of(fields: dict) -> Iterator[Row]:
    if fields["kind"] == "plain":
        setting = f"micro_batch={fields['micro']}" + " + checkpointing" * fields["checkpointing"]
        group = f"{fields['model']} {fields['precision']}"
        yield Row("forward and backward", group, setting, fields["seconds"], fields["micro"], fields)
    if fields["kind"] == "technique":
        seconds = statistics.median(fields["step_seconds"][1:])
        yield Row("step with techniques", "the job", fields["choices"], seconds, 1, fields)
    if fields["kind"] == "update":
        yield Row("update", f"{fields['model']} AdamW", fields["optimizer"], fields["seconds"], 1, fields)


def grid_row(fields: dict) -> Row:
    words = f"micro_batch={fields['micro_batch']}"
    if fields["checkpointing"] != "none":
        words += f" + checkpointing={fields['checkpointing']}"
    return Row("step by hand", "the job by hand", words, float(fields["step_seconds"]), 1, {**fields, "choices": words})


def choices_of(words: str) -> tuple[Choice, ...]:
    pairs = (word.partition("=")[::2] for word in words.split(" + "))
    values = [(name, int(value) if value.isdecimal() else value) for name, value in pairs]
    return in_order(
        tuple(Choice(technique=name, options={OPTIONS[name]: value} if value else {}) for name, value in values)
    )


# -- what is predicted -------------------------------------------------------------------------------------------------


def predict(task: tuple, speeds: Iterable[Speed] | None = None) -> list[float]:
    """Return the seconds for each speed from one dry run; without speeds, for the row's own speed."""
    card = DeviceSpec.model_validate_json(task[0])
    trace, batch_size, micro_batch = traced(card, *task[2:])
    counted, samples = count_on_cuda(trace, card, card.capacity_bytes), dry_run_samples(batch_size, micro_batch)
    sizes = {"batch_size": batch_size, "micro_batch": micro_batch, "dry_run_samples": samples}
    return [step_duration(counted, speed, **sizes).likely_seconds for speed in speeds or [Speed.from_json(task[1])]]


def traced(card: DeviceSpec, kind: str, *what: Any) -> tuple[Trace, int, int]:
    """Return the trace of a task, and the samples of a step and of a pass; its last step resembles the timed ones."""
    if kind == "passes":
        return trace_loop(card, lambda place, say: passes(place, say, *what)), what[3], what[3]
    if kind == "update":
        return trace_loop(card, lambda place, say: updates(place, say, *what)), 1, 1
    choices, use_cache = what
    samples = next(int(one.options["samples"]) for one in choices if one.technique == "micro_batch")
    return steps(card, choices, use_cache), BATCH_SIZE, samples


def steps(card: DeviceSpec, choices: tuple[Choice, ...], use_cache: bool) -> Trace:
    """Trace two steps of the job's model as recorded: with a key-value cache, which a normal job does not fill."""
    model = job_model()
    model.config.use_cache = use_cache
    tokens = torch.arange(BATCH_SIZE * LENGTH).view(BATCH_SIZE, LENGTH) * 7919 % (VOCABULARY - 2) + 1
    return dry_run_step(
        model, torch.optim.AdamW(model.parameters(), lr=3e-4), {"input_ids": tokens, "labels": tokens}, model_loss,
        gpu_target(card, None).lowering(), units="next-tokens", choices=choices, clip_norm=1.0, precision="bf16",
        is_short=True,
    )  # fmt: skip


@cache
def job_model() -> transformers.GPT2LMHeadModel:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH)).train()


def trace_loop(card: DeviceSpec, train: Callable[[DryRun, Callable[[Phase], None]], None]) -> Trace:
    phases: list[Phase] = ["setup"]
    with dry_run(gpu_target(card, None).lowering(), lambda: phases[-1]) as place:
        train(place, phases.append)
        return place.trace()


def passes(
    place: DryRun, say: Callable[[Phase], None], name: str, precision: str, checkpointing: bool, micro: int,
    length: int,
) -> None:  # fmt: skip
    """Run forward and backward twice; the second time, gradients exist."""
    build, vocabulary = MODELS[name]
    model = build().to("cuda").train()
    if checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    tokens = torch.arange(micro * length).view(micro, length) * 7919 % (vocabulary - 2) + 1
    tokens = place.fake_batch(tokens).to("cuda")
    for step in (1, 2):
        place.recorder.step = step
        say("forward")
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(input_ids=tokens, labels=tokens).loss
        say("backward")
        loss.backward()
        del loss


def updates(place: DryRun, say: Callable[[Phase], None], name: str, kernel: str) -> None:
    """Run two updates; the first creates the states."""
    model = MODELS[name][0]().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **KERNELS[kernel])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    say("optimizer")
    for step in (1, 2):
        place.recorder.step = step
        optimizer.step()


def settle() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()


def predicted_of(rows: list[Row], num_processes: int, speeds: Iterable[Speed] = ()) -> list[list[float]]:
    tasks = list(dict.fromkeys(row.task for row in rows))
    with multiprocessing.get_context("spawn").Pool(num_processes, settle) as pool:
        found = pool.starmap(predict, [(task, tuple(speeds)) for task in tasks], chunksize=1)
    of_task = dict(zip(tasks, found, strict=True))
    return [of_task[row.task] for row in rows]


# -- figures -----------------------------------------------------------------------------------------------------------


def figures_of(rows: list[Row], predicted: list[float]) -> dict:
    """Compute the errors, and how often the faster of two settings is predicted."""
    errors = [abs(seconds / row.seconds - 1) for row, seconds in zip(rows, predicted, strict=True)]
    right, wrong = 0, []
    for (first, ours), (second, others) in itertools.combinations(zip(rows, predicted, strict=True), 2):
        if first.group != second.group:
            continue
        pairs = [(row.seconds / row.samples, seconds / row.samples, row.setting)
                 for row, seconds in ((first, ours), (second, others))]  # fmt: skip
        fast, slow = sorted(pairs)
        if slow[0] < fast[0] * (1 + WORTH_TELLING):
            continue
        if fast[1] < slow[1]:
            right += 1
        else:
            wrong.append(f"{first.group}: {fast[2]} before {slow[2]}")
    return {
        "rows": len(rows), "median": statistics.median(errors), "p90": quantile(errors, 0.9), "worst": max(errors),
        "pairs": right + len(wrong), "told": right / max(right + len(wrong), 1), "wrong": wrong,
    }  # fmt: skip


def figures_by_kind(rows: list[Row], predicted: list[float]) -> dict[str, dict]:
    pairs = list(zip(rows, predicted, strict=True))
    kinds = dict.fromkeys(row.kind for row in rows)
    by_kind = {kind: [pair for pair in pairs if pair[0].kind == kind] for kind in kinds}
    by_kind |= {"all": pairs, f"all but {MENDED}": [pair for pair in pairs if MENDED not in pair[0].setting]}
    return {kind: figures_of(*map(list, zip(*chosen, strict=True))) for kind, chosen in by_kind.items() if chosen}


def summary(found: dict[str, dict]) -> str:
    return table(
        ("recorded", "rows", "median error", "90 % within", "worst", "pairs", "faster one told"),
        [
            (kind, one["rows"], *(f"{one[name]:.1%}" for name in ("median", "p90", "worst")), one["pairs"],
             f"{one['told']:.1%}" if one["pairs"] else "-")
            for kind, one in found.items()
        ],
    )  # fmt: skip


def row_table(rows: list[Row], predicted: list[float]) -> str:
    lines = [(row.name, f"{row.seconds * 1e3:.1f}", f"{seconds * 1e3:.1f}", f"{seconds / row.seconds:.2f}")
             for row, seconds in zip(rows, predicted, strict=True)]  # fmt: skip
    return table(("row", "recorded ms", "predicted ms", "ratio"), lines)


def passes_of(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.kind == "forward and backward"]


def held_out(rows: list[Row], num_processes: int) -> tuple[str, dict]:
    """Select the costs of calls on all models except one, and predict that model."""
    rows = passes_of(rows)
    speeds = [SPEED.model_copy(update={"module_op_seconds": module, "backward_op_seconds": backward})
              for module, backward in CALLS]  # fmt: skip
    ratios = [[seconds / row.seconds for seconds in of_row]
              for row, of_row in zip(rows, predicted_of(rows, num_processes, speeds), strict=True)]  # fmt: skip
    lines, errors = [], []
    for model in dict.fromkeys(row.fields["model"] for row in rows):
        is_out = [row.fields["model"] == model for row in rows]
        kept = [of_row for of_row, out in zip(ratios, is_out, strict=True) if not out]
        best = min(range(len(CALLS)), key=lambda one: sum(abs(of_row[one] - 1) for of_row in kept))
        found = [abs(of_row[best] - 1) for of_row, out in zip(ratios, is_out, strict=True) if out]
        errors += found
        module, backward = (f"{seconds * 1e6:.0f}" for seconds in CALLS[best])
        lines.append((model, module, backward, len(found), f"{statistics.median(found):.1%}", f"{max(found):.1%}"))
    heads = ("left out", "module op, us", "backward op, us", "rows", "median error", "worst")
    return table(heads, lines), {"median": statistics.median(errors), "p90": quantile(errors, 0.9)}


# -- replaying the planner ---------------------------------------------------------------------------------------------


def replay(limits_gib: Sequence[float], num_processes: int) -> tuple[list[list[str]], list[float]]:
    """Compare the plan at each limit with the fastest recorded setting that fits, and return the ratios of their
    seconds.
    """
    shares = [limits_gib[first::num_processes] for first in range(min(num_processes, len(limits_gib)))]
    with multiprocessing.get_context("spawn").Pool(len(shares), settle) as pool:
        found = dict(itertools.chain.from_iterable(pool.map(replay_some, shares, chunksize=1)))
    lines, ratios = zip(*(found[limit] for limit in limits_gib), strict=True)
    return list(lines), [ratio for ratio in ratios if ratio is not None]


def replay_some(limits_gib: Sequence[float]) -> list[tuple[float, tuple[list[str], float | None]]]:
    grid = map(grid_row, csv.DictReader(GRID.read_text("utf-8").splitlines()))
    recorded = {_traced_choices(choices_of(row.fields["choices"])): row for row in grid}
    # A plan that was trained on a GPU has its measured time, unless the grid contains it.
    trained = {_traced_choices(row.task[3]): row for row in recorded_rows() if row.kind == "step with techniques"}
    spec = CARD.model_copy(update={"context_low_bytes": OUTSIDE_BYTES, "context_high_bytes": OUTSIDE_BYTES})
    found = []
    with planner_of(JOB, "h200", None, ((), ()), None, None, texts=TEXTS) as planner:
        for limit in limits_gib:
            planner._target = gpu_target(spec, int(limit * 2**30))  # traces are cached between limits
            started = time.perf_counter()
            plan = planner.plan()
            took = f"{time.perf_counter() - started:.0f} s"
            fallback = plan.fallbacks[0]
            choices = _traced_choices(fallback.choices)
            same = recorded.get(choices) or trained.get(choices)
            seconds = same.seconds if same else fallback.step_time.likely_seconds
            free_mib = limit * 1024 - OUTSIDE_BYTES / 2**20
            fitting = (row for row in recorded.values() if float(row.fields["peak_reserved_mib"]) <= free_mib)
            best = min(fitting, key=lambda row: row.seconds, default=None)
            cells, ratio = ("none", "", ""), None
            if best:
                ratio = seconds / best.seconds if plan.fits else float("inf")
                cells = (best.setting, f"{best.seconds:.3f}", f"{ratio:.2f}")
            words = " + ".join(map(str, fallback.choices)) if plan.fits else "nothing fits"
            source = "recorded" if same else "modelled"
            line = [f"{limit:g} GiB", words, f"{seconds:.3f}", source, *cells, took]
            print(*line, sep=" | ", file=sys.stderr)
            found.append((limit, (line, ratio)))
    return found


def _traced_choices(choices: Iterable[Choice]) -> frozenset[Choice]:
    """Return the choices that affect time; the allocator's settings do not."""
    return frozenset(one for one in choices if technique_of(one.technique).is_traced)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument(
        "--hold-out", action="store_true", help="select the costs of calls with one model left out at a time"
    )
    parser.add_argument("--replay", action="store_true", help="only plan the job at several limits")
    parser.add_argument("--limits", type=float, nargs="+", default=LIMITS_GIB, help="limits of --replay in GiB")
    parser.add_argument("--data", help="ignored")
    parser.add_argument(
        "--processes", type=int, default=len(os.sched_getaffinity(0)), help="number of processes (default: %(default)s)"
    )
    add_out(parser)
    arguments = parser.parse_args(words)
    rows = recorded_rows()
    check_only(parser, [arguments.only], [row.name for row in rows])
    rows = [row for row in rows if arguments.only in row.name]
    if arguments.hold_out and len({row.fields["model"] for row in passes_of(rows)}) < 2:
        parser.error(f"--hold-out needs forward and backward of two models: --only {arguments.only!r} leaves fewer")
    settle()
    started, printed = time.perf_counter(), keep_printed()
    found = show_replay(arguments.limits, arguments.processes) if arguments.replay else show_rows(rows, arguments)
    print(f"\n{time.perf_counter() - started:.0f} s in all.\n")
    what = ("plan-replay-gpu", "Plans at limits, replayed against recorded steps of a GPU")
    if not arguments.replay:
        what = ("plan-time-gpu", "The planner's time model against recorded steps of a GPU")
    file_result(arguments.out, *what, printed.text, threads=1)
    print(json.dumps(found))


def show_rows(rows: list[Row], arguments: argparse.Namespace) -> dict:
    predicted = [seconds for (seconds,) in predicted_of(rows, arguments.processes)]
    found = figures_by_kind(rows, predicted)
    wrong = [f"- {one}" for one in found["all"]["wrong"]]
    print(summary(found), "", sep="\n")
    if wrong:
        print("Pairs of which the first was faster and the second is said to be:\n", *wrong, "", sep="\n")
    if arguments.hold_out:
        text, found["held out"] = held_out(rows, arguments.processes)
        print("Each model with the costs of calls that fit the others best:\n", text, "", sep="\n")
    print(row_table(rows, predicted))
    return found


def show_replay(limits_gib: Sequence[float], num_processes: int) -> dict:
    lines, ratios = replay(limits_gib, num_processes)
    print(f"A plan takes at most {max(ratios):.2f} times as long as the fastest recorded setting that fits.\n")
    heads = ("limit", "planned", "seconds", "", "fastest recorded that fits", "seconds", "ratio", "planning")
    print(table(heads, lines))
    return {"worst": max(ratios), "ratios": ratios}


if __name__ == "__main__":
    main()
