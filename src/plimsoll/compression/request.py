"""What ``plimsoll shrink`` is to do: what is wanted, of which model, judged by what; torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plimsoll.compression.processes import Chain
from plimsoll.records.job import Job


@dataclass(frozen=True)
class ShrinkOptions:
    """What is wanted.

    Attributes:
        target_bytes: of the files of weights; ``None``: every method is tried alone, and no model is chosen.
        budget_bytes: that each training here stays inside, planned as ``plimsoll train --budget`` does it.
        methods: exactly this chain, in this order; empty: search. See `plimsoll.records.shrink.chain_of`.
        forbids: names of methods that are not used.
        recover_steps: of training behind what changed shapes; 0 for none.
        distills: whether that training also follows the original's answers.
        most_tries: chains that are made under the target.
        most_samples: of the evaluation; ``None`` for all.
    """

    target_bytes: int | None = None
    budget_bytes: int | None = None
    methods: Chain = ()
    forbids: tuple[str, ...] = ()
    recover_steps: int = 0
    distills: bool = True
    most_tries: int = 4
    most_samples: int | None = None


@dataclass(frozen=True)
class ShrinkSource:
    """The model, and what it is judged by: a job whose ``model`` is the folder, or texts for a model of embeddings.

    ``cache`` holds the tokens of the job already, where it was trained here; ``trained`` is the record of that run.
    ``is_to_train`` says that the job is of a training that the user described, whose peak is of interest.
    """

    folder: Path
    job: Job | None = None
    data: Path | None = None
    columns: tuple[str, ...] | None = None
    has_header: bool | None = None
    cache: Path | None = None
    trained: Path | None = None
    is_to_train: bool = True

    @property
    def belongings(self) -> tuple[Path, ...]:
        """What is read while smaller models are made."""
        paths = (self.folder, self.data, self.cache, self.trained)
        sources = [] if self.job is None else [Path(one) for one in self.job.data.sources]
        return (*(path for path in paths if path is not None), *sources)

    @property
    def described(self) -> str:
        """What the quality is measured on, in words."""
        if self.job is None:
            return f"the texts of {self.data}"
        validation = self.job.data.validation
        return f"{validation:.0%} of the training data" if isinstance(validation, float) else str(validation)


def decisive(source: ShrinkSource, options: ShrinkOptions) -> dict[str, Any]:
    """Return what decides what each chain comes to; which chains are made may differ from one command to the next."""
    model = sorted(path for path in source.folder.iterdir() if path.is_file())
    data = [] if source.data is None else [source.data]
    return {
        "model": [_stamp(path) for path in model],
        "job": None if source.job is None else source.job.model_dump(mode="json"),
        "data": [[_stamp(path) for path in data], list(source.columns or ()), source.has_header],
        "samples": options.most_samples,
        "recovery": [options.recover_steps, options.distills, options.budget_bytes] if options.recover_steps else None,
    }


def _stamp(path: Path) -> list[Any]:
    facts = path.stat()
    return [path.name, facts.st_size, facts.st_mtime_ns]
