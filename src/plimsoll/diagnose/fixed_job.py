"""The job changed by a remedy that was found for it, written beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from plimsoll.diagnose.explain import is_job
from plimsoll.errors import InputError, OutputError
from plimsoll.records.base import write_atomically
from plimsoll.records.diagnosis import Diagnosis, Remedy
from plimsoll.records.job_edit import changed_job


class FixedJob(NamedTuple):
    """A job file, and where the job goes that is changed by a remedy."""

    job_file: Path
    path: Path

    @classmethod
    def beside(cls, job_file: Path, output: Path | None, force: bool) -> FixedJob:
        """Choose where it goes; refused before the work, which takes seconds to minutes.

        Args:
            job_file: the job.
            output: where it goes; ``None``: beside the job, as NAME-fixed.yaml.
            force: whether an existing file may be overwritten.

        Raises:
            OutputError: if it cannot go there.
        """
        path = job_file.with_name(f"{job_file.stem}-fixed{job_file.suffix}") if output is None else output
        is_never = path.is_dir() or (path.exists() and job_file.exists() and path.samefile(job_file))
        if path.exists() and (is_never or not force):
            more = "" if is_never else ", or --force"
            raise OutputError(f"{path} exists already and is not overwritten: give another -o{more}")
        if path.suffix not in (".yaml", ".yml"):
            raise OutputError(f"{path} would not be known for a job file by its name: give -o a name in .yaml")
        if not path.parent.is_dir():
            raise OutputError(f"cannot write {path}, there is no folder {path.parent}: make it, or give another -o")
        return cls(job_file, path)

    def write(self, diagnosis: Diagnosis, number: int | None) -> str:
        """Write the job changed by the remedy of that number, or by the first that fits; returns a sentence of it.

        Raises:
            InputError: if there is no such remedy.
        """
        remedy = chosen_remedy(diagnosis, number)
        write_atomically(self.path, changed_job(self.job_file, self.path, remedy.settings).encode(), "-o/--output")
        name = " + ".join(map(str, remedy.choices))
        return f"{self.path}: the job for {name}; train it with `plimsoll train {self.path}`"


def require_known_training(source: Path, options: Mapping[str, object]) -> Path | None:
    """Return the job file of what is explained; ``None`` for a text, of which these options cannot be.

    Raises:
        InputError: if one of them is given all the same.
    """
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


def chosen_remedy(diagnosis: Diagnosis, number: int | None) -> Remedy:
    """Return the remedy to apply; by itself only one that fits and leaves the training as it is.

    Raises:
        InputError: if there is none, or it must be chosen by its number.
    """
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
