"""The ``plimsoll`` command: the list of its commands, and the one place where an error becomes a sentence and a code.

A command's module is imported when the command is called, so that ``plimsoll --help`` stays quick and torch-free.
"""

from __future__ import annotations

import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from plimsoll.cli import (
    apply,
    cache,
    data,
    embeddings,
    explain,
    lint,
    plan,
    predict,
    probe,
    report,
    shrink,
    train,
    watch,
    workers,
)
from plimsoll.cli.output import format_warning, say_failure, tell
from plimsoll.device.cpu.threads import spin_briefly
from plimsoll.errors import PlimsollError
from plimsoll.processes import timings
from plimsoll.processes.children import end_as_asked

app = typer.Typer(
    name="plimsoll",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"plimsoll {version('torch-plimsoll')}")
        raise typer.Exit


@app.callback()
def _of_every_command(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """PyTorch NLP training that stays inside a memory budget.

    \b
    Examples:
      plimsoll probe
      plimsoll predict job.yaml --device rtx3060
      plimsoll plan job.yaml --budget 6GiB
      plimsoll train job.yaml --budget 2GiB --out runs/a
      plimsoll apply runs/a --data reviews.jsonl --out labels.jsonl
      plimsoll shrink runs/a --target 5MiB --recover 200 --out small
      plimsoll explain runs/a
      plimsoll lint train.py
      plimsoll report runs/a -o a.html
      plimsoll watch runs/a
      plimsoll data inspect job.yaml
      plimsoll cache
      plimsoll embeddings subset glove.6B.zip/glove.6B.300d.txt --vocabulary words.txt
    """


app.command("probe")(probe.probe)
app.command("predict")(predict.predict)
app.command("plan")(plan.plan)
app.command("train")(train.train)
app.command("apply")(apply.apply)
app.command("shrink")(shrink.shrink)
app.command("explain")(explain.explain)
app.command("lint")(lint.lint)
app.command("report")(report.report)
app.command("watch")(watch.watch)
app.add_typer(cache.app, name="cache")
app.add_typer(data.app, name="data")
app.add_typer(embeddings.app, name="embeddings")
app.command("train-worker", hidden=True)(workers.train_worker)
app.command("launch-worker", hidden=True, context_settings={"ignore_unknown_options": True})(workers.launch_worker)
app.command("prepare-worker", hidden=True)(workers.prepare_worker)
app.command("plan-worker", hidden=True)(workers.plan_worker)
app.command("baseline-worker", hidden=True)(workers.baseline_worker)
app.command("shrink-worker", hidden=True)(workers.shrink_worker)
app.command("measure-worker", hidden=True)(workers.measure_worker)
app.command("inference-baseline-worker", hidden=True)(workers.inference_baseline_worker)


def main() -> None:
    """Run the command line; the process ends with the exit code of `plimsoll.errors`.

    Typer itself ends it with 130 after Ctrl-C. Results are printed by `plimsoll.cli.output.show`, which bears that
    their reader goes away (``| head``).
    """
    end_as_asked()
    spin_briefly()
    warnings.formatwarning = format_warning
    if sys.argv[1:2] == ["fork-server"]:
        from plimsoll.training.processes import forked_as

        sys.argv[1:] = forked_as(Path(sys.argv[2]))
    try:
        app()
    except PlimsollError as error:
        say_failure(error)
        tell(error)
        sys.exit(error.exit_code)
    finally:
        timings.end()
        # CPython 3.11 to 3.13: where Ctrl-C arrived in an exec() of text, as it may while dataclasses are made, a
        # `python -m` ends by the signal and not with the code, though it was caught. A good exec() undoes it.
        exec("")
