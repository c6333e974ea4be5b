"""The ``plimsoll`` command: its subcommands, and the conversion of errors to messages and exit codes.

Each command imports the modules it needs when it is called. ``plimsoll --help`` is therefore fast and without torch.
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
from plimsoll.cli.options import Command
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
      plimsoll train job.yaml --budget 2GiB --out runs/a
      plimsoll predict job.yaml --device rtx3060
      plimsoll report runs/a -o a.html
      plimsoll explain train.log
      plimsoll lint train.py
    """


app.command("probe", cls=Command)(probe.probe)
app.command("predict", cls=Command)(predict.predict)
app.command("plan", cls=Command)(plan.plan)
app.command("train", cls=Command)(train.train)
app.command("apply", cls=Command)(apply.apply)
app.command("shrink", cls=Command)(shrink.shrink)
app.command("explain", cls=Command)(explain.explain)
app.command("lint", cls=Command)(lint.lint)
app.command("report", cls=Command)(report.report)
app.command("watch", cls=Command)(watch.watch)
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
    """Run the command line, and exit with the exit code of the error (see `plimsoll.errors`).

    After Ctrl-C, typer exits with 130. Results are printed by `plimsoll.cli.output.show`, which handles a closed pipe
    (``| head``).
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
        # CPython 3.11 to 3.13: after Ctrl-C during an exec() of text, `python -m` ends by the signal instead of the
        # exit code, although the interrupt was caught. Dataclasses call exec(). A successful exec() resets this.
        exec("")
