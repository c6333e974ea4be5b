"""The smallest memory in which each tool trains five exact steps, and the step time within shares of the plain loop's.

    make rivals                                                  # the other tools, in separate environments
    python benchmarks/headline.py --folder headline-out          # hours; resumes after an interruption
    python benchmarks/headline.py --folder headline-out --model lstm --model t5 --part limits
    python benchmarks/headline.py --folder headline-out --part table --out benchmarks/results

New GPT-2 124M, BERT-base, T5-small and LSTM models are trained in fp32 with AdamW, without dropout or clipping. Every
tool trains the same samples in the same order from the same weights, with the same effective batch
(`_headline_tasks.py`, `rivals/train.py`). Each training is a separate process with a limit on private memory, including
the interpreter and libraries: RLIMIT_DATA, set before the model is built. Exact means: after the steps, a sample of the
weights has moved like in the plain loop without a limit. The difference is at most `TOLERANCE` times the distance
moved.

The limit is raised or lowered by `FACTOR` until five steps succeed and two steps fail at the next lower limit. Each
tool is set up for little memory as its documentation recommends: gradient checkpointing, the smallest micro-batch,
accumulation. Plimsoll gets only the commands that a user types: `plimsoll plan job.yaml --budget LIMIT -o plan.json`,
and `train --plan plan.json`.

The step time is measured within all, half and a quarter of the plain loop's smallest limit. It runs from the end of one
step to the end of the next. The fastest setting of a tool counts (the whole batch, a half, one sample, with and without
checkpointing). All tools run with one thread and take turns, in rounds. Prints tables, and one JSON object as the last
line. Linux only.

The limit does not count two resources that only Plimsoll uses. The first is files on the disk: offloaded weights,
gradients and states, which the kernel may hold in its page cache (the tables show the size). The second is processes
besides the training, which plan before it and monitor it.

Does NOT cover GPUs; tools that cannot be installed with this torch (Composer 0.32 needs torch below 2.7.1, and its
automatic micro-batch works on CUDA only); reading of texts, which is equal for all tools.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from _headline_report import FACTOR, OURS, SHARES, best_rival, summary, tables
from _headline_tasks import STEPS, Task, tasks, write_task
from _results import add_out, file_result, versions_in
from _rivals import python_of
from demo import last_line, run
from plimsoll.records.base import write_atomically
from plimsoll.records.plan import Plan
from plimsoll.records.run import RunRecord

MIB = 1 << 20
TOLERANCE = 1e-3
EVERY_WEIGHT = 997  # as in rivals/train.py
TIMED_STEPS = 3
MOST_OF_NEED = 3  # a tool that fails with this multiple of the plain loop's memory has another problem
HERE = Path(__file__).parent
PLAN_BELOW = "32MiB"


@dataclass(frozen=True)
class Setting:
    """A tool's settings; ``micro_batch`` is the maximum for a tool that searches."""

    micro_batch: int
    checkpointing: bool = False


@dataclass(frozen=True)
class Tool:
    """A tool, its environment, and its settings; the last one needs the least memory."""

    name: str
    title: str
    environment: str
    program: str
    settings: Callable[[Task], list[Setting]]


def _pieces(task: Task) -> list[Setting]:
    sizes = (task.batch_size, task.batch_size // 2, 1)
    return [Setting(size, again) for again in ([False, True] if task.blocks else [False]) for size in sizes]


def _whole(task: Task) -> list[Setting]:
    whole = [Setting(task.batch_size)]
    return [*whole, Setting(task.batch_size, True)] if task.blocks else whole


TOOLS = [
    Tool("plain", "plain PyTorch loop", "huggingface", "plain", lambda task: [Setting(task.batch_size)]),
    Tool("by_hand", "accumulation and checkpointing by hand", "huggingface", "plain", _pieces),
    Tool("trainer", "Hugging Face Trainer, accumulation set by hand", "huggingface", "trainer", _pieces),
    Tool("trainer_auto", "Hugging Face Trainer, auto_find_batch_size", "huggingface", "trainer-auto", _whole),
    Tool("accelerate", "Accelerate, find_executable_batch_size", "huggingface", "accelerate", _whole),
    Tool("lightning", "Lightning, batch size finder", "lightning", "lightning", _whole),
    Tool("torchtune", "torchtune's optimizer in backward, chunked loss", "torchtune", "torchtune", _whole),
]  # fmt: skip
Found = dict[str, Any]


class Experiment:
    """All measurements of a model, each written to a file at once."""

    def __init__(self, task: Task, folder: Path, data: str | None) -> None:
        self.task, self.folder = task, folder / task.name
        write_task(task, self.folder, data)
        self.file = self.folder / "measured.json"
        self.found: Found = json.loads(self.file.read_text()) if self.file.exists() else {"runs": {}, "times": {}}
        with safe_open(self.folder / "weights.safetensors", "pt") as file:
            names = sorted(file.keys())
            self.begin = {name: file.get_tensor(name).flatten()[::EVERY_WEIGHT] for name in names}

    def keep(self) -> None:
        write_atomically(self.file, json.dumps(self.found, indent=1).encode())

    def measured(self, tool: str, setting: Setting | None, limit_mib: int | None, steps: int, number: int = 0) -> Found:
        """Run a training, or return its stored result; ``trains`` means it ended well, exactly and within the limit."""
        key = json.dumps([tool, asdict(setting) if setting else None, limit_mib, steps, number])
        if key not in self.found["runs"]:
            do = self._ours if setting is None else partial(self._theirs, tool, setting)
            outcome = do(limit_mib, steps)
            is_within = limit_mib is None or outcome["peak_mib"] <= limit_mib
            outcome["trains"] = outcome["done"] and outcome["exact"] and is_within
            self.found["runs"][key] = outcome
            self.keep()
        found: Found = self.found["runs"][key]
        return found

    def _theirs(self, name: str, setting: Setting, limit_mib: int | None, steps: int) -> Found:
        tool = next(tool for tool in TOOLS if tool.name == name)
        python, out = python_of(tool.environment), self.folder / "result.json"
        assert python is not None
        out.unlink(missing_ok=True)
        command = [str(python), str(HERE / "rivals" / "train.py"), str(self.folder), "--tool", tool.program]
        command += ["--micro-batch", str(setting.micro_batch), "--steps", str(steps), "--out", str(out)]
        command += ["--checkpointing"] if setting.checkpointing else []
        command += ["--limit-mib", str(limit_mib)] if limit_mib else []
        arm = run(command)
        outcome: Found = {"done": arm.code == 0 and out.exists(), "peak_mib": arm.peak_bytes / MIB}
        if not outcome["done"]:
            outcome["said"] = last_line(arm.errors)[:200]
        else:
            result = json.loads(out.read_text())
            outcome |= {"seconds": [line["seconds"] for line in result["steps"]]}
            outcome |= {"losses": [line["loss"] for line in result["steps"]]}
            outcome["moved"] = {name: torch.tensor(rows) - self.begin[name] for name, rows in result["weights"].items()}
            if name == "plain" and limit_mib is None:
                torch.save(outcome["moved"], self.folder / f"moved-{steps}.pt")
            self._compare(outcome, steps)
        self._say(name, setting, limit_mib, outcome)
        return outcome

    def _ours(self, limit_mib: int | None, steps: int) -> Found:
        assert limit_mib is not None
        budget = f"{limit_mib}MiB"
        out, plan = self.folder / "run", self.folder / f"plan-{limit_mib}.json"
        shutil.rmtree(out, ignore_errors=True)
        plimsoll = [sys.executable, "-m", "plimsoll"]
        os.environ["PLIMSOLL_CACHE"] = str(
            self.folder / "known" / budget
        )  # a calibration from earlier runs changes plans
        job = str(self.folder / "job.yaml")
        if not plan.exists():
            planned = run([*plimsoll, "plan", job, "--budget", budget, "-o", str(plan)])
            if planned.code:
                plan.unlink(missing_ok=True)  # the record of a plan that does not fit
                said = next((line for line in planned.output.splitlines() if "Impossible" in line), "")
                outcome: Found = {"done": False, "peak_mib": 0.0, "said": said.strip("│ ") or last_line(planned.errors)}
                self._say(OURS, None, limit_mib, outcome)
                return outcome
        command = ["train", job, "--plan", str(plan), "--out", str(out), "--cache", str(self.folder / "cache")]
        arm = run([*plimsoll, *command, "--set", f"steps={steps}"])
        if arm.code:
            outcome = {"done": False, "peak_mib": arm.peak_bytes / MIB, "said": last_line(arm.errors)[:200]}
        else:
            record = RunRecord.from_directory(out)
            outcome = {"done": True, "peak_mib": arm.peak_bytes / MIB, "oom_events": len(record.oom_events)}
            ends = [line.time_seconds for line in record.steps]
            outcome["seconds"] = [record.steps[0].step_seconds, *(end - begin for begin, end in pairwise(ends))]
            outcome |= {"losses": [line.loss for line in record.steps]}
            made = Plan.load(plan)
            outcome["choices"] = " ".join(map(str, made.fallbacks[0].choices))
            outcome["in_files_mib"] = made.off_device.kept_bytes / MIB if made.off_device else 0
            with safe_open(out / "model" / "model.safetensors", "pt") as file:
                trained = {name: file.get_tensor(name).flatten()[::EVERY_WEIGHT] for name in file.keys()}  # noqa: SIM118
            outcome["moved"] = {name: trained[name] - begin for name, begin in self.begin.items() if name in trained}
            self._compare(outcome, steps)
        self._say(OURS, None, limit_mib, outcome)
        return outcome

    def _compare(self, outcome: Found, steps: int) -> None:
        """Compute the distance between the weights and the plain loop's, relative to the distance those moved."""
        plain, moved = torch.load(self.folder / f"moved-{steps}.pt"), outcome.pop("moved")
        names = sorted(moved)
        way = torch.cat([plain[name] for name in names])
        outcome["difference"] = float((torch.cat([moved[name] for name in names]) - way).norm() / way.norm())
        outcome["exact"] = outcome["difference"] <= TOLERANCE

    def _say(self, tool: str, setting: Setting | None, limit_mib: int | None, outcome: Found) -> None:
        how = "" if setting is None else f" of {setting.micro_batch}{', checkpointing' * setting.checkpointing}"
        where = "without a limit" if limit_mib is None else f"in {limit_mib} MiB"
        what = f"fails: {outcome.get('said')}"
        if outcome["done"]:
            seconds = statistics.median(outcome["seconds"][1:] or outcome["seconds"])
            what = f"{seconds:.1f} s a step, peak {outcome['peak_mib']:.0f} MiB, differs by {outcome['difference']:.1e}"
        print(f"{self.task.name}: {tool}{how} {where}: {what}", file=sys.stderr, flush=True)

    # -- the smallest limit --------------------------------------------------------------------------------------------

    def limits(self) -> None:
        """Find each tool's smallest limit."""
        for steps in (2, TIMED_STEPS, STEPS):
            self.measured("plain", Setting(self.task.batch_size), None, steps)
        found = self.found.setdefault("limits", {})
        for tool in TOOLS:
            if python_of(tool.environment) is None:
                print(f"{tool.title}: left out, not installed (make rivals)", file=sys.stderr)
            elif tool.name not in found:
                found[tool.name] = self.smallest(tool.name, tool.settings(self.task)[-1], self._guess_mib(tool))
                self.keep()
        if OURS not in found:
            found[OURS] = self.smallest(OURS, None, self._planned_mib())
            self.keep()

    def _guess_mib(self, tool: Tool) -> int:
        if "by_hand" in self.found["limits"] and tool.program in {"trainer", "accelerate", "lightning"}:
            return int(self.found["limits"]["by_hand"]["limit_mib"])
        free = self.measured(tool.name, tool.settings(self.task)[-1], None, 2)
        return int(free["peak_mib"])

    def _planned_mib(self) -> int:
        """Return the smallest budget according to the planner."""
        job = str(self.folder / "job.yaml")
        arm = run([sys.executable, "-m", "plimsoll", "plan", job, "--budget", PLAN_BELOW])
        said = re.search(r"--budget\s+(\d+)MiB", re.sub(r"[\s│]+", " ", arm.output))
        assert said, arm.output + arm.errors
        return int(said[1])

    def smallest(self, tool: str, setting: Setting | None, guess_mib: int) -> Found:
        """Search for a limit in which a tool trains, while 5 % less fails; confirm it with five steps."""
        limit_mib, fails_mib = guess_mib, 0
        while not self.measured(tool, setting, limit_mib, 2)["trains"]:
            fails_mib, limit_mib = limit_mib, self._above_mib(tool, setting, limit_mib, 2)
        while limit_mib > FACTOR * fails_mib + 1:
            below_mib = int(math.sqrt(fails_mib * limit_mib)) if fails_mib else int(limit_mib / FACTOR)
            if self.measured(tool, setting, below_mib, 2)["trains"]:
                limit_mib = below_mib
            else:
                fails_mib = below_mib
        while not (outcome := self.measured(tool, setting, limit_mib, STEPS))["trains"]:
            limit_mib = self._above_mib(tool, setting, limit_mib, STEPS)
        return {**outcome, "limit_mib": limit_mib, "setting": asdict(setting) if setting else None}

    def _above_mib(self, tool: str, setting: Setting | None, fails_mib: int, steps: int) -> int:
        """Return the next limit to try, or the plain loop's limit if a tool needs more than was guessed."""
        plain_mib = self.found["limits"].get("plain", {}).get("limit_mib", fails_mib)
        if fails_mib > MOST_OF_NEED * plain_mib:
            said = self.measured(tool, setting, fails_mib, steps).get("said", "it trains something else")
            raise RuntimeError(f"{tool} does not train {self.task.title} in {fails_mib:,} MiB: {said}")
        is_guessed = tool in {"accelerate", "lightning"} and fails_mib < plain_mib
        return int(plain_mib) if is_guessed else int(FACTOR * fails_mib) + 1

    # -- the time of a step --------------------------------------------------------------------------------------------

    def times(self, rounds: int) -> None:
        """Time a step of every tool that fits into a share of the plain loop's memory, in turns."""
        limits = self.found["limits"]
        need_mib = limits["plain"]["limit_mib"]
        for number in range(rounds):
            for share in SHARES:
                for name in [tool.name for tool in TOOLS if tool.name in limits] + [OURS]:
                    key = json.dumps([name, share, number])
                    if key not in self.found["times"] and limits[name]["limit_mib"] <= share * need_mib * FACTOR:
                        self.found["times"][key] = self.timed(name, share, int(share * need_mib), number)
                        self.keep()

    def timed(self, name: str, share: float, limit_mib: int, number: int) -> Found:
        """Train within the limit with each setting of a tool; in later rounds, only with the fastest one."""
        if name == OURS:
            return self.measured(OURS, None, limit_mib, TIMED_STEPS, number)
        tool = next(tool for tool in TOOLS if tool.name == name)
        first = self.found["times"].get(json.dumps([name, share, 0]))
        settings = (
            tool.settings(self.task) if first is None else [Setting(**first["setting"])] if first["trains"] else []
        )
        outcomes = [
            {**self.measured(name, setting, limit_mib, TIMED_STEPS, number), "setting": asdict(setting)}
            for setting in settings
        ]
        trained = [outcome for outcome in outcomes if outcome["trains"]]
        return min(trained, key=seconds_a_step) if trained else {"trains": False}


def seconds_a_step(outcome: Found) -> float:
    """Return the median step time without the first step, which has no optimizer states yet."""
    return statistics.median(outcome["seconds"][1:])


def main() -> None:
    """Run the requested parts, model by model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder for the tasks and measurements")
    parser.add_argument(
        "--data", help="folder with one subfolder of texts per class of the BERT task (default: the standard library)"
    )
    parser.add_argument("--model", action="append", choices=[task.name for task in tasks()], help="default: all")
    parser.add_argument("--part", choices=("all", "limits", "times", "table"), default="all")
    parser.add_argument("--rounds", type=int, default=2, help="number of measurements of each step time")
    parser.add_argument("--threads", type=int, default=1)
    add_out(parser)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE / "rivals"), os.environ.get("PYTHONPATH", "")]).strip(
        os.pathsep
    )
    sys.path.insert(0, str(HERE / "rivals"))  # the job of T5 names a function there
    if python_of("huggingface") is None:
        parser.error("the plain loop needs the other tools' environment: run `make rivals`")
    chosen = [task for task in tasks() if arguments.model is None or task.name in arguments.model]
    experiments = [Experiment(task, arguments.folder, arguments.data) for task in chosen]
    for experiment in experiments:
        if arguments.part in {"all", "limits"}:
            experiment.limits()
        if arguments.part in {"all", "times"}:
            experiment.times(arguments.rounds)
    measured = {
        experiment.task: experiment.found for experiment in experiments if OURS in experiment.found.get("limits", {})
    }
    titles = {**{tool.name: tool.title for tool in TOOLS}, OURS: "Plimsoll"}
    print(text := tables(measured, titles))
    title, readme = "The smallest memory in which each tool trains exactly", summary(measured, titles)
    packages = {"huggingface": ["accelerate"], "lightning": ["lightning"], "torchtune": ["torchtune"]}
    installed = ((python_of(environment), names) for environment, names in packages.items())
    others = [one for python, names in installed if python for one in versions_in(python, names)]
    file_result(arguments.out, "headline", title, text, readme, threads=arguments.threads, others=others)
    print(json.dumps({task.name: best_rival(found) for task, found in measured.items()}))


if __name__ == "__main__":
    main()
