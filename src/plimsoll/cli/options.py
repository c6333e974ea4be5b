"""Options that several commands share, each defined once, and the groups in which ``--help`` lists options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

JOB = "Job"
MEMORY = "Memory"
PLAN = "Plan"
DATA = "Data"
INFERENCE = "Inference"
OUTPUT = "Output"
OR_ALL_MEMORY = "the job's, else all memory"


class Command(TyperCommand):
    """A command whose help lists ``--help`` in the group of output options.

    By default, typer prints a separate first group that contains only ``--help``.
    """

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option ``--help``."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.rich_help_panel = OUTPUT
        return option


def budget(default: str, group: str = MEMORY) -> Any:
    """Return the option ``--budget``. ``default`` is the text that the help shows as its default."""
    return typer.Option(
        "--budget", metavar="SIZE", help="Memory limit, e.g. 6GiB.", show_default=default, rich_help_panel=group
    )


def calibration(default: str) -> Any:
    """Return the option ``--calibration``. ``default`` is the text that the help shows as its default."""
    return typer.Option(
        "--calibration",
        metavar="FILE",
        help="Calibration record from measured runs.",
        show_default=default,
        rich_help_panel=MEMORY,
    )


def cache(default: str) -> Any:
    """Return the option ``--cache``. ``default`` is the text that the help shows as its default."""
    return typer.Option(
        "--cache",
        metavar="DIR",
        help="Folder for prepared data, such as tokens.",
        show_default=default,
        rich_help_panel=DATA,
    )


def changes(group: str = JOB) -> Any:
    """Return the option ``--set``."""
    return typer.Option(
        "--set", metavar="FIELD=VALUE", help="Change a job field, e.g. batch_size=8; repeatable.", rich_help_panel=group
    )


Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="local, cpu, cuda, or a GPU by name, e.g. rtx3060.",
        show_default="the job's",
        rich_help_panel=MEMORY,
    ),
]
Changes = Annotated[list[str] | None, changes()]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="CHOICE",
        help="Plan with this choice: micro_batch=4; repeatable.",
        show_default="the job's",
        rich_help_panel=PLAN,
    ),
]
Forbids = Annotated[
    list[str] | None,
    typer.Option("--forbid", metavar="TECHNIQUE", help="Exclude a technique; repeatable.", rich_help_panel=PLAN),
]
NoHeader = Annotated[
    bool,
    typer.Option("--no-header", help="First CSV row is data; columns are 1, 2, ...", rich_help_panel=DATA),
]
TASK_HELP = "score, classify, embed or generate."
NEW_TOKENS_HELP = "Maximum tokens to generate per text."
DTYPE_HELP = "Type of the weights: stored, fp32, bf16, fp16."
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Write the result to FILE, as .html or .json.", rich_help_panel=OUTPUT
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the output file.", rich_help_panel=OUTPUT)]
Restart = Annotated[bool, typer.Option("--force", help="Start again and overwrite --out.", rich_help_panel=OUTPUT)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON record and no progress.", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.", rich_help_panel=OUTPUT)]
"""The option ``--quiet`` of every command that shows progress. ``--json`` hides progress, too."""


def _begin_timings(is_wanted: bool) -> bool:
    if is_wanted:
        from plimsoll.files.temporary import own_prefix
        from plimsoll.processes.timings import begin

        begin(own_prefix())
    return is_wanted


Timings = Annotated[
    bool,
    typer.Option(
        "--timings",
        callback=_begin_timings,
        help="Print at the end how long each stage took.",
        rich_help_panel=OUTPUT,
    ),
]
"""The option ``--timings`` of every slow command. `plimsoll.cli.main.main` prints the table."""
