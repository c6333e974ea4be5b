"""The ``plimsoll`` command: the list of its commands, and the one place where an error becomes a sentence and a code.

A command's module is imported when the command is called, so that ``plimsoll --help`` stays quick and torch-free.
"""

from __future__ import annotations

import sys

import typer

from plimsoll.cli import probe, report, train, workers
from plimsoll.errors import PlimsollError

app = typer.Typer(
    name="plimsoll",
    help="PyTorch NLP training that stays inside a memory budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Start with: plimsoll probe; plimsoll train job.yaml --budget 2GiB --out runs/a; "
    "plimsoll report runs/a -o a.html",
)
app.command("probe")(probe.probe)
app.command("train")(train.train)
app.command("report")(report.report)
app.command("train-worker", hidden=True)(workers.train_worker)
app.command("prepare-worker", hidden=True)(workers.prepare_worker)


def main() -> None:
    """Run the command line; the process ends with the exit code of `plimsoll.errors`."""
    try:
        app()
    except PlimsollError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of standard output went away (`plimsoll ... | head`): nothing is left to say to it.
        sys.stderr.close()
        sys.exit(0)
