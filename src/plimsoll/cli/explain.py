"""``plimsoll explain``: what uses memory, or why it ran out, what would free it, and the job changed so."""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from plimsoll.cli.options import Quiet

if TYPE_CHECKING:
    from plimsoll.records.diagnosis import Diagnosis, Remedy

_STANDARD_INPUT = Path("-")
_LARGE_BYTES = 32 << 20  # read in about a second
_HEAD_BYTES = 1 << 12


def explain(  # noqa: PLR0917 -- typer calls it by name
    source: Annotated[
        Path,
        typer.Argument(
            metavar="[SOURCE]",
            help="A job, a run directory, or a file with an error's text, a log, a watch or a snapshot; - reads.",
        ),
    ] = _STANDARD_INPUT,
    budget: Annotated[
        str | None, typer.Option(help="Memory the training may use, e.g. 2GiB. Default: the job's, or what there is.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where it trains: local, cpu, cuda, or a device by name. Default: the job's.")
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the job changed by the first remedy that fits.")
    ] = False,
    remedy: Annotated[
        int | None, typer.Option(min=1, help="With --apply: the number of another remedy of the table.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="With --apply: where. Default: beside the job, as NAME-fixed.yaml."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output.")] = False,
    quiet: Quiet = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON record instead of tables.")] = False,
) -> None:
    """Say what uses memory, or why it ran out, and what would free it. Ends with 1 if it found something, else with 0.

    \b
    Examples:
      plimsoll explain job.yaml --budget 2GiB
      plimsoll explain job.yaml --budget 2GiB --apply -o smaller.yaml
      plimsoll explain runs/a
      plimsoll explain runs/a --apply --remedy 2
      plimsoll explain train.log
      plimsoll explain snapshot.pickle
      python train.py 2>&1 | plimsoll explain
      plimsoll explain runs/a --json
      plimsoll explain watch.jsonl
      zcat snapshot.pickle.gz | plimsoll explain
    """
    from plimsoll.cli.answer import answering, limit_bytes_of
    from plimsoll.cli.output import show
    from plimsoll.report.render import render

    with answering("the explanation", as_json):
        limit_bytes = limit_bytes_of(budget)
        _check_apply(apply, remedy, output)
        job_file = _job_file(source, {"--apply": apply, "--budget": budget, "--device": device})
        changed = _output(job_file, output, force) if apply and job_file else None
        diagnosis = _diagnosis(source, device, limit_bytes, quiet or as_json)
        if not as_json:
            show(render(diagnosis, "text"))
        if changed is not None and job_file is not None:
            _write(job_file, changed, _chosen(diagnosis, remedy))
        if as_json:  # one record: this, or why no job was written
            show(render(diagnosis, "json"))
    if diagnosis.has_answer:
        raise typer.Exit(1)


def _check_apply(apply: bool, remedy: int | None, output: Path | None) -> None:
    from plimsoll.errors import InputError

    if not apply and (remedy is not None or output is not None):
        given = f"--remedy {remedy}" if remedy is not None else f"-o {output}"
        raise InputError(f"{given} is of a job that is written: add --apply, or leave it out")


def _job_file(source: Path, options: dict[str, object]) -> Path | None:
    """The job file of what is explained; ``None`` for a text, of which these options cannot be."""
    from plimsoll.diagnose.explain import is_job
    from plimsoll.errors import InputError

    if source.is_dir():
        return source / "job.yaml"
    if is_job(source):
        return source
    given = [name for name, value in options.items() if value]
    if given:
        raise InputError(
            f"{', '.join(given)} is for a training that is known, and {source} is a text or a snapshot: give a job "
            "file or a run directory"
        )
    return None


def _output(job_file: Path, output: Path | None, force: bool) -> Path:
    """Where the changed job goes; refused before the work, which takes seconds to minutes."""
    from plimsoll.errors import OutputError

    path = job_file.with_name(f"{job_file.stem}-fixed{job_file.suffix}") if output is None else output
    is_never = path.is_dir() or (path.exists() and job_file.exists() and path.samefile(job_file))
    if path.exists() and (is_never or not force):
        more = "" if is_never else ", or --force"
        raise OutputError(f"{path} exists already and is not overwritten: give another -o{more}")
    if path.suffix not in (".yaml", ".yml"):
        raise OutputError(f"{path} would not be known for a job file by its name: give -o a name in .yaml")
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}, there is no folder {path.parent}: make it, or give another -o")
    return path


def _diagnosis(source: Path, device: str | None, limit_bytes: int | None, quiet: bool) -> Diagnosis:
    from plimsoll.diagnose.explain import explain as diagnose
    from plimsoll.diagnose.of_text import diagnosis_of_text
    from plimsoll.diagnose.snapshot.read import is_snapshot
    from plimsoll.errors import InputError
    from plimsoll.records.watch import is_recording
    from plimsoll.report.progress import spinner, stages

    if source == _STANDARD_INPUT:
        if sys.stdin.isatty():
            raise InputError(f"{source} reads standard input, which is a terminal here: give a run directory or a file")
        stream = cast(io.BufferedReader, sys.stdin.buffer)
        with _spooled(stream) as path:
            return diagnosis_of_text(stream, "standard input") if path is None else diagnose(path)
    is_long = source.is_file() and source.stat().st_size > _LARGE_BYTES
    if is_long and not is_recording(source) and not is_snapshot(source):
        num_bytes = source.stat().st_size
        with stages(quiet) as report, source.open("rb") as file:
            return diagnosis_of_text(file, source.name, lambda done: report("reading", min(done, num_bytes), num_bytes))
    with spinner(quiet) as progress:
        return diagnose(source, device=device, budget=limit_bytes, progress=progress)


@contextmanager
def _spooled(stream: io.BufferedReader) -> Iterator[Path | None]:
    """What is piped as a file for a while, where it must be gone through more than once; ``None`` of a text."""
    from plimsoll.diagnose.snapshot.read import is_snapshot
    from plimsoll.records.watch import is_recording

    with tempfile.TemporaryDirectory(prefix="plimsoll-") as folder:
        path = Path(folder) / "standard input"
        path.write_bytes(stream.peek(_HEAD_BYTES))
        if not (is_snapshot(path) or is_recording(path)):
            yield None
            return
        with path.open("wb") as file:
            shutil.copyfileobj(stream, file)
        yield path


def _chosen(diagnosis: Diagnosis, number: int | None) -> Remedy:
    """The remedy to apply; by itself only one that fits and leaves the training as it is."""
    from plimsoll.errors import InputError

    remedies = diagnosis.remedies
    if not remedies:
        raise InputError(
            f"no remedy was found for {diagnosis.subject}, so no job was written: give a --budget that it does not fit"
        )
    if number is not None:
        if number > len(remedies):
            raise InputError(
                f"--remedy {number} is not one of the {len(remedies)} that were found: give 1 to that many"
            )
        return remedies[number - 1]
    fitting = [one for one in remedies if one.fits]
    found = next((one for one in fitting if not one.changes_training), None)
    if found is not None:
        return found
    if fitting:
        first = remedies.index(fitting[0]) + 1
        raise InputError(
            f"what fits changes the training or its precision, as {' + '.join(map(str, fitting[0].choices))} does: "
            f"choose it with --remedy {first}"
        )
    raise InputError(
        f"none of the {len(remedies)} remedies that were found fits, so no job was written: give a larger --budget, or "
        "choose one with --remedy"
    )


def _write(job_file: Path, path: Path, remedy: Remedy) -> None:
    from plimsoll.records.base import write_atomically
    from plimsoll.records.job_edit import changed_job

    write_atomically(path, changed_job(job_file, path, remedy.settings).encode(), "-o/--output")
    name = " + ".join(map(str, remedy.choices))
    print(f"{path}: the job for {name}; train it with `plimsoll train {path}`", file=sys.stderr)
