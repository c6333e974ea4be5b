"""The model that teaches another: found in its folder, checked against the job, loaded and known by what it is.

    sketch_teacher(folder, "classification", shape, label_names)  # says what does not fit
    teacher = load_teacher(folder, task, shape, place="read-only")

It is a Hugging Face folder or one of a recurrent model of ours, for the same task and the same tokens. Loaded, it is in
evaluation mode, computes in float32 and has no gradients. In a dry run (on fake tensors) nothing of it is read.

It does NOT cover teachers with another tokenizer or other labels, and models that are a function of the user's.

Errors say `distill.teacher`, the field of the job.
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
_NAMELESS = "LABEL_"  # what transformers calls a label that has no name
_SHOWN = 3  # names in a message


def load_teacher(
    folder: Path, task: Task, shape: TextShape, *, place: Place = "memory", device: str = "cpu"
) -> nn.Module:
    """Load a teacher.

    Args:
        folder: of a checkpoint.
        task: of the job.
        shape: what its texts ask of a model.
        place: ``read-only``: its weights stay in its files, which no limit on private memory counts; only on the CPU.
        device: where it is to compute.

    Raises:
        JobError: if it does not fit the job, or cannot be read.
        OutputError: if the disk has no room for what cannot be mapped as it is: weights that are not in float32.
    """
    if isinstance(torch.empty(0), FakeTensor):  # a dry run, of the shapes alone
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
    """Make a teacher on the meta device, and check that it fits the job.

    Args:
        folder: see `load_teacher`.
        task: see `folder`.
        shape: see `folder`.
        label_names: of the data, where they are known: where the teacher's labels have names, they are these.

    Raises:
        JobError: if it is missing, damaged, for another task, another vocabulary, other labels or shorter texts.
    """
    if not folder.is_dir():
        raise JobError(f"{_FIELD}: there is no folder {folder}: give one that was trained, or download it first")
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
    """Return what tells one teacher from another, wherever its folder is: of all of its configuration and its weights.

    Every byte is read: two teachers may differ in a single matrix.

    Raises:
        JobError: if it cannot be read.
    """
    try:
        known = hashlib.sha256((folder / "config.json").read_bytes())
        for file in sorted(open_checkpoint(folder).files):
            with file.open("rb", buffering=0) as opened:
                content = hashlib.file_digest(opened, xxhash.xxh3_128).digest()  # read in pieces, as fast as a disk is
            known.update(f"{file.name} ".encode() + content)
    except (WeightsError, OSError) as error:
        raise JobError(f"{_FIELD}: {folder} cannot be read ({error}): give a folder with a model") from None
    return f"sha256:{known.hexdigest()[:12]}"


def _silent(model: nn.Module) -> nn.Module:
    """In evaluation mode, and without gradients."""
    return model.eval().requires_grad_(False)


def _in_dry_run(folder: Path, shape: TextShape) -> nn.Module:
    fields = recurrent_fields(folder)
    if fields is None:
        return load_hugging_face(folder, shape, "cpu")
    return build_recurrent(fields)


def _check_head(folder: Path, task: Task) -> None:
    """Refuse a folder without the weights of the head, which would be drawn anew."""
    try:
        with quiet():
            skeleton, _ = sketch_checkpoint(folder, head=task)
    except WeightsError as error:
        raise JobError(f"{_FIELD}: {folder} cannot be read ({error}): save or download it again") from None
    missing = [name for name in skeleton.missing if "pooler" not in name.split(".") or task == "classification"]
    if missing:
        listed = ", ".join(missing[:_SHOWN])
        raise JobError(
            f"{_FIELD}: {folder} was not trained for {task}, for it lacks {len(missing)} weights ({listed}): give a "
            "model that was, `plimsoll train` makes one"
        )


def _sketch_recurrent(
    folder: Path, fields: dict[str, Any], task: Task, shape: TextShape, label_names: tuple[str, ...]
) -> nn.Module:
    own_task: Task = "language-modeling"
    if fields.get("num_labels") is not None:
        own_task = "token-classification" if fields.get("is_tagger") else "classification"
    if own_task != task:
        raise JobError(f"{_FIELD}: {folder} is for {own_task}, and the task is {task}: give a model for that")
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
            f"{_FIELD}: {folder} tells {len(own)} labels apart, but the data have {num_labels}: give a teacher that "
            "was trained on these labels"
        )
    has_names = not all(str(name).startswith(_NAMELESS) for name in own)
    if names and has_names and tuple(own) != tuple(names):
        place = next(number for number in range(num_labels) if own[number] != names[number])
        raise JobError(
            f"{_FIELD}: {folder} calls label {place} {own[place]!r}, but the data {names[place]!r}: give a teacher "
            "that was trained on these labels, in this order"
        )


def require_same_tokens(folder: Path, own: dict[str, int], others: dict[str, int]) -> None:
    """Refuse a teacher whose tokenizer has other tokens.

    Args:
        folder: of the teacher.
        own: the number of each of its tokens.
        others: those of the job's tokenizer.

    Raises:
        JobError: if they are not the same; it names one that is not.
    """
    if own == others:
        return
    token = next(name for name in sorted({*own, *others}) if own.get(name) != others.get(name))
    numbers = [json.dumps(one.get(token)) for one in (own, others)]
    raise JobError(
        f"{_FIELD}: {folder} has another tokenizer, of {len(own)} tokens, than the job, of {len(others)}: "
        f"{token!r} is {numbers[0]} there and {numbers[1]} here; set `tokenizer: {folder}`"
    )
