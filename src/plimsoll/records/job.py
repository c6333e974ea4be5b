"""job.yaml: what to train, on what, with which budget. See `docs/job.md` for every field.

Covers reading, `--set a.b=c`, and checking that needs no file and no model. It does NOT check that paths exist or that
a model can be built: that is said where they are opened.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from plimsoll.errors import JobError
from plimsoll.records.base import Frozen, Record
from plimsoll.records.device import Budget


class DataSource(Frozen):
    """Where the text is. ``validation`` is a path, or the share (0 to 1) of the training units held out."""

    train: Annotated[str, Field(min_length=1)] | tuple[Annotated[str, Field(min_length=1)], ...]
    validation: str | float | None = None
    unit: Literal["document", "line"] = "document"

    @field_validator("validation")
    @classmethod
    def _share(cls, value: str | float | None) -> str | float | None:
        if isinstance(value, float) and not 0 <= value < 1:
            raise ValueError("a held-out share is from 0 to less than 1, for example 0.02")
        return value


class TokenizerSource(Frozen):
    """A folder or file of an existing tokenizer (``path``), or one trained on the spot."""

    path: str | None = None
    train: Literal["bpe"] = "bpe"
    vocab_size: int = Field(default=8000, ge=257, le=1 << 20)


class OptimizerChoice(Frozen):
    """A ``torch.optim`` optimizer by name, its learning rate, the schedule, and further arguments as they are."""

    name: str = "adamw"
    lr: float = Field(default=3e-4, gt=0, allow_inf_nan=False)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    clip_norm: float | None = Field(default=None, gt=0)
    arguments: dict[str, Any] = {}


class CheckpointPolicy(Frozen):
    """A checkpoint ``every`` so many steps; the last ``keep`` stay."""

    every: int = Field(default=50, ge=1)
    keep: int = Field(default=2, ge=1)


Allowed = Literal["recut_batch_norm", "by_length", "adafactor", "low_bit_optimizer", "lora"]
"""What changes the training or its result, and happens only where the user names it."""


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class Job(Record):
    """Everything a run needs to know; two runs of one job are the same run."""

    record_kind: ClassVar[str] = "job"

    model: str | dict[str, Any]
    task: Literal["language-modeling", "classification"] = "language-modeling"
    data: DataSource
    tokenizer: TokenizerSource = TokenizerSource()
    sequence_length: int = Field(default=256, ge=2)
    batch_size: int = Field(default=32, ge=1)
    optimizer: OptimizerChoice = OptimizerChoice()
    steps: int = Field(default=100, ge=1)
    precision: Literal["fp32", "bf16", "fp16", "auto"] = "fp32"
    allow: Annotated[tuple[Allowed, ...], BeforeValidator(_listed)] = ()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    budget: Budget = Budget()
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    evaluate_every: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0, lt=1 << 63)

    @property
    def own_precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """What it computes in where no plan says otherwise: ``auto`` leaves it to the plan, and is fp32 without."""
        return "fp32" if self.precision == "auto" else self.precision

    @classmethod
    def from_yaml(cls, path: Path, changes: tuple[str, ...] = ()) -> Job:
        """Read a job file and apply ``a.b=c`` changes to it. Relative paths are taken from the file's folder.

        Raises:
            JobError: if the file is missing, is not YAML, or has fields or values that are not allowed; all at once.
        """
        fields = _expanded(_read_yaml(path))
        for change in changes:
            _apply(fields, change)
            fields = _expanded(fields)
        return cls.from_fields(fields, source=str(path), folder=path.parent, changes=changes)

    @classmethod
    def from_fields(
        cls,
        fields: dict[str, Any],
        source: str = "job",
        folder: Path | None = None,
        changes: tuple[str, ...] = (),
    ) -> Job:
        """Check plain fields and make the job of them; the paths in them become absolute where ``folder`` is given.

        Args:
            fields: as a job file has them.
            source: what a fault is in, for the message.
            folder: where relative paths begin.
            changes: those ``a.b=c`` that are in ``fields`` already: a fault in one of them is said to be from there.

        Raises:
            JobError: as `from_yaml`.
        """
        try:
            return cls.model_validate(_normalised(_expanded(fields), folder))
        except ValidationError as error:
            raise JobError(f"{source} cannot be used:\n" + "\n".join(_faults(error, changes))) from None


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with the floats of 1.2: ``1e-4`` is a number and not a text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+"), list("-+0123456789")
)


def _read_yaml(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise JobError(_no_file_but_folder(path))
    try:
        fields = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        raise JobError(f"there is no job file at {path}: check the path, or use the example in README.md") from None
    except OSError as error:
        raise JobError(f"the job file {path} cannot be read ({error.strerror}): allow reading it") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise JobError(f"{path} cannot be read as YAML ({error}): see the example in README.md") from None
    if not isinstance(fields, dict):
        raise JobError(f"{path} holds {fields!r}, not fields like `model: ...`: see the example in README.md")
    return fields


def _no_file_but_folder(path: Path) -> str:
    if (path / "metrics.jsonl").is_file():
        return (
            f"{path} is the directory of a run, no job file: go on with it (`plimsoll train --resume --out {path}`), "
            f"or give its job file {path / 'job.yaml'} and another --out"
        )
    return f"{path} is a folder, not a job file: give the path of the job file, such as {path / 'job.yaml'}"


def _apply(fields: dict[str, Any], change: str) -> None:
    """Set one dotted field; the value is read as YAML, so ``steps=5`` is a number."""
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
        place[last] = yaml.load(value, Loader=_Loader)
    except yaml.YAMLError:
        raise JobError(f"--set {change!r}: {value!r} is not YAML: quote the value, as in '{name}=\"*.txt\"'") from None


# What a plain value stands for where a group of fields can be given: `budget: 2GiB` is `budget: {device: 2GiB}`.
_SHORT_FORMS = {"budget": "device", "data": "train", "tokenizer": "path", "optimizer": "name"}


def _expanded(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {_SHORT_FORMS[name]: value} if name in _SHORT_FORMS and not isinstance(value, dict | None) else value
        for name, value in fields.items()
    }


def _normalised(fields: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """Bring the groups of fields from the way a person writes them to the way the records have them."""
    groups = {name: dict(fields[name]) for name in _SHORT_FORMS if isinstance(fields.get(name), dict)}
    if "budget" in groups:  # in the order written: a --set of `device` comes after what it replaces
        full_names = {"device": "device_bytes", "host": "host_bytes"}
        groups["budget"] = {full_names.get(name, name): value for name, value in groups["budget"].items()}
    if "optimizer" in groups:
        groups["optimizer"] = _with_arguments(groups["optimizer"])
    for group, name in (("data", "train"), ("data", "validation"), ("tokenizer", "path")):
        if folder is not None and name in groups.get(group, {}):
            groups[group][name] = _from_folder(groups[group][name], folder)
    return fields | groups


def _with_arguments(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Gather the fields that are not ours: they are arguments of the optimizer."""
    known = {name: value for name, value in optimizer.items() if name in OptimizerChoice.model_fields}
    arguments = known.setdefault("arguments", {})
    if not isinstance(arguments, dict):
        return optimizer
    others = {name: value for name, value in optimizer.items() if name not in known}
    return known | {"arguments": arguments | others}


def _from_folder(value: Any, folder: Path) -> Any:
    if isinstance(value, list | tuple):
        return [_from_folder(item, folder) for item in value]
    return str(folder.resolve() / Path(value).expanduser()) if isinstance(value, str) and value else value


def _faults(error: ValidationError, changes: tuple[str, ...]) -> list[str]:
    """One line per field, with the ``--set`` it is from; an unknown field is shown with the nearest known one."""
    lines: dict[str, list[str]] = {}
    for fault in error.errors():
        where, known = _place(fault["loc"])
        lines.setdefault(where, []).append(_sentence(fault, where, known))
    return [
        f"  {where}: {' or '.join(dict.fromkeys(sentences))}{_origin(where, changes)}"
        for where, sentences in lines.items()
    ]


def _origin(where: str, changes: tuple[str, ...]) -> str:
    """Name the last change that set this field, one in it, or the group it is in; nothing if the file did."""
    for change in reversed(changes):
        name = change.partition("=")[0].replace("_bytes", "")
        if f"{name}.".startswith(f"{where}.") or f"{where}.".startswith(f"{name}."):
            return f"; this is from --set {change!r}"
    return ""


def _place(location: tuple[int | str, ...]) -> tuple[str, list[str]]:
    """Return a field as its user writes it, and the names that are known in its group.

    What pydantic adds below a plain field (the branch of a union, an index) is left out.
    """
    group: type[Frozen] = Job
    names = []
    for part in location:
        names.append(str(part))
        inner = group.model_fields[str(part)].annotation if str(part) in group.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, Frozen)):
            break
        group = inner
    known = [name.removesuffix("_bytes") for name in group.model_fields if name != "arguments"]
    return ".".join(names).removesuffix("_bytes"), known


def _sentence(fault: ErrorDetails, where: str, known: list[str]) -> str:
    match fault["type"]:
        case "extra_forbidden":
            return f"unknown field; {near(where.rpartition('.')[2], known)}"
        case "missing":
            return "missing; add it, see the example in README.md"
        case "model_type":
            return f"needs fields ({', '.join(known)}), write for example `{where}: {{{known[0]}: ...}}`"
        case _:
            return f"{fault['msg'].removeprefix('Value error, ')} (got {fault['input']!r})"


def near(name: str, known: Iterable[str]) -> str:
    """Return what to say of an unknown name: the known name nearest to it, or all of them."""
    known = list(known)
    matches = difflib.get_close_matches(name, known, n=1)
    return f"did you mean `{matches[0]}`?" if matches else f"known here: {', '.join(known)}"
