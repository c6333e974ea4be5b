"""The job file ``job.yaml``: the model, the data, the budget and all other settings of a run.

`docs/job.md` describes every field. This module reads job files, applies ``--set a.b=c``, and does the checks that need
neither files nor a model. Does NOT check that paths exist or that a model can be built: those errors are raised when
the files are opened and the model is built.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from plimsoll.errors import JobError
from plimsoll.records.augmentation import Augmentation
from plimsoll.records.base import Frozen, Record
from plimsoll.records.device import Budget
from plimsoll.records.distill import DistillSource
from plimsoll.records.embeddings import VectorSource
from plimsoll.records.job_yaml import near, parse_value, read_fields
from plimsoll.records.plan import PinText
from plimsoll.records.tokenizer import TokenizerSource as TokenizerSource  # noqa: PLC0414 -- public here

HUB_PREFIX = "hf:"  # prefix of the name of a dataset on the Hugging Face hub
_NOT_EMPTY = Field(min_length=1)
_Column = Annotated[
    str, _NOT_EMPTY, BeforeValidator(lambda name: str(name) if isinstance(name, int) else name)
]  # YAML reads a column named 1 as an int


def _is_share(value: Any) -> bool:
    """Return whether a value is a quoted share such as ``"0.02"``, not a path."""
    return isinstance(value, str) and re.fullmatch(r"0?\.\d+", value) is not None


def _share_of(value: Any) -> Any:
    if value == "":
        raise ValueError("it is empty: give a path, a share such as 0.02, or leave it out")
    return float(value) if _is_share(value) else value


class DataSource(Frozen):
    """The text files and how they become samples. `docs/job.md` explains every field.

    ``validation`` is a path, or the share (0 to 1) of the training samples that is held out; ``None``: no validation.
    """

    train: Annotated[str, Field(min_length=1)] | Annotated[tuple[Annotated[str, Field(min_length=1)], ...], _NOT_EMPTY]
    validation: Annotated[str | float | None, BeforeValidator(_share_of)] = None
    unit: Literal["document", "line", "paragraph"] = "document"
    text: _Column | Annotated[tuple[_Column, ...], _NOT_EMPTY] | None = None
    label: _Column | None = None
    escapes: bool = False
    quotes: bool = True
    header: bool | None = None
    on_error: Literal["stop", "skip"] = "stop"
    long_texts: Literal["window", "truncate", "stop"] = "window"
    stride: int | None = Field(default=None, ge=1)
    borders: Literal["sentence", "paragraph"] | None = None
    pack: bool = False
    order: Literal["shuffle", "by_length", "blocks", "as_is", "streams"] = "shuffle"
    reset: Literal["texts"] | None = None
    augment: Augmentation | None = None
    on_the_fly: bool = False
    workers: Annotated[int, Field(ge=0, le=1024, strict=True)] | Literal["auto"] = "auto"

    @field_validator("validation")
    @classmethod
    def _share(cls, value: str | float | None) -> str | float | None:
        if isinstance(value, float) and not 0 <= value < 1:
            raise ValueError("a held-out share is from 0 to less than 1, for example 0.02")
        return value

    @model_validator(mode="after")
    def _agrees(self) -> DataSource:
        if self.pack and (self.borders or self.stride or self.on_the_fly):
            raise ValueError("pack: true puts whole texts into rows: leave out borders, stride and on_the_fly")
        if self.stride and (self.borders or self.long_texts != "window"):
            raise ValueError(
                f"stride {self.stride} is for windows that do not end at borders, and long_texts {self.long_texts!r} "
                "makes no windows: leave out stride, or borders and long_texts"
            )
        if self.on_the_fly and (self.borders or self.stride or self.long_texts == "window"):
            raise ValueError(
                "on_the_fly: true cannot cut texts into windows, because text lengths are unknown: leave out "
                "borders and stride and add `long_texts: truncate` or `long_texts: stop`, or tokenize once"
            )
        if self.order == "streams" and (self.pack or self.borders or self.stride or self.on_the_fly):
            raise ValueError(
                "order: streams reads all texts concatenated, window after window: leave out pack, borders, stride "
                "and on_the_fly"
            )
        if self.reset and self.order != "streams":
            raise ValueError(
                f"reset {self.reset!r} needs order: streams, and order is {self.order!r}: "
                "leave out reset, or use order: streams"
            )
        if self.augment and self.augment.changes_text and not self.on_the_fly:
            raise ValueError(
                "augment changes words, which needs texts that are tokenized when they are read: add "
                "`on_the_fly: true`, or change tokens (mask, delete, swap, token_function)"
            )
        return self

    @property
    def has_padding(self) -> bool:
        """True if samples of language modelling differ in length, so that batches are padded."""
        return self.on_the_fly or self.borders is not None

    @property
    def sources(self) -> tuple[str, ...]:
        """The entries of ``train`` as a tuple."""
        return (self.train,) if isinstance(self.train, str) else self.train


class OptimizerChoice(Frozen):
    """A ``torch.optim`` optimizer by name, its learning rate and schedule, and its other arguments.

    ``clip_norm`` is the maximum norm of the gradients; ``None``: gradients are not clipped.
    """

    name: str = "adamw"
    lr: float = Field(default=3e-4, gt=0, allow_inf_nan=False)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    clip_norm: float | None = Field(default=None, gt=0)
    arguments: dict[str, Any] = {}


class CheckpointPolicy(Frozen):
    """The number of steps between checkpoints (``every``) and how many of the last checkpoints are kept (``keep``)."""

    every: int = Field(default=50, ge=1)
    keep: int = Field(default=2, ge=1)


RECUTS = ("recut_batch_norm", "recut_loss")
"""The values of ``allow`` that are not techniques: they allow splitting a batch although the result changes."""

Task = Literal["language-modeling", "classification", "token-classification"]


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class Job(Record):
    """All settings of a run. Two runs of the same job train the same model in the same way."""

    record_kind: ClassVar[str] = "job"

    model: str | dict[str, Any]
    task: Task = "language-modeling"
    data: DataSource
    tokenizer: TokenizerSource = TokenizerSource()
    embeddings: VectorSource | None = None
    distill: DistillSource | None = None
    sequence_length: int = Field(default=256, ge=2)
    batch_size: int = Field(default=32, ge=1)
    batch_tokens: int | None = Field(default=None, ge=1)
    optimizer: OptimizerChoice = OptimizerChoice()
    steps: int = Field(default=100, ge=1)
    precision: Literal["fp32", "bf16", "fp16", "auto"] = "fp32"
    quantization_aware: Literal["int8", "int4"] | None = None
    allow: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    pin: Annotated[tuple[PinText, ...], BeforeValidator(_listed)] = ()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    ranks: int = Field(default=1, ge=1)
    budget: Budget = Budget()
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    evaluate_every: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0, lt=1 << 63)

    @model_validator(mode="before")
    @classmethod
    def _sized_by_tokens(cls, fields: Any) -> Any:
        if not isinstance(fields, dict) or "batch_size" in fields or not isinstance(fields.get("batch_tokens"), int):
            return fields
        length = fields.get("sequence_length", cls.model_fields["sequence_length"].default)
        is_usable = isinstance(length, int) and 0 < length <= fields["batch_tokens"]
        return fields | ({"batch_size": fields["batch_tokens"] // length} if is_usable else {})

    @model_validator(mode="after")
    def _agrees(self) -> Job:
        data, is_labelled = self.data, self.is_labelled
        if data.label and not is_labelled:
            raise ValueError(f"data.label names a column of classes, but the task is {self.task}: leave it out")
        if data.long_texts != "window" and not (is_labelled or data.pack or data.has_padding):
            raise ValueError(
                f"data.long_texts {data.long_texts!r} is for texts that are samples, but language-modeling cuts "
                "windows from all texts concatenated: leave it out, or set data.pack or data.borders"
            )
        if data.augment and data.augment.mask and self.tokenizer.path is None:
            raise ValueError(
                f"data.augment.mask {data.augment.mask:g} needs a tokenizer with a mask token, and a "
                "tokenizer trained by the job has no mask token: give tokenizer a folder with one, or use delete"
            )
        if data.pack and is_labelled:
            raise ValueError(f"data.pack joins texts into rows, but {self.task} takes them one by one: leave it out")
        if data.augment and not (is_labelled or data.has_padding):
            raise ValueError(
                "data.augment changes texts, but a window of language-modeling has parts of several texts: use "
                "data.borders, data.on_the_fly or another task"
            )
        if data.order == "by_length" and not (is_labelled or data.has_padding):
            raise ValueError(
                "data.order: by_length has no effect, because all windows of language-modeling have the same "
                "length: use shuffle or blocks"
            )
        if data.order == "streams" and is_labelled:
            raise ValueError(
                f"data.order: streams is for language-modeling, and the task is {self.task}: use another order"
            )
        if data.stride and data.stride > self.sequence_length:
            raise ValueError(
                f"data.stride {data.stride} would leave out tokens between windows of sequence_length "
                f"{self.sequence_length}: give a stride of at most sequence_length"
            )
        if self.batch_tokens is not None and data.on_the_fly:
            raise ValueError(
                f"batch_tokens {self.batch_tokens} needs the token counts of all texts, which data.on_the_fly "
                "does not know in advance: give batch_size, or tokenize once"
            )
        if self.batch_tokens is not None:
            number = self.batch_tokens // self.sequence_length
            if data.order != "by_length" or not number:
                raise ValueError(
                    f"batch_tokens {self.batch_tokens} needs data.order: by_length, and at least sequence_length = "
                    f"{self.sequence_length} tokens: set both, or give batch_size"
                )
            if self.batch_size != number:
                raise ValueError(
                    f"batch_tokens {self.batch_tokens} are {number} samples of sequence_length = {self.sequence_length}"
                    f" (more if samples are shorter), not batch_size {self.batch_size}: give one of them"
                )
        return self

    @model_validator(mode="after")
    def _agrees_with_tags(self) -> Job:
        data = self.data
        asked = {
            "text": data.text if isinstance(data.text, tuple) else None,
            "on_the_fly": data.on_the_fly,
            "borders": data.borders,
            "augment.token_function": data.augment and data.augment.token_function,
        }
        for name, value in asked.items() if self.task == "token-classification" else ():
            if value:
                raise ValueError(
                    f"data.{name} {value!r} cannot be used with tagged words, which are in one column and are "
                    "tokenized once and one by one: leave it out, or name the column of the words"
                )
        return self

    @model_validator(mode="after")
    def _agrees_with_a_teacher_and_ranks(self) -> Job:
        if self.ranks > self.batch_size:
            raise ValueError(
                f"ranks {self.ranks} exceeds batch_size {self.batch_size}: give at most one rank per sample"
            )
        data, distill = self.data, self.distill
        fault = distill and distill.fault(data.order, "augment" if data.augment else "on_the_fly" * data.on_the_fly)
        if fault:
            raise ValueError(fault)
        return self

    @property
    def is_labelled(self) -> bool:
        """True if texts or words have labels. Each text is then a separate sample, and only labels are predicted."""
        return self.task != "language-modeling"

    @property
    def reads_streams(self) -> bool:
        """True if texts are concatenated, so that a sample may extend from one text into the next."""
        data = self.data
        return not (self.is_labelled or data.pack or data.borders or data.on_the_fly)

    @property
    def draws_held_out(self) -> bool:
        """True if the held-out texts are drawn at random. Otherwise they are the last texts."""
        return self.data.order not in {"blocks", "as_is", "streams"}

    @property
    def own_precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """The precision of a run without a plan: fp32 for ``auto``, which lets a plan choose."""
        return "fp32" if self.precision == "auto" else self.precision

    @classmethod
    def from_yaml(cls, path: Path, changes: tuple[str, ...] = (), budget_bytes: int | None = None) -> Job:
        """Read a job file and apply ``a.b=c`` changes to it. Relative paths start from the file's folder.

        Args:
            path: the job file.
            changes: ``field=value`` texts, as for ``--set``.
            budget_bytes: device budget in bytes. It overrides the file and the changes, unless it is ``None``.

        Raises:
            JobError: if the file is missing, is not YAML, or has invalid fields or values. The error lists all faults.
        """
        return cls.from_written(read_fields(path), path, changes, budget_bytes)

    @classmethod
    def from_written(
        cls, fields: dict[str, Any], path: Path, changes: tuple[str, ...] = (), budget_bytes: int | None = None
    ) -> Job:
        """Make a job from fields that `read_fields` read from ``path``. ``fields`` is not modified. See `from_yaml`.

        Raises:
            JobError: as for `from_yaml`.
        """
        fields = _changed(fields, changes)
        if budget_bytes is not None:
            fields["budget"] = {**(fields.get("budget") or {}), "device": budget_bytes}
        return cls.from_fields(fields, source=str(path), folder=path.parent, changes=changes)

    @classmethod
    def from_texts(cls, texts: Sequence[str], changes: tuple[str, ...] = ()) -> Job:
        """Make a job that reads the text files ``texts``, for commands that use only the data of a job.

        Relative paths start from the working folder.

        Raises:
            JobError: as for `from_yaml`.
        """
        return cls.from_plain({"model": "gpt2", "data": {"train": list(texts)}}, Path(), changes)

    @classmethod
    def from_file_or_texts(cls, names: Sequence[str], changes: tuple[str, ...] = ()) -> Job:
        """Read the job file if ``names`` is one YAML file. Otherwise make a job from the text files ``names``.

        Raises:
            JobError: as for `from_yaml`.
        """
        if len(names) == 1 and Path(names[0]).suffix in {".yaml", ".yml"}:
            return cls.from_yaml(Path(names[0]), changes)
        return cls.from_texts(names, changes)

    @classmethod
    def from_plain(cls, fields: dict[str, Any], folder: Path, changes: tuple[str, ...] = ()) -> Job:
        """Make a job from unchecked fields and ``a.b=c`` changes to them. Relative paths start from ``folder``.

        Raises:
            JobError: as for `from_yaml`.
        """
        return cls.from_fields(_changed(fields, changes), folder=folder, changes=changes)

    @classmethod
    def from_fields(
        cls,
        fields: dict[str, Any],
        source: str = "job",
        folder: Path | None = None,
        changes: tuple[str, ...] = (),
    ) -> Job:
        """Check fields and make a job from them. With ``folder``, relative paths become absolute.

        Args:
            fields: the fields of a job file.
            source: the name of the input in error messages.
            folder: the folder where relative paths start.
            changes: the ``a.b=c`` changes that ``fields`` already contains, so that an error can name the change at
                fault.

        Raises:
            JobError: as for `from_yaml`.
        """
        try:
            return cls.model_validate(_normalised(_expanded(fields), folder))
        except ValidationError as error:
            raise JobError(f"{source} cannot be used:\n" + "\n".join(_faults(error, changes))) from None


def _changed(fields: dict[str, Any], changes: tuple[str, ...]) -> dict[str, Any]:
    """Return a copy of the fields with the ``a.b=c`` changes applied in order."""
    fields = _expanded(deepcopy(fields))
    for change in changes:
        _apply(fields, change)
        fields = _expanded(fields)
    return fields


def _apply(fields: dict[str, Any], change: str) -> None:
    """Apply one ``a.b=c`` change to ``fields``, in place. The value is YAML, so ``steps=5`` sets a number."""
    name, equals, value = change.partition("=")
    *parents, last = name.split(".")
    if not equals or not all((*parents, last)):
        raise JobError(f"--set {change!r} is not of the form field=value: write for example --set optimizer.lr=1e-4")
    place = fields
    for parent in parents:
        if place.get(parent) is None:
            place[parent] = {}
        place = place[parent]
        if not isinstance(place, dict):
            raise JobError(f"--set {change!r}: `{parent}` is {place!r}, which has no fields: set `{parent}` as a whole")
    try:
        place[last] = parse_value(value)
    except ValueError:
        raise JobError(f"--set {change!r}: {value!r} is not YAML: quote the value, as in '{name}=\"*.txt\"'") from None


# The field that a plain value sets if it stands for a group: `budget: 2GiB` means `budget: {device: 2GiB}`.
SHORT_FORMS = {
    "budget": "device", "data": "train", "tokenizer": "path", "optimizer": "name", "embeddings": "path",
    "distill": "teacher",
}  # fmt: skip


def _expanded(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {SHORT_FORMS[name]: value} if name in SHORT_FORMS and not isinstance(value, dict | None) else value
        for name, value in fields.items()
    }


def _normalised(fields: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """Convert groups of fields from the syntax of a job file to the fields of records. Paths start from ``folder``."""
    groups = {name: dict(fields[name]) for name in SHORT_FORMS if isinstance(fields.get(name), dict)}
    if "budget" in groups:  # keeps the order: a later --set of `device` must replace `device_bytes`
        full_names = {"device": "device_bytes", "host": "host_bytes"}
        groups["budget"] = {full_names.get(name, name): value for name, value in groups["budget"].items()}
    if "optimizer" in groups:
        groups["optimizer"] = _with_arguments(groups["optimizer"])
    for group, name in PATHS:
        is_share = name == "validation" and _is_share(groups.get(group, {}).get(name))
        if folder is not None and name in groups.get(group, {}) and not is_share:
            groups[group][name] = _from_folder(groups[group][name], folder)
    augment = groups.get("data", {}).get("augment")
    if folder is not None and isinstance(augment, dict) and "synonyms" in augment:
        groups["data"]["augment"] = augment | {"synonyms": _from_folder(augment["synonyms"], folder)}
    return fields | groups


PATHS = (
    ("data", "train"),
    ("data", "validation"),
    ("tokenizer", "path"),
    ("embeddings", "path"),
    ("distill", "teacher"),
)


def _with_arguments(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Move fields that `OptimizerChoice` does not declare into ``arguments`` of the optimizer."""
    known = {name: value for name, value in optimizer.items() if name in OptimizerChoice.model_fields}
    arguments = known.setdefault("arguments", {})
    if not isinstance(arguments, dict):
        return optimizer
    others = {name: value for name, value in optimizer.items() if name not in known}
    return known | {"arguments": arguments | others}


def _from_folder(value: Any, folder: Path) -> Any:
    if isinstance(value, list | tuple):
        return [_from_folder(item, folder) for item in value]
    if not isinstance(value, str) or not value or value.startswith(HUB_PREFIX) or "://" in value:
        return value
    return str(folder.resolve() / Path(value).expanduser())


def _faults(error: ValidationError, changes: tuple[str, ...]) -> list[str]:
    """Return one error line for each faulty field. The line names the ``--set`` that set the field, if one did."""
    lines: dict[str, list[str]] = {}
    for fault in error.errors():
        where, known = _place(fault["loc"])
        lines.setdefault(where, []).append(_sentence(fault, where, known))
    return [
        f"  {where or 'job'}: {' or '.join(dict.fromkeys(sentences))}{_origin(where, changes)}"
        for where, sentences in lines.items()
    ]


def _origin(where: str, changes: tuple[str, ...]) -> str:
    """Return a note about the last change that set this field, a part of it or its group; "" if no change did."""
    where = where.replace("_bytes", "")
    for change in reversed(changes):
        name = change.partition("=")[0].replace("_bytes", "")
        if f"{name}.".startswith(f"{where}.") or f"{where}.".startswith(f"{name}."):
            return f"; this is from --set {change!r}"
    return ""


def _place(location: tuple[int | str, ...]) -> tuple[str, list[str]]:
    """Return a field's name as users write it, and the names of all fields in its group.

    ``location`` is from pydantic, which appends to the field's name the branch of a union or an index. These are left
    out.
    """
    group: type[Frozen] = Job
    names = []
    for part in location:
        names.append(str(part))
        annotation = group.model_fields[str(part)].annotation if str(part) in group.model_fields else None
        inner = [
            one for one in (annotation, *get_args(annotation)) if isinstance(one, type) and issubclass(one, Frozen)
        ]
        if not inner:
            break
        group = inner[0]
    known = [name.removesuffix("_bytes") for name in group.model_fields if name != "arguments"]
    where = ".".join(names)
    return where.removesuffix("_bytes") if names and names[-1] in group.model_fields else where, known


def _sentence(fault: ErrorDetails, where: str, known: list[str]) -> str:
    match fault["type"]:
        case "extra_forbidden":
            return f"unknown field; {near(where.rpartition('.')[2], known)}"
        case "missing":
            return "missing; add it, see the example in README.md"
        case "model_type":
            return f"needs fields ({', '.join(known)}), write for example `{where}: {{{known[0]}: ...}}`"
        case _:
            message = fault["msg"].removeprefix("Value error, ")
            return message if isinstance(fault["input"], dict | Frozen) else f"{message} (got {fault['input']!r})"
