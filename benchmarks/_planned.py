"""Shared parts of `plan_budgets.py` and `plan_fast.py`: models, real text, plans for a budget, and their trainings.

Everything uses one thread, and times are processor seconds, so that other programs do not decide which plan is faster.
Call `one_thread` before torch is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _results import add_out, file_result
from plimsoll.data.prepare import prepare
from plimsoll.data.text.sources import find_files
from plimsoll.device.process import private_bytes
from plimsoll.errors import PlimsollError
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, Configuration, Plan

HERE = Path(__file__).parent
MIB = 1 << 20
_TEXT_BYTES = 2 << 20
_POLL_SECONDS = 0.005
_VOCAB_SIZE = 8000
_IMPOSSIBLE_BYTES = 128 << 20  # too small for every model here, but large enough that a plan is attempted
_HEADROOM = 1.006  # a plan leaves half a percent of its limit unused, because a short evaluation may predict too little


@dataclass(frozen=True)
class Model:
    """A training to plan; ``rows`` is the vocabulary size."""

    name: str
    model: dict[str, Any] | str
    length: int
    batch_size: int
    task: str = "language-modeling"
    rows: int = _VOCAB_SIZE


def one_thread() -> None:
    """Limit this process and its children to one thread, and make models importable that a function name refers to."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(HERE))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    import torch

    torch.set_num_threads(1)


# -- text --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Texts:
    """Real text in a folder, whole and cut into lines of two classes, and tokenizers by vocabulary size."""

    folder: Path

    @property
    def whole(self) -> str:
        return str(self.folder / "text.txt")

    @property
    def classes(self) -> str:
        return str(self.folder / "classes")

    def tokenizer(self, rows: int) -> str:
        return str(self.folder / f"tokenizer-{rows}.json")


def make_texts(data: str | None, folder: Path, rows: Sequence[int]) -> Texts:
    """Write the texts and the tokenizers; tokens beyond the real vocabulary occur in no text."""
    from demo import standard_library

    texts, text = Texts(folder), ""
    (folder / "classes").mkdir(parents=True, exist_ok=True)
    for source in find_files(standard_library() if data is None else (data,)).files:
        text += Path(source.path).read_text("utf-8", errors="replace")
        if len(text) > _TEXT_BYTES:
            break
    Path(texts.whole).write_text(text, "utf-8")
    words = text.split()
    lines = [" ".join(words[start : start + 200]) for start in range(0, len(words) - 200, 200)]  # all are truncated
    for number, name in enumerate(("first", "second")):
        (folder / "classes" / name).mkdir(exist_ok=True)
        half = lines[number * len(lines) // 2 : (number + 1) * len(lines) // 2]
        (folder / "classes" / name / "texts.txt").write_text("\n".join(half) + "\n", "utf-8")
    job = _job(Model("tokenizer", "gru", 64, 1), texts, {"train": "bpe", "vocab_size": _VOCAB_SIZE})
    trained = json.loads((Path(prepare(job, folder / "cache").tokenizer_folder) / "tokenizer.json").read_text("utf-8"))
    for size in set(rows):
        vocabulary = trained["model"]["vocab"]
        unused = {f"<unused {number}>": number for number in range(len(vocabulary), size)}
        model = {**trained["model"], "vocab": {**vocabulary, **unused}}
        Path(texts.tokenizer(size)).write_text(json.dumps({**trained, "model": model}), "utf-8")
    return texts


def _job(model: Model, texts: Texts, tokenizer: dict[str, Any]) -> Job:
    is_classified = model.task == "classification"
    return Job.from_fields(
        {
            "model": model.model,
            "task": model.task,
            "data": {"train": texts.classes, "unit": "line"} if is_classified else {"train": texts.whole},
            "tokenizer": tokenizer,
            "sequence_length": model.length,
            "batch_size": model.batch_size,
            "optimizer": {"name": "adamw", "lr": 1e-4, "clip_norm": 1.0},
            "device": "cpu",
        }
    )


# -- plans -------------------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """A model with its text, ready to be planned and run."""

    model: Model
    job: Job
    prepared: Path
    plans: dict[int, Plan] = field(default_factory=dict)

    def plan(self, budget_bytes: int) -> Plan:
        """Plan for a budget; plans are cached."""
        from plimsoll.planning.plan import plan_job

        if budget_bytes not in self.plans:
            self.plans[budget_bytes] = plan_job(self.job, limit_bytes=budget_bytes)
        return self.plans[budget_bytes]

    def budgets(self, number: int, least_factor: float = 1.1) -> list[int]:
        """Return budgets in whole MiB, in falling order.

        The first is enough for the plain training. The others have equal ratios. They begin with the need of the
        fastest plan, above which memory is useless, and end at ``least_factor`` times the smallest feasible budget.
        """
        impossible = self.plan(_IMPOSSIBLE_BYTES)
        enough = _budget_of(impossible.plain)
        most, least = _budget_of(self.plan(enough).fallbacks[0]), least_factor * (impossible.smallest_budget_bytes or 0)
        ratio = (least / most) ** (1 / (number - 2))
        return [enough, *(-(-int(most * ratio**step) // MIB) * MIB for step in range(number - 1))]

    def run(self, fallbacks: Sequence[Sequence[Choice]], steps: int, budget_bytes: int) -> dict[str, Any]:
        """Return the message that tells the worker to run a training."""
        listed = [[choice.model_dump() for choice in choices] for choices in fallbacks]
        run = {"job": self.job.to_json(), "prepared": str(self.prepared), "fallbacks": listed, "steps": steps}
        return {**run, "budget_bytes": budget_bytes}

    def run_tried(self, plan: Plan, steps: int, budget_bytes: int) -> dict[str, Any]:
        """Return the message that tells the worker to try a plan first, as `plimsoll train` does."""
        candidates = tuple(one.model_copy(update={"prediction": None}) for one in plan.candidates)
        bare = plan.model_copy(update={"prediction": None, "rejected": (), "candidates": candidates})
        return {**self.run([], steps, budget_bytes), "plan": bare.to_json()}


def _budget_of(fallback: Configuration | None) -> int:
    """Return the smallest budget in whole MiB for a fallback."""
    from plimsoll.device.cpu.data_limit import MARGIN_BYTES

    assert fallback is not None
    assert fallback.peak is not None
    return -(-int(_HEADROOM * fallback.peak.high_bytes + MARGIN_BYTES) // MIB) * MIB


def make_training(model: Model, texts: Texts) -> Training:
    """Prepare the text of a model."""
    job = _job(model, texts, {"path": texts.tokenizer(model.rows)})
    prepared = texts.folder / f"{model.name.replace(' ', '-')}.json"
    prepare(job, texts.folder / "cache").save(prepared)
    return Training(model, job, prepared)


def in_words(choices: Sequence[Choice]) -> str:
    return " ".join(map(str, choices))


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """A finished training; ``peak_bytes`` is private memory as observed from outside and by the kernel."""

    peak_bytes: int = 0
    num_ooms: int = 0
    seconds: list[float] = field(default_factory=list)
    error: str = ""
    plan: Plan | None = None

    @property
    def step_seconds(self) -> float:
        """The fastest step, without the first one, which creates the optimizer states."""
        return min(self.seconds[1:] or self.seconds or [float("inf")])


class Worker:
    """A process of `_planned_worker.py` for runs of one model."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "_planned_worker.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def measure(self, run: dict[str, Any]) -> Measured:
        """Run a training and observe its memory from outside."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(run) + "\n")
        stdin.flush()
        found, peaks, ended = Measured(), [0], threading.Event()
        watcher: threading.Thread | None = None
        for line in stdout:
            said = json.loads(line)
            if "pid" in said:
                watcher = threading.Thread(target=_watch, args=(said["pid"], peaks, ended))
                watcher.start()
            elif "plan" in said:
                found.plan = Plan.from_json(said["plan"])
            elif "loss" in said:
                found.seconds.append(said["cpu_seconds"])
                found.num_ooms += said["ooms"]
                peaks[0] = max(peaks[0], said["peak_bytes"])
            elif "error" in said:
                found.error = said["error"]
            else:
                found.error = found.error or ("" if said["exit"] == 0 else f"exit {said['exit']}")
                break
        ended.set()
        if watcher is not None:
            watcher.join()
        found.peak_bytes = peaks[0]
        return found


def _watch(pid: int, peaks: list[int], ended: threading.Event) -> None:
    with suppress(OSError):
        while not ended.is_set():
            peaks[0] = max(peaks[0], private_bytes(pid))
            time.sleep(_POLL_SECONDS)


# -- what both do ------------------------------------------------------------------------------------------------------


def parser_of(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that both benchmarks share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a text file, a folder or a pattern; by default the standard library's sources")
    parser.add_argument("--only", default="", help="models whose names contain this")
    parser.add_argument(
        "--work", type=Path, default=Path("plan-benchmark"), help="folder for text (default: %(default)s)"
    )
    add_out(parser)
    parser.add_argument("--kept", type=Path, help="file that stores each row; stored rows are not measured again")
    return parser


def kept_rows(path: Path | None) -> list[dict[str, Any]]:
    """Read the rows that an earlier run stored."""
    if path is None or not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))
    return rows


def keep_rows(path: Path | None, rows: Sequence[Any]) -> None:
    """Store rows, which are dataclasses, in a file."""
    if path is not None:
        path.write_text(json.dumps([asdict(row) for row in rows]), "utf-8")


def hand_over(
    rows: Sequence[Any], figures: dict[str, Any], out: Path | None, what: str, title: str, text: str, part: str
) -> None:
    """Print the report and one JSON line with everything, and write the report to ``out`` if given."""
    print(text)
    file_result(out, what, title, text, part, threads=1)
    print(json.dumps({**figures, "rows": [asdict(row) for row in rows]}))


def report_of(what: str, figures: dict[str, Any], table: str) -> str:
    """Return Markdown: a description, the figures and the rows."""
    listed = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in figures.items())
    return f"{what}\n\n{listed}.\n\n{table}\n"


def ends_with_its_code(main: Callable[[], None]) -> None:
    """Run a benchmark, and report user errors without a traceback."""
    try:
        main()
    except PlimsollError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
