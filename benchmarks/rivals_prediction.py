"""Predicted and measured peak memory of training: Plimsoll compared with other tools that predict it.

    make rivals && python benchmarks/rivals_prediction.py [--rounds 3] [--out benchmarks/results]
    python benchmarks/rivals_prediction.py --records records.csv     # also published runs on GPUs

Each tool runs in the environment of ``rivals/predictors.txt`` as its documentation recommends (`rivals/predictors.py`
has its inputs). Plimsoll runs in this one: `plimsoll.predict_function` on the same loop. There are two sets of
measurements:

CPU: small trainings of `rivals/trainings.py`, plain PyTorch without Plimsoll, in separate processes. Their private
memory is read from outside every millisecond and from the kernel's high-water mark, ``--rounds`` times. The tools'
answers do not vary, so they are asked between the rounds; seconds are after the imports, over all trainings. Only
Plimsoll includes the memory of a process without a model. The tables therefore have two answers: the tool's answer, and
the answer with the measured base. The measured base replaces the tool's assumption (Plimsoll's reading of its own
process, a CUDA context of torch-preflight).

GPU: the published runs of `predict_gpu_measured.py`, if ``--records`` is given, with transformers 4.51.3, which
produced them. All tools are asked about batches of 128 tokens. The process's memory outside the allocator in that
measurement is added to each answer. torch-preflight's context is subtracted, since the measurement does not include it.

An answer is judged at three limits: 0.8 times the measured peak, where the training would run out of memory; just below
the peak, where it would too (an unbiased answer is right half of the time); and 1.2 times the peak, where it fits.
Medians have the minimum and maximum of the rounds in brackets; seconds have the minimum and maximum of the trainings.
Plimsoll was developed with such trainings and with these GPU runs available (its rows do not use the constants that
were chosen on them); the other tools were not. Prints tables, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _results import add_out, file_result, quantile, show, versions_in
from _results import table as markdown
from _rivals import python_of

HERE = Path(__file__).parent
MIB = 1 << 20
TOOLS = {
    "plimsoll": "Plimsoll",
    "mem_tracker": "torch's MemTracker",
    "preflight": "torch-preflight",
    "kitsune": "torch-kitsune",
    "accelerate": "accelerate estimate-memory",
}
PACKAGES = ("accelerate", "torch-preflight", "torch-kitsune")
Answer = dict[str, Any]
Question = str | list[Any]


# -- Plimsoll's answers, in forks of a process of their own ------------------------------------------------------------


def own_answer(question: Question, records: Path | None) -> Answer:
    if isinstance(question, str):
        return cpu_answer(question)
    from predict_gpu_measured import predict, read_runs

    assert records is not None
    wanted = tuple(question)
    run = next(run for run in read_runs(records, None)[0] if question_of(run) == list(wanted))
    found = predict(run.plain(), None)
    return {"bytes": found.predicted_bytes - run.plain().outside_bytes, "is_oom": found.is_oom}


def cpu_answer(name: str) -> Answer:
    import trainings

    import plimsoll
    from plimsoll.planning.targets import own_baseline

    case = trainings.case_named(name)
    context_bytes = own_baseline(0).likely_bytes
    peak = plimsoll.predict_function(lambda: trainings.train(case, 3), device="cpu").peak
    ends = {"low_bytes": peak.low_bytes, "high_bytes": peak.high_bytes}
    return {"bytes": peak.likely_bytes, "context_bytes": context_bytes, **ends}


def answer_as_plimsoll(records: Path | None) -> None:
    """Answer the questions of standard input like `rivals/predictors.py`."""
    sys.path.insert(0, str(HERE / "rivals"))
    import transformers

    own = ("plimsoll.planning.predict_step", "plimsoll.memory.lowering.cuda", "trainings")
    for name in (*own, *(["predict_gpu_measured"] if records else [])):
        importlib.import_module(name)
    transformers.utils.logging.set_verbosity_error()
    for question in json.load(sys.stdin):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            started = time.perf_counter()
            found = own_answer(question, records)
            found["seconds"] = time.perf_counter() - started
            found["memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(json.dumps(found), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"no answer of Plimsoll to {question}: see above")


def ask(tool: str, questions: Sequence[Question], records: Path | None = None) -> list[Answer]:
    """Ask a tool all questions, in one process with forks."""
    environment = dict(os.environ)
    if records is not None:  # with the transformers version of the measured runs
        from predict_gpu_measured import CACHE

        paths = [str(CACHE), os.environ.get("PYTHONPATH", "")]
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    if tool == "plimsoll":
        command = [sys.executable, __file__, "--answer", *(["--records", str(records)] if records else [])]
    else:
        command = [str(python_of("predictors")), str(HERE / "rivals" / "predictors.py"), tool]
    child = subprocess.run(
        command, input=json.dumps(questions), capture_output=True, text=True, env=environment, check=False
    )  # fmt: skip
    if child.returncode:
        sys.exit(f"{TOOLS[tool]} gave no answers:\n{child.stderr}")
    return [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]


# -- the truth of the CPU ----------------------------------------------------------------------------------------------


def measured(name: str) -> tuple[int, int]:
    """Train in a separate process; return its base and its peak private memory."""
    python = python_of("predictors") or sys.executable
    command = [str(python), str(HERE / "rivals" / "trainings.py"), name]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peaks = [0]
    watcher = threading.Thread(target=watch, args=(child, peaks))
    watcher.start()
    output, errors = child.communicate()
    watcher.join()
    if child.returncode:
        sys.exit(f"the training {name} failed:\n{errors}")
    base, *steps = [json.loads(line) for line in output.splitlines()]
    return base["base_bytes"], max(peaks[0], *(step["peak_bytes"] for step in steps))


def watch(child: subprocess.Popen[str], peaks: list[int]) -> None:
    status = Path(f"/proc/{child.pid}/status")
    while child.poll() is None:
        with suppress(OSError):  # it may have ended
            found = [line for line in status.read_text().splitlines() if line.startswith("RssAnon")]
            if found:  # a zombie process has no such line
                peaks[0] = max(peaks[0], int(found[0].split()[1]) << 10)
        time.sleep(0.001)


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass
class Pair:
    """An answer with the measured value, or all measurements in ``rounds``; ``said`` is None without an answer."""

    name: str
    measured_bytes: float
    said: float | None
    rounds: list[float] = field(default_factory=list)

    def error(self) -> float:
        assert self.said is not None
        return self.said / self.measured_bytes - 1


def share(values: Sequence[bool]) -> float:
    return round(sum(values) / len(values), 3) if values else 0.0


def figures_of(pairs: Sequence[Pair]) -> dict[str, Any]:
    answered = [pair for pair in pairs if pair.said is not None]
    if not answered:
        return {"n": len(pairs), "answered": 0}
    errors = [pair.error() for pair in answered]
    sizes = sorted(map(abs, errors))
    ratios = [error + 1 for error in errors]
    by_round = [
        statistics.median(abs((pair.said or 0) / pair.rounds[number] - 1) for pair in answered)
        for number in range(min(len(pair.rounds) for pair in answered))
    ]
    return {
        "n": len(pairs),
        "answered": len(answered),
        "median": round(statistics.median(sizes), 4),
        "by_round": [round(value, 4) for value in (min(by_round), max(by_round))] if by_round else None,
        "p90": round(quantile(sizes, 0.9), 4),
        "worst": round(max(errors, key=abs), 4),
        "false_fits_at_0.8": share([ratio <= 0.8 for ratio in ratios]),
        "false_fits_below_1": share([ratio < 1 for ratio in ratios]),
        "false_refusals_at_1.2": share([ratio > 1.2 for ratio in ratios]),
    }


def percent(value: float, digits: int = 1, sign: str = "") -> str:
    return f"{100 * value:{sign}.{digits}f} %"


def cells(found: dict[str, Any]) -> list[str]:
    if not found["answered"]:
        return [f"0 of {found['n']}"] + [""] * 6
    spread = f" ({100 * found['by_round'][0]:.1f} - {100 * found['by_round'][1]:.1f})" if found["by_round"] else ""
    shares = [f"{100 * found[name]:.0f} %" for name in
              ("false_fits_at_0.8", "false_fits_below_1", "false_refusals_at_1.2")]  # fmt: skip
    middle = [percent(found["median"]) + spread, percent(found["p90"]), percent(found["worst"], 0, "+")]
    return [f"{found['answered']} of {found['n']}", *middle, *shares]


HEAD = ["answered", "median error", "9 of 10 within", "worst", "said to fit in 0.8 x", "just below 1 x",
        "said not to fit in 1.2 x"]  # fmt: skip


# -- the CPU set -------------------------------------------------------------------------------------------------------


def cpu_set(tools: Sequence[str], num_rounds: int, names: Sequence[str]) -> dict[str, Any]:
    """Measure in every round, and ask some of the tools in each."""
    truths: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    answers: dict[str, list[Answer]] = {}
    for number in range(num_rounds):
        for name in names:
            truths[name].append(measured(name))
        for tool in tools[number::num_rounds]:  # an answer is the same each time
            answers[tool] = ask(tool, names)
            print(f"round {number + 1}, {TOOLS[tool]}: {json.dumps(answers[tool])}", file=sys.stderr, flush=True)
    peaks = {name: [peak for _, peak in found] for name, found in truths.items()}
    bases = {name: statistics.median(base for base, _ in found) for name, found in truths.items()}
    found: dict[str, Any] = {"tools": {}, "peaks": peaks, "bases": bases}
    for tool in tools:
        as_said, with_base = [], []
        for name, one in zip(names, answers[tool], strict=True):
            truth = statistics.median(peaks[name])
            said = one["bytes"]
            fair = None if said is None else said - one.get("context_bytes", 0) + bases[name]
            as_said.append(Pair(name, truth, said, list(map(float, peaks[name]))))
            with_base.append(Pair(name, truth, fair, list(map(float, peaks[name]))))
        found["tools"][tool] = {
            "as_said": figures_of(as_said),
            "with_base": figures_of(with_base),
            "errors": {pair.name: None if pair.said is None else round(pair.error(), 4) for pair in with_base},
            "why": [one["error"] for one in answers[tool] if one["bytes"] is None],
            **cost_of(answers[tool]),
            "ranges": ranges_of(answers[tool], names, bases, peaks),
        }
    return found


def cost_of(answers: Sequence[Answer]) -> dict[str, float]:
    seconds = [one["seconds"] for one in answers if one["bytes"] is not None]
    return {
        "seconds": round(statistics.median(seconds), 3),
        "least_seconds": round(min(seconds), 3),
        "most_seconds": round(max(seconds), 3),
        "memory_mib": round(max(one["memory_bytes"] for one in answers) / MIB),
    }


def ranges_of(
    answers: Sequence[Answer], names: Sequence[str], bases: dict[str, float], peaks: dict[str, list[int]]
) -> dict[str, float] | None:
    """Summarize answers with a range: how often it contains the measured value, its width, and its upper end."""
    rows = [(one, one.get("context_bytes", 0) - bases[name], statistics.median(peaks[name]))
            for one, name in zip(answers, names, strict=True) if one.get("high_bytes")]  # fmt: skip
    if not rows:
        return None
    widths = [(one["high_bytes"] - one["low_bytes"]) / 2 / one["bytes"] for one, _, _ in rows]
    ends = [((one["low_bytes"] - off) / truth, (one["high_bytes"] - off) / truth) for one, off, truth in rows]
    return {
        "inside": share([low <= 1 <= high for low, high in ends]),
        "half_width": round(statistics.median(widths), 3),
        "false_fits_below_1": share([high < 1 for _, high in ends]),
        "false_refusals_at_1.2": share([high > 1.2 for _, high in ends]),
    }


# -- the GPU set -------------------------------------------------------------------------------------------------------


def question_of(run: Any) -> list[Any]:
    return [run.model, run.optimizer, run.batch_size, run.zero_grad, run.card]


def gpu_set(tools: Sequence[str], records: Path) -> dict[str, Any]:
    from predict_gpu_measured import CACHE, CONTEXT_BYTES, RIVALS, install, read_runs
    from predict_gpu_measured import figures_of as verdicts_of

    install(CACHE)
    runs, _ = read_runs(records, None)
    questions: list[Question] = [list(one) for one in dict.fromkeys(tuple(question_of(run)) for run in runs)]
    found: dict[str, Any] = {"tools": {}, "published": {}}
    for tool in tools:
        answers = ask(tool, questions, records)
        print(f"GPU runs, {TOOLS[tool]}: {json.dumps(answers)}", file=sys.stderr, flush=True)
        by_question = {tuple(one): answer for one, answer in zip(questions, answers, strict=True)}
        pairs, verdicts = [], []
        for run in runs:
            one = by_question[tuple(question_of(run))]
            outside_bytes = run.plain().outside_bytes
            fair = None if one["bytes"] is None else one["bytes"] - one.get("context_bytes", 0) + outside_bytes
            if not run.is_oom:
                pairs.append(Pair(run.name, run.measured_bytes, fair))
            if fair is not None:
                is_oom = one.get("is_oom", fair > run.capacity_bytes - CONTEXT_BYTES)
                verdicts.append((run, int(fair), is_oom))
        judged = verdicts_of(verdicts)
        found["tools"][tool] = {
            **figures_of(pairs),
            **{name: judged[name] for name in ("ooms", "false_fits", "false_ooms")},
            "why": sorted({one["error"] for one in answers if one["bytes"] is None}),
            **cost_of(answers),
        }
    for name in RIVALS:
        rows = [(run, *run.rivals[name]) for run in runs if name in run.rivals]
        pairs = [Pair(run.name, run.measured_bytes, said) for run, said, _ in rows if not run.is_oom]
        judged = verdicts_of(rows)
        found["published"][name] = {
            **figures_of(pairs), **{key: judged[key] for key in ("ooms", "false_fits", "false_ooms")}
        }  # fmt: skip
    return found


# -- tables ------------------------------------------------------------------------------------------------------------


def winners(found: dict[str, Any]) -> str:
    """List in words the measures in which another tool is better than Plimsoll."""
    own, lines = found["tools"]["plimsoll"], []
    faster = [TOOLS[tool] for tool, one in found["tools"].items() if one["seconds"] < own["seconds"]]
    if faster:
        lines.append(f"Faster than Plimsoll: {', '.join(faster)}.")
    for key in ("median", "p90"):
        better = [TOOLS[tool] for tool, one in found["tools"].items()
                  if (one.get("with_base", one)).get(key, 9) < own.get("with_base", own)[key]]  # fmt: skip
        if better:
            lines.append(f"A smaller {key} error than Plimsoll's: {', '.join(better)}.")
    return " ".join(lines) or "No other tool was better in any of these."


def cpu_parts(found: dict[str, Any]) -> list[str]:
    rows, said, cases = [], [], []
    for tool, one in found["tools"].items():
        cost = [f"{one['seconds']:.2f} ({one['least_seconds']:.2f} - {one['most_seconds']:.2f})",
                f"{one['memory_mib']:,} MiB"]  # fmt: skip
        rows.append([TOOLS[tool], *cells(one["with_base"]), *cost])
        said.append([TOOLS[tool], *cells(one["as_said"])])
    for name, peaks in found["peaks"].items():
        errors = [one["errors"][name] for one in found["tools"].values()]
        spread = f"{min(peaks) / MIB:,.0f} - {max(peaks) / MIB:,.0f}"
        cases.append([name, f"{found['bases'][name] / MIB:,.0f}", f"{statistics.median(peaks) / MIB:,.0f}", spread,
                      *("no answer" if error is None else percent(error, 1, "+") for error in errors)])  # fmt: skip
    names = [TOOLS[tool] for tool in found["tools"]]
    parts = ["## Private memory of trainings on the CPU",
             "With the measured base of the process for everyone, in the place of what the tool assumes of it:",
             markdown(["tool", *HEAD, "seconds", "its memory"], rows), winners(found),
             "As each tool says it, against all private memory of the process:", markdown(["tool", *HEAD], said),
             "Each training, with the measured base; MiB:",
             markdown(["training", "base", "measured", "least - most", *names], cases)]  # fmt: skip
    for tool, one in found["tools"].items():
        if one["ranges"]:
            ends = one["ranges"]
            parts.append(
                f"{TOOLS[tool]} gives a range as well, of {percent(ends['half_width'], 0)} to either side: "
                f"{percent(ends['inside'], 0)} of the measured peaks are inside. Going by its upper end, it calls "
                f"{percent(ends['false_fits_below_1'], 0)} a fit just below 1 x, and "
                f"{percent(ends['false_refusals_at_1.2'], 0)} not one in 1.2 x."
            )
    return parts


def gpu_parts(found: dict[str, Any]) -> list[str]:
    labels = {"xmem": "xMem, as published", "dnnmem": "DNNMem, as published by xMem's authors",
              "schedtune": "SchedTune, the same", "llmem": "LLMem, the same"}  # fmt: skip
    rows = []
    for name, one in [*found["tools"].items(), *found["published"].items()]:
        cost = (
            f"{one['seconds']:.1f} ({one['least_seconds']:.1f} - {one['most_seconds']:.1f})" if "seconds" in one else ""
        )
        wrong = [f"{one['false_fits']} of {one['ooms']}", str(one["false_ooms"])]
        rows.append([TOOLS.get(name) or labels[name], *cells(one), *wrong, cost])
    head = ["tool", *HEAD, "said to fit, ran out", "said not to, fitted", "seconds"]
    whys = [
        f"{TOOLS[tool]} had no answer to some: {why}." for tool, one in found["tools"].items() for why in one["why"]
    ]
    return ["## Memory of runs that others measured on GPUs", markdown(head, rows), winners(found), *whys,
            "The last four rows counted a CUDA context that the measurement leaves out, and draw or read lengths of "
            "their own; they are as published. Where lengths of texts are drawn as in that data set and not taken for "
            "128 tokens, Plimsoll's figures are those of `predict_gpu_measured.py --plain`."]  # fmt: skip


def readme_part(cpu: dict[str, Any], gpu: dict[str, Any] | None) -> str:
    head = ["predicted against measured peaks", f"{len(cpu['peaks'])} CPU trainings: median error", "worst",
            "said to fit in 0.8 x the peak", "seconds"]  # fmt: skip
    if gpu:
        head += [f"{gpu['tools']['plimsoll']['n']} GPU runs: median error", "worst"]
    rows = []
    for tool, one in cpu["tools"].items():
        found = one["with_base"]
        row = [TOOLS[tool], percent(found["median"]), percent(found["worst"], 0, "+"),
               f"{100 * found['false_fits_at_0.8']:.0f} %", f"{one['seconds']:.2f}"]  # fmt: skip
        if gpu:
            row += [percent(gpu["tools"][tool]["median"]), percent(gpu["tools"][tool]["worst"], 0, "+")]
        rows.append(row)
    return markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: %(default)s)")
    parser.add_argument("--records", type=Path, help="CSV file of runs measured on GPUs (default: no GPU runs)")
    parser.add_argument("--data", help="ignored: tokens are random")
    parser.add_argument("--case", action="append", help="only CPU trainings whose name contains this")
    add_out(parser)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answer:
        answer_as_plimsoll(arguments.records)
        return
    tools = list(TOOLS) if python_of("predictors") else ["plimsoll"]
    if len(tools) == 1:
        print("make rivals has not been run: only Plimsoll is asked", file=sys.stderr)
    names = case_names(arguments.case)
    cpu, gpu = cpu_set(tools, arguments.rounds, names), None
    if arguments.records is not None and arguments.records.is_file():
        gpu = gpu_set(tools, arguments.records)
    parts = [*cpu_parts(cpu), *(gpu_parts(gpu) if gpu else [])]
    if gpu is None:
        parts.append("Runs measured on GPUs: left out, since --records does not name a file of them.")
    for one, found in (("CPU", cpu), ("GPU", gpu)):
        if found:
            rows = [[TOOLS[tool], *cells(its.get("with_base", its))] for tool, its in found["tools"].items()]
            show(f"predicted against measured, {one}", ["tool", *HEAD], rows)
    python = python_of("predictors")
    others = versions_in(python, PACKAGES) if python else ()
    text = "\n\n".join([__doc__.split("\n\n", 2)[2].strip(), *parts])
    title = "Peak memory predicted by Plimsoll and by others"
    file_result(arguments.out, "rivals-prediction", title, text, readme_part(cpu, gpu), others=others)
    print(json.dumps({"cpu": cpu, "gpu": gpu}))


def case_names(only: list[str] | None) -> list[str]:
    """Return the names of the trainings, importing their requirements into this process."""
    sys.path.insert(0, str(HERE / "rivals"))
    from trainings import CASES

    return [case.name for case in CASES if only is None or any(part in case.name for part in only)]


if __name__ == "__main__":
    main()
