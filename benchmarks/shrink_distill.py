"""Cost of a teacher: a small language model trained alone, with a large teacher, and with a teacher in a plain loop.

    python benchmarks/shrink_distill.py

Each variant is a separate process: a few optimizer steps (AdamW) of a GPT-2 student, with and without a GPT-2 teacher
from a folder. Memory is the process's private memory (RssAnon: no pages of files) above the value without a model, read
from outside every millisecond. The working set of the teacher is the peak of its passes alone.

Goals: student and teacher together take at most 1.15 times the sum of both. The losses equal the losses of the plain
loop, which has both models and all logits in memory, to 1e-5. The weights are random, so quality is not measured. The
last line is JSON. Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from _results import add_out, fenced, file_result, keep_printed, mib
from plimsoll.data.quick_facts import TextSketch
from plimsoll.models.distillation.chunked import LossWeights
from plimsoll.models.distillation.loss import Distillation
from plimsoll.models.head_apart import head_apart
from plimsoll.models.workload import Workload, model_loss
from plimsoll.planning.teacher_loss import teacher_of
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice
from plimsoll.records.units import format_bytes
from plimsoll.techniques import installed

SHOWN = Console(stderr=False, width=140)
TEMPERATURE, HARD = 2.0, 0.5
CHUNKS = Choice(technique="chunked_loss", options={"chunk_tokens": 64})
FORMS = ("mapped", "int8", "memory")
ALONE, ALONE_CHUNKED, PLAIN = "student alone", "student alone, chunked_loss=64", "plain: both models, all logits"
MOST_RATIO, LARGEST_ERROR = 1.15, 1e-5


@dataclass(frozen=True)
class Figures:
    """One variant."""

    way: str
    peak_bytes: int
    seconds: float
    losses: tuple[float, ...]


def gpt2(width: int, layers: int, vocabulary: int, length: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        n_embd=width, n_layer=layers, n_head=max(width // 64, 1), vocab_size=vocabulary, n_positions=length,
        bos_token_id=0, eos_token_id=0, **no_dropout,
    )  # fmt: skip
    config.use_cache = False
    return GPT2LMHeadModel(config)


def spread(model: nn.Module) -> nn.Module:
    """Enlarge the embeddings, so that distributions are not flat."""
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(5)  # type: ignore[operator, union-attr]
    return model


def job_of(folder: str, form: str, length: int) -> Job:
    distill = {"teacher": folder, "form": form, "temperature": TEMPERATURE, "hard": HARD}
    return Job.from_fields({"model": "gpt2", "data": "none", "sequence_length": length, "distill": distill})


def plain_loss(student: nn.Module, teacher: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    outputs = student(**batch)
    with torch.no_grad():
        other = teacher(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    own = outputs.logits[:, :-1].flatten(0, 1)
    soft = functional.kl_div(
        functional.log_softmax(own / TEMPERATURE, dim=-1), functional.softmax(other / TEMPERATURE, dim=-1),
        reduction="batchmean",
    )  # fmt: skip
    return HARD * outputs.loss + (1 - HARD) * TEMPERATURE**2 * soft


def loss_of(way: str, sizes: dict[str, Any]) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
    if way in {ALONE, ALONE_CHUNKED}:
        return model_loss
    texts = TextSketch(sizes["vocabulary"], None, 0)
    if way == PLAIN:
        teacher = teacher_of(job_of(sizes["folder"], "memory", sizes["length"]), texts, "cpu")
        return lambda model, batch: plain_loss(model, teacher, batch)
    form = way.rpartition(" ")[2]
    teacher = teacher_of(job_of(sizes["folder"], form, sizes["length"]), texts, "cpu")
    return Distillation(teacher, "language-modeling", LossWeights(TEMPERATURE, HARD))


def work(way: str, sizes: dict[str, Any]) -> tuple[list[float], float]:
    """Perform the steps of a variant, or the passes of its teacher alone."""
    shape = (sizes["batch"], sizes["length"])
    ids = torch.randint(sizes["vocabulary"], shape, generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    loss = loss_of(way.removeprefix("working set of "), sizes)
    started = time.perf_counter()
    if way.startswith("working set of "):
        assert isinstance(loss, Distillation)
        assert loss.teacher is not None
        for _ in range(sizes["steps"]):
            with torch.no_grad():
                parts, _ = head_apart(loss.teacher, {"input_ids": ids})
                for begin in range(sizes["length"]):
                    parts.head(parts.hidden_BTH[:, begin : begin + 1])
        return [], time.perf_counter() - started
    torch.manual_seed(1)
    model = spread(gpt2(sizes["student_width"], sizes["student_layers"], sizes["vocabulary"], sizes["length"]))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-4), []
    workload = Workload(model, optimizer, loss, "next-tokens")
    with installed(workload, (CHUNKS,) if way == ALONE_CHUNKED else ()):
        for _ in range(sizes["steps"]):
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            losses.append(value.item())
            del value
            optimizer.step()
    return losses, time.perf_counter() - started


def private_bytes_of(process_id: int) -> int:
    """Return the anonymous resident memory of a process, or 0 if it has ended."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) << 10
    return 0


def watched(way: str, sizes: dict[str, Any]) -> Figures:
    command = [sys.executable, __file__, "--one", json.dumps([way, sizes])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        before = peak = private_bytes_of(child.pid)
        child.stdin.write("go\n")
        child.stdin.flush()
        while child.poll() is None:
            peak = max(peak, private_bytes_of(child.pid))
            time.sleep(0.001)
        losses, seconds = json.loads(child.stdout.read())
    figures = Figures(way, peak - before, seconds, tuple(losses))
    print(figures, file=sys.stderr, flush=True)
    return figures


def run_one(way: str, sizes: dict[str, Any]) -> None:
    """Run a variant in this process; memory of earlier imports is not counted."""
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    torch.manual_seed(0)
    small = gpt2(64, 1, 100, 8)
    small(input_ids=torch.zeros(1, 8, dtype=torch.long), labels=torch.zeros(1, 8, dtype=torch.long)).loss.backward()
    torch.optim.AdamW(small.parameters()).step()
    del small
    print("ready", flush=True)
    sys.stdin.readline()
    losses, seconds = work(way, sizes)
    print(json.dumps([losses, seconds]))


def ratios_of(found: dict[str, Figures], form: str) -> tuple[float, float]:
    """Return the peak with a teacher relative to both alone: for a student with all logits, and in chunks."""
    together, teacher = found[f"distilled, {form}"].peak_bytes, found[f"working set of {form}"].peak_bytes
    return tuple(together / (found[name].peak_bytes + teacher) for name in (ALONE, ALONE_CHUNKED))  # type: ignore[return-value]


def error_of(figures: Figures, plain: Figures) -> float:
    return max(abs(own - other) / abs(other) for own, other in zip(figures.losses, plain.losses, strict=True))


def table_of(found: dict[str, Figures]) -> Table:
    table = Table(title="private memory beyond the process, seconds of all steps")
    for name in ("way", "peak", "seconds", "of both alone", "of both alone, in chunks", "error of the loss"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for name, one in found.items():
        form, more = name.rpartition(" ")[2], ("", "", "")
        if name.startswith("distilled"):
            ratios = ratios_of(found, form)
            # A teacher with 8-bit codes is a different teacher.
            error = "another teacher" if form == "int8" else f"{error_of(one, found[PLAIN]):.1e}"
            more = f"{ratios[0]:.2f}x", f"{ratios[1]:.2f}x", error
        table.add_row(name, format_bytes(one.peak_bytes), f"{one.seconds:.1f}", *more)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("batch", 8), ("length", 128), ("steps", 3), ("vocabulary", 50257), ("student-width", 256),
        ("student-layers", 4), ("teacher-width", 768), ("teacher-layers", 12),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help="size (default: %(default)s)")
    add_out(parser)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.one:
        run_one(*json.loads(arguments.one))
        return
    sizes = {name: value for name, value in vars(arguments).items() if name not in ("one", "out")}
    printed = keep_printed()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        width, layers = sizes["teacher_width"], sizes["teacher_layers"]
        spread(gpt2(width, layers, sizes["vocabulary"], sizes["length"])).save_pretrained(folder)  # type: ignore[operator]
        ways = [ALONE, ALONE_CHUNKED, PLAIN]
        ways += [f"{kind} {form}" for form in FORMS for kind in ("working set of", "distilled,")]
        found = {way: watched(way, sizes | {"folder": folder}) for way in ways}
    SHOWN.print(table_of(found))
    holds = all(max(ratios_of(found, form)) <= MOST_RATIO for form in FORMS)
    holds &= all(error_of(found[f"distilled, {form}"], found[PLAIN]) <= LARGEST_ERROR for form in ("mapped", "memory"))
    plain, here = found[PLAIN], found["distilled, mapped"]
    part = (
        f"Distilling a GPT-2 of {sizes['teacher_layers']} x {sizes['teacher_width']} into one of "
        f"{sizes['student_layers']} x {sizes['student_width']}: {mib(plain.peak_bytes)} with both models and all "
        f"logits, {mib(here.peak_bytes)} here; error of the loss {error_of(here, plain):.0e}."
    )
    file_result(arguments.out, "shrink-distill", "What a teacher takes", fenced(printed.text), part)
    figures = [asdict(one) for one in found.values()]
    ratios = {form: ratios_of(found, form) for form in FORMS}
    print(
        json.dumps({"torch": torch.__version__, "sizes": sizes, "figures": figures, "ratios": ratios, "holds": holds})
    )


if __name__ == "__main__":
    main()
