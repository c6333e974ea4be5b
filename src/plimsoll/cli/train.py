"""``plimsoll train``: a job trained inside its budget, under a supervisor."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from plimsoll.cli.options import Changes, Quiet, Timings


# long: its options
def train(  # noqa: PLR0917 -- typer calls it by name
    job_file: Annotated[
        Path | None, typer.Argument(metavar="JOB", help="The job file; left out with --resume.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The run directory.")] = Path("runs/latest"),
    budget: Annotated[str | None, typer.Option(help="Memory the training may use, e.g. 2GiB.")] = None,
    changes: Changes = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out from its newest checkpoint.")
    ] = False,
    from_step: Annotated[int | None, typer.Option(help="With --resume: the checkpoint to go on from.")] = None,
    plan: Annotated[Path | None, typer.Option(help="Run exactly this plan, made by `plimsoll plan -o`.")] = None,
    no_plan: Annotated[
        bool, typer.Option("--no-plan", help="Use no technique: begin with the whole batch, and halve it when need be.")
    ] = False,
    no_trial: Annotated[
        bool, typer.Option("--no-trial", help="Believe the plan: do not run others that are about as fast first.")
    ] = False,
    pins: Annotated[
        list[str] | None, typer.Option("--pin", metavar="CHOICE", help="Use this in the plan: checkpointing=all.")
    ] = None,
    forbids: Annotated[
        list[str] | None, typer.Option("--forbid", metavar="TECHNIQUE", help="Do not use this in the plan.")
    ] = None,
    num_ranks: Annotated[
        int | None,
        typer.Option("--nproc", min=1, help="Processes of this machine that share each batch; the budget is of each."),
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="Where tokens are kept; by default in the run directory.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Remove what is in --out first.")] = False,
    quiet: Quiet = False,
    _timings: Timings = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON record, also of a failure; no progress.")
    ] = False,
) -> None:
    """Train a job inside a memory budget, with the fastest plan that fits; survive running out of memory.

    \b
    Examples:
      plimsoll train job.yaml --budget 2GiB --out runs/a
      plimsoll train job.yaml --plan plan.json --out runs/a
      plimsoll train job.yaml --budget 2GiB --pin checkpointing=all --forbid activation_offload --out runs/b
      plimsoll train job.yaml --set steps=500 --set optimizer.lr=1e-3 --out runs/b
      plimsoll train --resume --out runs/a
      plimsoll train --resume --out runs/a --budget 1500MiB --from-step 100
      plimsoll train job.yaml --nproc 4 --out runs/d
      torchrun --nnodes 2 --nproc-per-node 4 --max-restarts 9 --rdzv-backend c10d --rdzv-endpoint host:29500 \\
        -m plimsoll train job.yaml --out /shared/runs/e
    """
    from plimsoll.cli.answer import limit_bytes_of, show_record
    from plimsoll.processes.children import is_rank
    from plimsoll.training.start import TrainRequest, start

    is_silent = is_rank() and os.environ["RANK"] != "0"
    with _failures_shown(out) if as_json and not is_silent else nullcontext():
        request = TrainRequest(
            out=out,
            job_file=job_file,
            budget_bytes=limit_bytes_of(budget),
            changes=tuple(changes or ()),
            resume=resume,
            from_step=from_step,
            given_plan=plan,
            has_plan=not no_plan,
            trial=not no_trial,
            pins=tuple(pins or ()),
            forbids=tuple(forbids or ()),
            num_ranks=num_ranks,
            cache=cache,
            force=force,
            quiet=quiet or as_json,
        )
        if code := start(request):
            sys.exit(code)
    if not is_silent:
        from plimsoll.records.run import RunRecord

        show_record(RunRecord.from_directory(out), as_json)


@contextmanager
def _failures_shown(out: Path) -> Iterator[None]:
    """Print one JSON record if the block ends in a failure: the run's, if it failed in training, or the failure."""
    from plimsoll.cli.output import failure_of, show, told, told_by
    from plimsoll.errors import PlimsollError
    from plimsoll.training.run_directory import failed_run, metrics_of

    metrics_before = metrics_of(out)
    with told() as file:
        try:
            yield
        except (PlimsollError, SystemExit) as end:
            record = failed_run(out, metrics_before)
            failure = failure_of(end) if isinstance(end, PlimsollError) else told_by(file, int(end.code or 0))
            show(failure if record is None else record.to_json())
            raise
