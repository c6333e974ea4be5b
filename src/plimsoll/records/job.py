"""job.yaml: what to train, on what, with which budget. See `docs/job.md` for every field.

Covers reading, `--set a.b=c`, and checking that needs no file and no model. It does NOT check that paths exist or that
a model can be built: that is said where they are opened.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import Field, ValidationError, field_validator

from plimsoll.errors import InputError, JobError
from plimsoll.records.base import Frozen, Record
from plimsoll.records.device import Budget
from plimsoll.records.units import parse_bytes


class DataSource(Frozen):
    """Where the text is. ``validation`` is a path, or the share (0 to 1) of the training units held out."""

    train: str | tuple[str, ...]
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
    vocab_size: int = Field(8000, ge=257, le=1 << 20)


class OptimizerChoice(Frozen):
    """A ``torch.optim`` optimizer by name, its learning rate, the schedule, and further arguments as they are."""

    name: str = "adamw"
    lr: float = Field(3e-4, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    clip_norm: float | None = Field(None, gt=0)
    arguments: dict[str, Any] = {}


class CheckpointPolicy(Frozen):
    """A checkpoint ``every`` so many steps; the last ``keep`` stay."""

    every: int = Field(50, ge=1)
    keep: int = Field(2, ge=1)


class Job(Record):
    """Everything a run needs to know; two runs of one job are the same run."""

    record_kind: ClassVar[str] = "job"

    model: str | dict[str, Any]
    task: Literal["language-modeling", "classification"] = "language-modeling"
    data: DataSource
    tokenizer: TokenizerSource = TokenizerSource()
    sequence_length: int = Field(256, ge=2)
    batch_size: int = Field(32, ge=1)
    optimizer: OptimizerChoice = OptimizerChoice()
    steps: int = Field(100, ge=1)
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    allow: tuple[str, ...] = ()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    budget: Budget = Budget()
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    evaluate_every: int | None = Field(None, ge=1)
    seed: int = Field(0, ge=0)

    @classmethod
    def from_yaml(cls, path: Path, changes: tuple[str, ...] = ()) -> Job:
        """Read a job file and apply ``a.b=c`` changes to it. Relative data paths are taken from the file's folder.

        Raises:
            JobError: if the file is missing, is not YAML, or has a field or value that is not allowed; every fault at once.
        """
        fields = _read_yaml(path)
        for change in changes:
            _apply(fields, change)
        return cls.from_fields(fields, source=str(path), folder=path.parent.resolve())

    @classmethod
    def from_fields(cls, fields: dict[str, Any], source: str = "job", folder: Path | None = None) -> Job:
        """Check plain fields and make the job of them.

        Raises:
            JobError: as `from_yaml`.
        """
        fields = _normalised(dict(fields), source, folder)
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise JobError(f"{source} cannot be used:\n" + "\n".join(_faults(error))) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise JobError(f"there is no job file at {path}: check the path, or start from the example in README.md") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise JobError(f"{path} cannot be read as YAML ({error}): see the example in README.md") from None
    if not isinstance(fields, dict):
        raise JobError(f"{path} holds {type(fields).__name__}, not fields like `model: ...`: see the example in README.md")
    return fields


def _apply(fields: dict[str, Any], change: str) -> None:
    """Set one dotted field; the value is read as YAML, so ``steps=5`` is a number."""
    name, equals, value = change.partition("=")
    if not equals or not name:
        raise JobError(f"--set {change!r} is not of the form field=value: write for example --set optimizer.lr=1e-4")
    *parents, last = name.split(".")
    place = fields
    for parent in parents:
        place[parent] = dict(place.get(parent) or {}) if isinstance(place.get(parent), dict | None) else {}
        place = place[parent]
    place[last] = _yaml_scalar(value)


def _yaml_scalar(text: str) -> Any:
    """Read a value as YAML 1.2 would: also ``1e-4``, which YAML 1.1 takes for a text."""
    value = yaml.safe_load(text)
    if isinstance(value, str):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    return value


def _normalised(fields: dict[str, Any], source: str, folder: Path | None) -> dict[str, Any]:
    """Bring the short forms a person writes to the full form: sizes as text, a tokenizer's path, relative paths."""
    budget = fields.get("budget")
    if isinstance(budget, str | int):
        budget = {"device": budget}
    if isinstance(budget, dict):
        fields["budget"] = {_budget_field(key): _bytes(value, source) for key, value in budget.items()}
    if isinstance(fields.get("tokenizer"), str):
        fields["tokenizer"] = {"path": fields["tokenizer"]}
    optimizer = fields.get("optimizer")
    if isinstance(optimizer, str):
        fields["optimizer"] = {"name": optimizer}
    elif isinstance(optimizer, dict):
        known = set(OptimizerChoice.model_fields)
        extra = {key: value for key, value in optimizer.items() if key not in known}
        fields["optimizer"] = {key: _number(value) for key, value in optimizer.items() if key in known}
        fields["optimizer"]["arguments"] = dict(optimizer.get("arguments") or {}) | {k: _number(v) for k, v in extra.items()}
    if folder is not None and isinstance(fields.get("data"), dict):
        fields["data"] = {key: _from_folder(value, folder) if key in ("train", "validation") else value for key, value in fields["data"].items()}
    return fields


def _budget_field(key: str) -> str:
    return {"device": "device_bytes", "host": "host_bytes"}.get(key, key)


def _bytes(value: Any, source: str) -> int | None:
    if value is None:
        return None
    try:
        return parse_bytes(value)
    except InputError as error:
        raise JobError(f"{source}: budget: {error}") from None


def _number(value: Any) -> Any:
    return _yaml_scalar(value) if isinstance(value, str) else value


def _from_folder(value: Any, folder: Path) -> Any:
    if isinstance(value, list | tuple):
        return [_from_folder(item, folder) for item in value]
    return str(folder / Path(value).expanduser()) if isinstance(value, str) else value


def _faults(error: ValidationError) -> list[str]:
    """One line per fault; an unknown field is shown with the nearest known one."""
    lines = []
    for fault in error.errors():
        where = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            lines.append(f"  {where}: unknown field; {near(str(fault['loc'][-1]), _known_fields(fault['loc'][:-1]))}")
        elif fault["type"] == "missing":
            lines.append(f"  {where}: missing; add it, see the example in README.md")
        else:
            lines.append(f"  {where}: {fault['msg'].removeprefix('Value error, ')} (got {fault['input']!r})")
    return lines


def _known_fields(parents: tuple[int | str, ...]) -> list[str]:
    nested = {
        "data": DataSource,
        "tokenizer": TokenizerSource,
        "optimizer": OptimizerChoice,
        "checkpoint": CheckpointPolicy,
        "budget": Budget,
    }
    model = nested.get(str(parents[0]), Job) if parents else Job
    names = [name for name in model.model_fields if name != "arguments"]
    return [name.removesuffix("_bytes") for name in names] if model is Budget else names


def near(name: str, known: Iterable[str]) -> str:
    """Return what to say of an unknown name: the known name nearest to it, or all of them."""
    known = list(known)
    matches = difflib.get_close_matches(name, known, n=1)
    return f"did you mean `{matches[0]}`?" if matches else f"known here: {', '.join(known)}"
