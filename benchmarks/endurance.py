"""An hour of `plimsoll train` under a tight budget, with memory shortages, killed workers, SIGKILLs and long texts.

    python benchmarks/endurance.py [--minutes 60] [--seed 0] [--budget 400MiB] [--model gpt2] [--data PATH]
        [--folder endurance-out] [--out benchmarks/results]

1. **Disturbed**, for the given minutes from the first step: every few seconds, a disturbance from `_endurance_run.py`
is applied. In the middle third no process is killed, so that one process lives long enough to show growth. The job has
more steps than can be done. When the time is over, the run is stopped with SIGINT after N steps, and `plimsoll train
--resume --set steps=N` finishes it.
2. **Undisturbed**: the same job, plan and budget, N steps.
3. **Replay**: each of the N steps with the micro-batches of the disturbed run, in one process without a limit.

Then everything is compared (`_endurance_judge.py`). Texts are lines of real text (the standard library's sources, or
``--data``), tokenized on the fly by worker processes. One line in 300 is a hundred times as long as the others. The
models have no dropout: other micro-batches draw other masks, as in plain PyTorch.

After Ctrl-C, the same command resumes the current phase (a replay starts again). Prints a table, and one JSON object as
the last line; exits with 1 if there was any fault. The three phases take two to three times the given minutes. Linux
only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import yaml

from _endurance_judge import (
    Figures,
    Reading,
    Verdict,
    ledger,
    left_behind,
    losses,
    memory,
    replay_verdict,
    weights,
)
from _endurance_run import ENDING, INTERRUPTED, SURVIVED, Command, Disturber, deck_of, failpoints, wait_until
from _endurance_table import rows, summary, title
from _results import add_out, file_result
from demo import standard_library
from plimsoll.data.text.sources import find_files
from plimsoll.device.process import private_bytes
from plimsoll.planning.baseline import job_baseline
from plimsoll.records.base import write_atomically
from plimsoll.records.job import Job
from plimsoll.records.run import OomEvent, RunRecord
from plimsoll.records.units import parse_bytes
from plimsoll.training.run_directory import RunDirectory

HERE = Path(__file__).parent
MORE_STEPS_THAN_CAN_BE_DONE = 10**9
SAID_SECONDS = 10.0
UNASKED = "ended by itself"  # recorded for a run that ended without being asked
MIB = 1 << 20
SAMPLE_SECONDS = 0.02
NUM_LINES = 20_000
LONG_TEXT_SHARE = 1 / 300

MODELS: dict[str, Any] = {
    "gpt2": {
        "architecture": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "lstm": {"architecture": "lstm", "embedding_size": 48, "hidden_size": 64, "num_layers": 1},
}  # fmt: skip
MODEL_MEMORY = {"gpt2": "146MiB", "lstm": "104MiB"}
"""Memory of the budget in addition to the process itself, whose size varies with versions and processors."""


def main() -> None:
    """Run the remaining phases, and compare."""
    arguments = parsed()
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    require_same(folder, arguments)
    if not (folder / "job.yaml").is_file():
        write_job(folder, arguments)
    budget_bytes = Job.from_yaml(folder / "job.yaml").budget.device_bytes
    state = State(folder)
    try:
        with (folder / "train.log").open("ab") as log:
            disturb(folder, state, arguments, log)
            finish(folder, "disturbed", ["--set", f"steps={state.num_steps}"], log)
            compare_with(folder, state, arguments, log)
        replayed = replay(folder / "disturbed")
    except KeyboardInterrupt:
        sys.exit("stopped; progress is saved: run the same command to resume")
    verdicts = judged(folder, state, budget_bytes, replayed)
    print(table := rows(verdicts, state.seconds))
    readme = summary(verdicts, state.seconds, arguments)
    file_result(arguments.out, "endurance", f"Endurance: {title(arguments, budget_bytes)}", table, readme)
    faults = [fault for verdict in verdicts.values() for fault in verdict.faults]
    for fault in faults:
        print(f"NOT AS IT SHOULD BE: {fault}")
    figures = {name: verdict.figures for name, verdict in verdicts.items()}
    print(json.dumps({"minutes": arguments.minutes, "seed": arguments.seed, **figures, "faults": faults}))
    sys.exit(bool(faults))


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="minutes of the disturbed run (default: %(default)s)")
    parser.add_argument("--least", type=int, default=0, help="minimum number of disturbances (default: none)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the disturbances (default: %(default)s)")
    parser.add_argument("--every", type=float, default=6, help="seconds between two disturbances, on average")
    parser.add_argument("--model", choices=MODELS, default="gpt2", help="default: %(default)s")
    parser.add_argument(
        "--budget", help=f"budget of the training process (default: its memory without a model, plus {MODEL_MEMORY})"
    )
    parser.add_argument(
        "--checkpoint-every", type=int, default=20, help="steps between checkpoints (default: %(default)s)"
    )
    parser.add_argument(
        "--plan", action=argparse.BooleanOptionalAction, default=True, help="plan first, which takes half a minute"
    )
    parser.add_argument("--data", help="a text file, a folder or a pattern; by default the standard library's sources")
    parser.add_argument(
        "--folder", type=Path, default=Path("endurance-out"), help="output folder (default: %(default)s)"
    )
    add_out(parser)
    return parser.parse_args()


def require_same(folder: Path, arguments: argparse.Namespace) -> None:
    """Refuse to continue a benchmark that was started with other arguments."""
    fields = ("minutes", "least", "seed", "every", "model", "budget", "checkpoint_every", "plan", "data")
    asked = {name: getattr(arguments, name) for name in fields}
    path = folder / "arguments.json"
    if path.is_file() and (before := json.loads(path.read_text())) != asked:
        sys.exit(f"{folder} was started with {before}, not with {asked}: repeat those, or give another --folder")
    if not path.is_file() and any(folder.iterdir()):
        sys.exit(f"{folder} is not empty and not from an earlier endurance run: give another --folder")
    write_atomically(path, json.dumps(asked).encode())


def write_job(folder: Path, arguments: argparse.Namespace) -> None:
    """Write the job and the texts, most of them short and a few very long."""
    drawn, words = random.Random(arguments.seed), list[str]()
    for source in find_files(standard_library() if arguments.data is None else (arguments.data,)).files:
        words += Path(source.path).read_text("utf-8", errors="replace").split()
        if len(words) > 60 * NUM_LINES:
            break
    lines, first = list[str](), 0
    while len(lines) < NUM_LINES and first + 2000 < len(words):
        length = 2000 if drawn.random() < LONG_TEXT_SHARE else drawn.randint(4, 24)
        lines.append(" ".join(words[first : first + length]))
        first += min(length, 60)
    (folder / "texts.txt").write_text("\n".join(lines) + "\n", "utf-8")
    job = {
        "model": MODELS[arguments.model],
        "data": {"train": "texts.txt", "unit": "line", "validation": 0.01, "on_the_fly": True,
                 "long_texts": "truncate", "workers": 3},
        "tokenizer": {"train": "bpe", "vocab_size": 1000},
        "sequence_length": 256,
        "batch_size": 16,
        "optimizer": {"name": "adamw", "lr": 3e-4, "clip_norm": 1.0},
        "steps": MORE_STEPS_THAN_CAN_BE_DONE,
        "device": "cpu",
        "evaluate_every": 10 * arguments.checkpoint_every,
        "checkpoint": {"every": arguments.checkpoint_every, "keep": 2},
    }  # fmt: skip
    job["budget"] = arguments.budget or budget_of(job, parse_bytes(MODEL_MEMORY[arguments.model]))
    write_atomically(folder / "job.yaml", yaml.safe_dump(job, sort_keys=False).encode())


def budget_of(job: dict[str, Any], free_bytes: int) -> str:
    """Return the memory of a training process without a model, plus ``free_bytes``."""
    return f"{(job_baseline(Job.from_fields(job)).likely_bytes + free_bytes) // MIB}MiB"


class State:
    """Progress of the benchmark, stored in files: disturbances, readings, and the seconds of the disturbed run."""

    def __init__(self, folder: Path) -> None:
        self._state, self._events, self._readings = (
            folder / name for name in ("state.json", "events.jsonl", "memory.jsonl")
        )
        self._repeated = folder / "repeated.jsonl"
        known = json.loads(self._state.read_text()) if self._state.is_file() else {}
        self.seconds: float = known.get("seconds", 0.0)
        self.num_steps: int = known.get("num_steps", 0)
        self.num_parts: int = known.get("num_parts", 0)
        self.num_done = len(self.events())

    def save(self) -> None:
        known = {"seconds": self.seconds, "num_steps": self.num_steps, "num_parts": self.num_parts}
        write_atomically(self._state, json.dumps(known).encode())

    def note(self, kind: str, said: str) -> None:
        """Record a disturbance."""
        self.num_done += 1
        _append(self._events, {"seconds": round(self.seconds, 1), "kind": kind, "said": said})
        say(self, f"min  {kind}: {said}")

    def note_repeated(self, steps: list[Any]) -> None:
        """Record steps that a kill took back."""
        _append(self._repeated, [[line.step, line.micro_batch, line.loss] for line in steps])

    def note_reading(self, reading: Reading) -> None:
        _append(self._readings, reading)

    def events(self) -> list[dict[str, Any]]:
        return _read(self._events)

    def repeated(self) -> list[list]:
        return _read(self._repeated)

    def readings(self) -> list[Reading]:
        return [Reading(*fields) for fields in _read(self._readings)]


def say(state: State, text: str) -> None:
    """Print progress."""
    print(f"{state.seconds / 60:6.1f} {text}", file=sys.stderr, flush=True)


def _append(path: Path, what: object) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(what) + "\n")


def _read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []


# -- the phases --------------------------------------------------------------------------------------------------------


def disturb(folder: Path, state: State, arguments: argparse.Namespace, log: Any) -> None:
    """Perform or resume the disturbed run, and stop it when its time is over."""
    total_seconds = arguments.minutes * 60
    if state.num_steps:
        return
    state.num_parts += 1
    drawn = random.Random(f"{arguments.seed} {state.num_parts}")
    run = folder / "disturbed"

    def start() -> Command:
        goes_on = any(run.glob("checkpoints/step-*"))
        given = [str(folder / "job.yaml"), *([] if arguments.plan else ["--no-plan"])]
        begun = ["--resume"] if goes_on else [*given, *(["--force"] if run.exists() else [])]
        return Command([*begun, "--out", str(run)], folder, log, failpoints(drawn))

    disturber = Disturber(run, start, drawn, state.note, repeated=state.note_repeated)
    decks = {False: deck_of(SURVIVED, drawn), True: deck_of(SURVIVED | ENDING, drawn)}
    disturber.begin()
    try:
        with sampled(run, state, disturber):
            due_seconds, last_said = state.seconds, 0.0
            clock = Clock(state)
            while (
                clock.read(is_running=disturber.metrics.last_step > 0) < total_seconds
                or state.num_done < arguments.least
            ):
                time.sleep(0.1)
                if (code := disturber.ended()) is not None:
                    state.note(UNASKED, f"exit code {code}: see train.log in --folder")
                    disturber.begin()
                is_ready = disturber.is_training(1)
                if time.monotonic() - last_said > SAID_SECONDS:
                    last_said = time.monotonic()
                    print(
                        f"{state.seconds / 60:6.1f} of {arguments.minutes:g} min, step {disturber.metrics.last_step}",
                        file=sys.stderr,
                    )
                if is_ready and state.seconds >= due_seconds:
                    disturber.is_gentle = 1 / 3 <= state.seconds / total_seconds < 2 / 3
                    disturber.do(next(decks[not disturber.is_gentle]))
                    due_seconds = state.seconds + min(drawn.expovariate(1 / arguments.every), 5 * arguments.every)
        # A Python process that has just started is ended by the signal, with any exit code.
        wait_until(lambda: disturber.is_training(1) or disturber.ended() is not None, "the last process to train")
    except BaseException:
        disturber.stop()
        raise
    finally:
        state.save()
    code = disturber.stop()
    if code not in INTERRUPTED:
        state.note(UNASKED, f"exit code {code} at the end: see train.log in --folder")
    state.num_steps = RunDirectory(run).last_saved_step()
    state.save()


class Clock:
    """A clock for the seconds of the disturbed run; it continues where an earlier command stopped."""

    def __init__(self, state: State) -> None:
        self._state, self._last = state, time.monotonic()

    def read(self, is_running: bool) -> float:
        now = time.monotonic()
        if is_running:
            self._state.seconds += now - self._last
            if int(self._state.seconds) != int(self._state.seconds - (now - self._last)):
                self._state.save()
        self._last = now
        return self._state.seconds


@contextmanager
def sampled(run: Path, state: State, disturber: Disturber) -> Iterator[None]:
    """Observe the training process while the block runs: one reading per second, from fifty samples."""
    over = threading.Event()
    thread = threading.Thread(target=_sample, args=(run, state, disturber, over))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _sample(run: Path, state: State, disturber: Disturber, over: threading.Event) -> None:
    pid, looks, began = None, list[int](), time.monotonic()
    directory = RunDirectory(run)
    while not over.wait(SAMPLE_SECONDS):
        with suppress(OSError, psutil.Error):
            if time.monotonic() - began >= 1:
                now = directory.training_pid()
                if pid is not None and pid == now and looks:
                    process = psutil.Process(pid)
                    numbers = (min(looks), round(median(looks)), max(looks), process.num_fds(), process.num_threads())
                    has_stepped = pid == disturber.stepping_pid
                    state.note_reading(Reading(round(state.seconds, 1), pid, *numbers, has_stepped))
                pid, looks, began = now, [], time.monotonic()
            if pid is not None:
                looks.append(private_bytes(pid))


def finish(folder: Path, name: str, arguments: list[str], log: Any) -> None:
    """Finish a run without disturbances."""
    run = folder / name
    command = Command(["--resume", "--out", str(run), *arguments], folder, log)
    must_end_well(command, folder)


def must_end_well(command: Command, folder: Path) -> None:
    """Wait for a command to end, and exit if it failed."""
    try:
        code = command.process.wait()
    except KeyboardInterrupt:
        command.stop()
        raise
    if code:
        sys.exit(f"plimsoll train ended with {code}: see {folder / 'train.log'}")


def compare_with(folder: Path, state: State, arguments: argparse.Namespace, log: Any) -> None:
    """Perform the same steps with the same plan, undisturbed."""
    run, plan = folder / "undisturbed", folder / "disturbed" / "plan.json"
    print(f"undisturbed: {state.num_steps} steps", file=sys.stderr)
    if any(run.glob("checkpoints/step-*")):
        return finish(folder, "undisturbed", [], log)
    planned = ["--plan", str(plan)] if arguments.plan else ["--no-plan"]
    given = [str(folder / "job.yaml"), "--set", f"steps={state.num_steps}", *planned]
    command = Command([*given, "--out", str(run), *(["--force"] if run.exists() else [])], folder, log)
    must_end_well(command, folder)
    return None


def replay(run: Path) -> Figures:
    """Repeat the steps of a run in a process without a limit."""
    command = [sys.executable, str(HERE / "_endurance_replay.py"), str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate()
    except KeyboardInterrupt:
        process.wait()
        raise
    if process.returncode:
        sys.exit(f"the replay ended with {process.returncode}")
    return json.loads(output.splitlines()[-1])


# -- what is made of it ------------------------------------------------------------------------------------------------


def judged(folder: Path, state: State, budget_bytes: int, replayed: Figures) -> dict[str, Verdict]:
    """Compare the runs."""
    disturbed, undisturbed = (RunRecord.from_directory(folder / name) for name in ("disturbed", "undisturbed"))
    events = state.events()
    unasked = [event["said"] for event in events if event["kind"] == UNASKED]
    unasked += [event["said"] for event in events if "in place of" in event["said"]]
    of_losses = losses(disturbed.steps, undisturbed.steps)
    has_same_cuts = not of_losses.figures["steps_cut_otherwise"]
    return {
        "done": Verdict(done_to(events, disturbed), [f"ended though nobody asked: {said}" for said in unasked]),
        "memory": memory(state.readings(), disturbed, budget_bytes, state.seconds),
        "ledger": ledger(disturbed.steps, undisturbed.steps, state.repeated()),
        "losses": of_losses,
        "weights": weights(folder / "disturbed", folder / "undisturbed", has_same_cuts),
        "replay": replay_verdict(replayed),
        "left": left_behind(folder / "disturbed", running_in(folder)),
    }


def done_to(events: list[dict[str, Any]], record: RunRecord) -> Figures:
    """Count the disturbances and their effects."""
    ooms: Counter[str] = Counter(event.phase or "?" for event in record.oom_events if isinstance(event, OomEvent))
    return {
        "disturbances": dict(Counter(event["kind"] for event in events if event["kind"] != UNASKED).most_common()),
        "ooms_survived": dict(ooms.most_common()),
        "processes": len(record.starts),
        "deaths_explained": len(record.deaths),
    }


def running_in(folder: Path) -> list[str]:
    """List the processes that still work in the folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and str(folder / "disturbed") in process.cmdline():
                found.append(f"process {process.pid}")
    return found


if __name__ == "__main__":
    main()
