"""The teacher of a distillation: checks of its folder against the job, loading, and a digest that identifies it.

    sketch_teacher(folder, "classification", shape, label_names)  # raises an error if it does not fit
    teacher = load_teacher(folder, task, shape, place="read-only")

A teacher is a Hugging Face folder or a folder of a recurrent Plimsoll model, for the same task and tokens. It is loaded
in evaluation mode, computes in float32 and has no gradients. In a dry run (on fake tensors) its weights are not read.

Not handled: teachers with another tokenizer or other labels, and models made by user functions.

Errors name the job's field `distill.teacher`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from plimsoll.errors import JobError, WeightsError
from plimsoll.models.hugging_face import TextShape, load_hugging_face, read_hugging_face_config
from plimsoll.models.loading import Place, load_model, sketch_checkpoint
from plimsoll.models.recurrent.model import build_recurrent
from plimsoll.models.recurrent.skeleton import recurrent_fields
from plimsoll.models.skeleton import quiet
from plimsoll.records.job import Task
from plimsoll.weights.loading import open_checkpoint

_FIELD = "distill.teacher"
_NAMELESS = "LABEL_"  # prefix of the names that transformers gives to unnamed labels
_SHOWN = 3  # names in a message


def load_teacher(
    folder: Path, task: Task, shape: TextShape, *, place: Place = "memory", device: str = "cpu"
) -> nn.Module:
    """Load a teacher.

    Args:
        folder: the folder of its checkpoint.
        task: the task of the job.
        shape: the requirements of the job's texts on the model.
        place: the place of the weights. ``memory``: the memory of ``device``. ``read-only``: memory-mapped files, which
            do not count as private memory; CPU only.
        device: the device of the weights.

    Raises:
        JobError: if the teacher does not fit the job, or cannot be read.
        OutputError: if the disk is too full for the weights that are not float32, which cannot be mapped as stored.
    """
    if isinstance(torch.empty(0), FakeTensor):  # a dry run needs the shapes only
        return _silent(_in_dry_run(folder, shape)).to(device)
    sketch = sketch_teacher(folder, task, shape)
    named: dict[str, Any] = {}
    if recurrent_fields(folder) is None:
        named = {"head": task, "config": sketch.config}
    try:
        loaded = load_model(folder, dtype=torch.float32, device=device, place=place, **named)
    except WeightsError as error:
        raise JobError(
            f"{_FIELD}: the weights in {folder} cannot be read ({error}): save or download it again"
        ) from None
    return _silent(loaded.model)


def sketch_teacher(folder: Path, task: Task, shape: TextShape, label_names: tuple[str, ...] = ()) -> nn.Module:
    """Build a teacher on the meta device, and check that it fits the job.

    Args:
        folder: see `load_teacher`.
        task: see `load_teacher`.
        shape: see `load_teacher`.
        label_names: the names of the labels in the data, if known. A teacher whose labels have names must have the
            same.

    Raises:
        JobError: if the teacher is missing or damaged, or made for another task, another vocabulary, other labels or
            shorter texts.
    """
    if not folder.is_dir():
        raise JobError(f"{_FIELD}: there is no folder {folder}: give the folder of a trained model, or download one")
    fields = recurrent_fields(folder)
    if fields is not None:
        return _sketch_recurrent(folder, fields, task, shape, label_names)
    try:
        config = read_hugging_face_config(folder)
        if shape.num_labels is not None:
            names = [str(name) for _, name in sorted((config.id2label or {}).items())]
            _check_labels(folder, names, shape.num_labels, label_names)
        model: nn.Module = load_hugging_face(folder, shape, "meta")
    except JobError as error:
        raise JobError(f"{_FIELD}: {str(error).removeprefix('model: ').removeprefix(f'{_FIELD}: ')}") from None
    _check_head(folder, task)
    return _silent(model)


def digest_of(folder: Path) -> str:
    """Return a digest of a teacher's configuration and weights, which does not depend on its path.

    Every byte is read, because two teachers may differ in a single matrix.

    Raises:
        JobError: if the folder cannot be read.
    """
    try:
        known = hashlib.sha256((folder / "config.json").read_bytes())
        for file in sorted(open_checkpoint(folder).files):
            with file.open("rb", buffering=0) as opened:
                content = hashlib.file_digest(opened, xxhash.xxh3_128).digest()  # reads in blocks
            known.update(f"{file.name} ".encode() + content)
    except (WeightsError, OSError) as error:
        raise JobError(f"{_FIELD}: {folder} cannot be read ({error}): give a folder with a model") from None
    return f"sha256:{known.hexdigest()[:12]}"


def _silent(model: nn.Module) -> nn.Module:
    """Put a teacher in evaluation mode, disable the gradients of its parameters, and return it."""
    return model.eval().requires_grad_(False)


def _in_dry_run(folder: Path, shape: TextShape) -> nn.Module:
    fields = recurrent_fields(folder)
    if fields is None:
        return load_hugging_face(folder, shape, "cpu")
    return build_recurrent(fields)


def _check_head(folder: Path, task: Task) -> None:
    """Raise an error if a folder lacks the weights of the head, because new weights would be random."""
    try:
        with quiet():
            skeleton, _ = sketch_checkpoint(folder, head=task)
    except WeightsError as error:
        raise JobError(f"{_FIELD}: {folder} cannot be read ({error}): save or download it again") from None
    missing = [name for name in skeleton.missing if "pooler" not in name.split(".") or task == "classification"]
    if missing:
        listed = ", ".join(missing[:_SHOWN])
        raise JobError(
            f"{_FIELD}: {folder} was not trained for {task}, because it lacks {len(missing)} weights ({listed}): "
            "train one with `plimsoll train`, or give another model"
        )


def _sketch_recurrent(
    folder: Path, fields: dict[str, Any], task: Task, shape: TextShape, label_names: tuple[str, ...]
) -> nn.Module:
    own_task: Task = "language-modeling"
    if fields.get("num_labels") is not None:
        own_task = "token-classification" if fields.get("is_tagger") else "classification"
    if own_task != task:
        raise JobError(f"{_FIELD}: {folder} is for {own_task}, but the task is {task}: give a model for {task}")
    if shape.num_labels is not None:
        names = fields.get("label_names") or [f"{_NAMELESS}{number}" for number in range(fields["num_labels"])]
        _check_labels(folder, names, shape.num_labels, label_names)
    if fields["vocab_size"] != shape.vocab_size:
        raise JobError(
            f"{_FIELD}: {folder} has {fields['vocab_size']} token embeddings, but the tokenizer has "
            f"{shape.vocab_size} tokens: set `tokenizer: {folder}`, or the folder of the tokenizer it was trained with"
        )
    with torch.device("meta"):
        return _silent(build_recurrent(fields))


def _check_labels(folder: Path, own: list[str], num_labels: int, names: tuple[str, ...]) -> None:
    if len(own) != num_labels:
        raise JobError(
            f"{_FIELD}: {folder} has {len(own)} labels, but the data have {num_labels}: give a teacher that was "
            "trained on these labels"
        )
    has_names = not all(str(name).startswith(_NAMELESS) for name in own)
    if names and has_names and tuple(own) != tuple(names):
        place = next(number for number in range(num_labels) if own[number] != names[number])
        raise JobError(
            f"{_FIELD}: label {place} is {own[place]!r} in {folder}, but {names[place]!r} in the data: give a teacher "
            "that was trained on these labels, in this order"
        )


def require_same_tokens(folder: Path, own: dict[str, int], others: dict[str, int]) -> None:
    """Check that the teacher's tokenizer has the same tokens as the job's.

    Args:
        folder: the teacher's folder.
        own: the token ids of the teacher's tokenizer, by token.
        others: the token ids of the job's tokenizer, by token.

    Raises:
        JobError: if the tokenizers differ; the message names one token that differs.
    """
    if own == others:
        return
    token = next(name for name in sorted({*own, *others}) if own.get(name) != others.get(name))
    numbers = [json.dumps(one.get(token)) for one in (own, others)]
    raise JobError(
        f"{_FIELD}: the tokenizer of {folder} ({len(own)} tokens) differs from the job's ({len(others)} tokens): the "
        f"id of {token!r} is {numbers[0]} in the teacher's and {numbers[1]} in the job's; set `tokenizer: {folder}`"
    )
