"""A copy of a job with a remedy applied, written next to the job file."""

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
    """The paths of a job and of its fixed copy.

    Attributes:
        job_file: the job file.
        path: the file to write.
    """

    job_file: Path
    path: Path

    @classmethod
    def beside(cls, job_file: Path, output: Path | None, force: bool) -> FixedJob:
        """Choose the output path and check it, before a diagnosis that takes seconds to minutes.

        Args:
            job_file: the job.
            output: path of the fixed job; ``None`` means NAME-fixed.yaml in the job's folder.
            force: whether an existing file may be overwritten.

        Raises:
            OutputError: if the fixed job cannot be written to that path.
        """
        path = job_file.with_name(f"{job_file.stem}-fixed{job_file.suffix}") if output is None else output
        is_never = path.is_dir() or (path.exists() and job_file.exists() and path.samefile(job_file))
        if path.exists() and (is_never or not force):
            more = "" if is_never else ", or --force"
            raise OutputError(f"{path} exists already and is not overwritten: give another -o{more}")
        if path.suffix not in (".yaml", ".yml"):
            raise OutputError(f"{path} does not have the suffix of a job file: give -o a name that ends in .yaml")
        if not path.parent.is_dir():
            raise OutputError(f"cannot write {path}, there is no folder {path.parent}: make it, or give another -o")
        return cls(job_file, path)

    def write(self, diagnosis: Diagnosis, number: int | None) -> str:
        """Write the job with one remedy applied, and return a sentence about the written file.

        Args:
            diagnosis: the diagnosis of the job or run.
            number: the number of the remedy; ``None`` for the first suitable one (see `chosen_remedy`).

        Raises:
            InputError: if there is no such remedy.
        """
        remedy = chosen_remedy(diagnosis, number)
        write_atomically(self.path, changed_job(self.job_file, self.path, remedy.settings).encode(), "-o/--output")
        name = " + ".join(map(str, remedy.choices))
        return f"{self.path}: the job for {name}; train it with `plimsoll train {self.path}`"


def require_known_training(source: Path, options: Mapping[str, object]) -> Path | None:
    """Return the job file of a job or run; ``None`` for a text or snapshot, whose training is unknown.

    Raises:
        InputError: if one of the options is set for a text or snapshot, to which options do not apply.
    """
    if source.is_dir():
        return source / "job.yaml"
    if is_job(source):
        return source
    given = [name for name, value in options.items() if value]
    if given:
        raise InputError(
            f"{', '.join(given)} is only for jobs and runs, and {source} is a text or a snapshot: give a job "
            "file or a run directory"
        )
    return None


def chosen_remedy(diagnosis: Diagnosis, number: int | None) -> Remedy:
    """Return the remedy with this number.

    Without a number, return the first remedy with which the job fits and that does not change the training.

    Raises:
        InputError: if no remedy was found, or it must be chosen by its number.
    """
    remedies = diagnosis.remedies
    if not remedies:
        raise InputError(
            f"no remedy was found for {diagnosis.subject}, so no job was written: give a --budget that is too small "
            "for it"
        )
    if number is not None:
        if number > len(remedies):
            raise InputError(
                f"--remedy is {number}, but {len(remedies)} were found: give a number from 1 to {len(remedies)}"
            )
        return remedies[number - 1]
    fitting = [one for one in remedies if one.fits]
    found = next((one for one in fitting if not one.changes_training), None)
    if found is not None:
        return found
    if fitting:
        first = remedies.index(fitting[0]) + 1
        raise InputError(
            "every remedy that fits changes the training or its precision, as "
            f"{' + '.join(map(str, fitting[0].choices))} does: choose it with --remedy {first}"
        )
    raise InputError(
        f"none of the {len(remedies)} remedies found fits, so no job was written: give a larger --budget, or choose "
        "one with --remedy"
    )
