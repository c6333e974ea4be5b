"""Hidden commands: the subprocesses that ``plimsoll train``, ``predict``, ``plan`` and ``shrink`` start.

A separate process prepares the data, so that all its memory is freed, above all from training a tokenizer. Training
also runs in a separate process, because the kernel may kill it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer


def prepare_worker(  # noqa: PLR0917 -- typer calls it by name
    directory: Path,
    cache: Path,
    quiet: bool = False,
    again: bool = False,
    pin: Annotated[list[str] | None, typer.Option()] = None,
    forbid: Annotated[list[str] | None, typer.Option()] = None,
    tokenizer_budget_bytes: int | None = None,
) -> None:
    """Prepare the data of a run directory."""
    from plimsoll.training.prepare import prepare_or_restart

    prepare_or_restart(directory, cache, quiet, again, tuple(pin or ()), tuple(forbid or ()), tokenizer_budget_bytes)


def plan_worker(  # noqa: PLR0917 -- typer calls it by name
    directory: Path,
    given: Annotated[Path | None, typer.Option()] = None,
    pin: Annotated[list[str] | None, typer.Option()] = None,
    forbid: Annotated[list[str] | None, typer.Option()] = None,
    quiet: bool = False,
    goes_on: bool = False,
    from_step: int | None = None,
    keep: bool = False,
) -> None:
    """Write the plan of a run directory."""
    from plimsoll.training.plan import plan_run

    plan_run(directory, given, tuple(pin or ()), tuple(forbid or ()), quiet, goes_on, from_step, keep)


def baseline_worker() -> None:
    """Print the memory of a training process before the model is created."""
    from plimsoll.training.baseline import print_baseline

    print_baseline()


def inference_baseline_worker(folder: Path, task: str) -> None:
    """Print the memory of an inference process before the model is loaded."""
    from plimsoll.planning.baseline import print_inference_baseline

    print_inference_baseline(folder, task)


def shrink_worker(request: Path) -> None:
    """Build smaller models for the requests on standard input."""
    from plimsoll.compression.worker import ShrinkRequest, serve

    def answers() -> Mapping[str, Callable[..., Any]]:
        from plimsoll.compression.candidates import answers_of

        return answers_of(ShrinkRequest.load(request))

    serve(answers)


def measure_worker() -> None:
    """Measure inference with the model named on standard input, and print the result."""
    from plimsoll.compression.candidates import print_measured

    print_measured()


def train_worker(  # noqa: PLR0917 -- typer calls it by name
    directory: Path,
    resume: bool = False,
    from_step: int | None = None,
    resume_newest: bool = False,
    fallback: Annotated[int | None, typer.Option()] = None,
    too_large_fallback: Annotated[int | None, typer.Option()] = None,
    restarts: int = 0,
    quiet: bool = False,
    no_trial: Annotated[bool, typer.Option("--no-trial")] = False,
) -> None:
    """Train in a run directory."""
    from plimsoll.distributed.ranks import joined
    from plimsoll.training.session import Session

    with joined() as ranks:
        Session(
            directory,
            resume,
            from_step,
            resume_newest,
            fallback,
            too_large_fallback,
            restarts,
            quiet,
            not no_trial,
            ranks,
        ).run()


def launch_worker(num_ranks: int, arguments: list[str]) -> None:
    """Run a command in several processes that train together."""
    from plimsoll.distributed.launch import launch

    sys.exit(launch(num_ranks, arguments))
