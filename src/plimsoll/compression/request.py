"""The inputs of ``plimsoll shrink``: a run, a job, or a model folder with texts, and options. Does not import torch.

For a folder with texts, a job is created if the model has a trainable task: classification by the labels of the file,
or language modeling. An embedding model has no job, and is evaluated by its vectors.

Not handled: token classifiers given as a folder. They need a job.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plimsoll.compression.chains import Chain
from plimsoll.errors import DataError, InputError, JobError
from plimsoll.records.job import Job
from plimsoll.training.run_directory import RunDirectory

_LONGEST_TOKENS = 256  # per sample of a job created for a folder, if the model allows more
_LENGTH_FIELDS = ("max_position_embeddings", "n_positions")
_HELD_OUT = 0.2
_LEARNING_RATE = 5e-5  # usual for fine-tuning
_RECURRENT = {"lstm", "gru", "rnn"}


@dataclass(frozen=True)
class ShrinkOptions:
    """Options of ``plimsoll shrink``.

    Attributes:
        target_bytes: the limit for the files of weights; ``None``: try every choice alone and select no model.
        budget_bytes: the memory budget of each training run, planned as by ``plimsoll train --budget``; ``None``: train
            without a plan.
        methods: the chain to apply, in this order; empty: search. See `plimsoll.records.shrink.chain_of`.
        forbids: names of methods to leave out.
        recover_steps: steps of recovery training after methods that change shapes; 0 for no training.
        distills: whether recovery training also distills from the original.
        most_tries: the maximum number of chains to make under the target.
        most_samples: the maximum number of samples to evaluate; ``None`` for all.
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
    """A model folder and its evaluation data: a job whose ``model`` is the folder, or texts for an embedding model.

    If the model is from a run directory, ``cache`` is that run's cache of tokenized data, and ``trained`` its record.
    ``is_to_train`` is true if the user gave a job or a run. The peak memory of training each model is then reported.
    ``data`` is the file of texts; `plimsoll.compression.evidence.TextEvidence` describes ``columns`` and
    ``has_header``.
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
        """The files and folders that are read while smaller models are made, which the output must not overwrite."""
        paths = (self.folder, self.data, self.cache, self.trained)
        sources = [] if self.job is None else [Path(one) for one in self.job.data.sources]
        return (*(path for path in paths if path is not None), *sources)

    @property
    def described(self) -> str:
        """A short description of the evaluation data, for the record."""
        if self.job is None:
            return f"the texts of {self.data}"
        validation = self.job.data.validation
        return f"{validation:.0%} of the training data" if isinstance(validation, float) else str(validation)


def decisive(source: ShrinkSource, options: ShrinkOptions) -> dict[str, Any]:
    """Return, as JSON values, the inputs and options on which the model of a chain depends.

    If they are equal, a later command can use the models of an interrupted one. Options that only select chains, such
    as the target, are not included.
    """
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


def find_source(  # noqa: PLR0917 -- options of one command
    model: Path,
    data: Path | None = None,
    columns: tuple[str, ...] | None = None,
    label: str | None = None,
    has_header: bool | None = None,
    changes: tuple[str, ...] = (),
) -> ShrinkSource:
    """Return the model and its evaluation data for the arguments of ``plimsoll shrink``.

    Args:
        model: a run directory, a job file, or the folder of a model.
        data: the file of texts, for a model folder.
        columns: the columns with the text; ``None``: see `plimsoll.data.formats.Reading`.
        label: the column with the class labels, for a classifier.
        has_header: whether the first row of a csv names its columns; ``None``: see `plimsoll.data.formats.Reading`.
        changes: changes of the job's fields, as ``field=value``.

    Raises:
        InputError: if an argument is missing, or contradicts another one.
    """
    is_run = model.is_dir() and (model / "job.yaml").is_file()
    if (is_run or model.is_file()) and (data is not None or columns or label is not None):
        raise InputError(f"{model} already names its data: leave out --data {data}, --column and --label")
    if is_run:
        return _of_run(RunDirectory.open(model), changes)
    if model.is_file():
        return _of_job(model, changes)
    if not (model / "config.json").is_file():
        raise InputError(
            f"there is no model in {model}: give a run directory of `plimsoll train`, a job file, or a folder that "
            "`save_pretrained` wrote"
        )
    if data is None:
        raise DataError(
            f"there is no data to evaluate smaller models of {model} on: give texts with --data, or a job file whose "
            f"`model` is {model}"
        )
    return _of_folder(model, data, columns, label, has_header, changes)


def _of_run(run: RunDirectory, changes: tuple[str, ...]) -> ShrinkSource:
    given = Job.from_yaml(run.job, changes)
    if not (run.model / "config.json").is_file():
        if any(run.model.glob("*.safetensors")):
            raise JobError(
                f"the run {run.path} trained {given.model}, a model defined by your code, but compression methods "
                "support only transformers models, lstm, gru and rnn: use torchao's `quantize_` in your code"
            )
        raise JobError(
            f"the run {run.path} has no model yet: run `plimsoll train --resume --out {run.path}` to finish it"
        )
    job = _ready(given, run.model)
    record = run.record if run.record.is_file() else None
    cache = run.cache if run.cache.is_dir() else None
    return ShrinkSource(run.model, job, cache=cache, trained=record)


def _of_job(path: Path, changes: tuple[str, ...]) -> ShrinkSource:
    job = Job.from_yaml(path, changes)
    folder = Path(job.model) if isinstance(job.model, str) else None
    if folder is None or not (folder / "config.json").is_file():
        raise JobError(
            f"model: {job.model} in {path} is not a folder with weights, so there is nothing to make smaller: train it "
            f"first (`plimsoll train {path} --out RUN`) and give the run"
        )
    return ShrinkSource(folder, _ready(job, folder))


def _of_folder(  # noqa: PLR0917 -- options of one command
    folder: Path,
    data: Path,
    columns: tuple[str, ...] | None,
    label: str | None,
    has_header: bool | None,
    changes: tuple[str, ...],
) -> ShrinkSource:
    config = _config(folder)
    task = _task(config, folder)
    if task is None:
        if label is not None or changes:
            given = f"--label {label}" if label is not None else f"--set {changes[0]}"
            raise InputError(f"{folder} is an embedding model, which has no labels and no job: leave out {given}")
        if not data.is_file():
            raise DataError(f"there is no file {data}: give --data a file of texts")
        return ShrinkSource(folder, data=data, columns=columns, has_header=has_header)
    if (task == "classification") != (label is not None):
        what = (
            "needs the column of the labels: give --label"
            if label is None
            else f"has no use for --label {label}: leave it out"
        )
        raise InputError(f"{folder} is a model for {task} and {what}")
    limits = [config[name] for name in _LENGTH_FIELDS if isinstance(config.get(name), int)]
    source = {
        "train": str(data),
        "validation": _HELD_OUT,
        "text": list(columns) if columns else None,
        "label": label,
        "header": has_header,
    }
    fields: dict[str, Any] = {
        "model": str(folder),
        "task": task,
        "tokenizer": str(folder),
        "data": {name: value for name, value in source.items() if value is not None},
        "sequence_length": min([_LONGEST_TOKENS, *limits]),
        "optimizer": {"name": "adamw", "lr": _LEARNING_RATE},
    }
    return ShrinkSource(folder, _ready(Job.from_plain(fields, Path(), changes), folder), is_to_train=False)


def _ready(job: Job, folder: Path) -> Job:
    """Return the job for training and evaluating smaller models of ``folder``.

    Raises:
        DataError: if the job has no validation data.
    """
    if not job.data.validation:
        raise DataError(
            f"data.validation is {job.data.validation}, so smaller models cannot be evaluated: set data.validation to "
            "a file, or with --set data.validation=0.1 to a share of the training data"
        )
    changes: dict[str, Any] = {"model": str(folder.resolve()), "embeddings": None, "distill": None}
    if job.data.order == "streams":  # a smaller model cannot use the original's recurrent state
        changes["data"] = job.data.model_copy(update={"order": "shuffle", "reset": None})
    return job.model_copy(update=changes)


def _task(config: dict[str, Any], folder: Path) -> str | None:
    if config.get("architecture") in _RECURRENT:
        if config.get("is_tagger"):
            raise InputError(f"{folder} is a token classifier: give a job file whose `model` is that folder")
        return "language-modeling" if config.get("num_labels") is None else "classification"
    if (folder / "modules.json").is_file():
        return None
    names = tuple(map(str, config.get("architectures") or ()))
    if any(name.endswith("ForTokenClassification") for name in names):
        raise InputError(f"{folder} is a token classifier: give a job file whose `model` is that folder")
    if any(name.endswith("ForSequenceClassification") for name in names):
        return "classification"
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        return "language-modeling"
    for name in names:
        if not name.endswith("Model"):
            raise InputError(
                f"{folder} is a {name}, whose head is not supported: give a classifier, a causal language model, or "
                "the model without a head"
            )
    return None


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JobError(
            f"{folder} is not a model folder, its config.json cannot be read ({error}): save or download it again"
        ) from None
    if not isinstance(config, dict):
        raise JobError(f"the config.json of {folder} is not an object of settings: save or download the model again")
    return config
