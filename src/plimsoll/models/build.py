"""Building a job's model, and saving a model to a folder.

A job names a model in one of four ways:

    model: {architecture: gpt2, n_layer: 6}   a transformers architecture, new weights   `hugging_face`
    model: lstm                               or gru, rnn; with fields as above          `recurrent`
    model: path/to/folder                     a checkpoint of one of these two           both
    model: package.module:function            a function that returns an ``nn.Module``   `imported`

Every model is called as ``model(input_ids=..., attention_mask=..., labels=...)``. It returns ``.logits`` and ``.loss``,
the mean over the units of its task. New weights are drawn from torch's default generator: seed it first.

Not handled: checkpoints on the Hugging Face Hub. Download a checkpoint first.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from plimsoll.data.batch import Units
from plimsoll.device.mapped_memory import MappedPool
from plimsoll.errors import JobError, OutputError
from plimsoll.models.hugging_face import (
    TextShape,
    build_hugging_face,
    is_hugging_face,
    load_hugging_face,
    save_hugging_face,
)
from plimsoll.models.imported import build_imported, find_imported
from plimsoll.models.in_files import made_in
from plimsoll.models.names import RECURRENT, is_own_function, require_labels, require_model_name
from plimsoll.models.quantization_aware import train_for_integers
from plimsoll.models.recurrent.model import (
    RecurrentLanguageModel,
    RecurrentModel,
    build_recurrent,
    load_recurrent,
    save_recurrent,
)
from plimsoll.models.vectors import prepare_embedding, with_dimension
from plimsoll.models.workload import LossFunction, model_loss
from plimsoll.records.embeddings import VectorSource
from plimsoll.records.job import Job, Task
from plimsoll.records.tokenizer import SMALLEST_VOCAB_SIZES
from plimsoll.weights.saving import save_weights


def build_model(  # noqa: PLR0917 -- the facts of the texts are passed in their order
    job: Job,
    vocab_size: int,
    num_labels: int | None,
    end_id: int,
    pad_id: int | None = None,
    device: Literal["cpu", "meta"] = "cpu",
    files: MappedPool | None = None,
) -> nn.Module:
    """Build or load the model of a job, in training mode, with float32 weights.

    Args:
        job: its fields ``model``, ``task`` and ``sequence_length`` are read; with ``data.order: streams`` also
            ``batch_size``.
        vocab_size: number of tokens of the tokenizer; the model has at least as many embedding rows.
        num_labels: number of labels of texts or of tokens, at least 2; ``None`` for language modeling.
        end_id: the id of the token that ends a text.
        pad_id: the id of the token that pads shorter texts; ``end_id`` by default.
        device: the device of the weights; ``"meta"`` gives only their shapes and allocates nothing.
        files: the pool of mapped files for the weights; ``None``: memory. The weights have the same values in both
            cases.

    Raises:
        JobError: if the model cannot be named, built, loaded or used for this job; the message names the field.
    """
    if job.is_labelled:
        require_labels(job.task, num_labels or 0)
    labels, is_tagger = (num_labels if job.is_labelled else None), job.task == "token-classification"
    shape = TextShape(vocab_size, labels, end_id, job.sequence_length, is_tagger, pad_id)
    with nullcontext() if files is None else made_in(files):
        model = _model(job, shape, device, files)
        if job.embeddings is not None:
            prepare_embedding(model, job.embeddings, vocab_size)
        if job.quantization_aware is not None:
            train_for_integers(model, job.quantization_aware)
    if job.data.order == "streams":
        if not isinstance(model, RecurrentLanguageModel):
            raise JobError(
                f"data.order: streams needs a model that carries a state from one window to the next, and "
                f"{type(model).__name__} has none: use model.architecture lstm, gru or rnn, or another order"
            )
        model.carry(job.batch_size)
    return model


def _model(job: Job, shape: TextShape, device: str, files: MappedPool | None) -> nn.Module:
    require_model_name(job.model, job.task)
    if isinstance(job.model, dict):
        return _new_model(job.model, shape, device, job.embeddings)
    if job.model in RECURRENT:
        return _new_model({"architecture": job.model}, shape, device, job.embeddings)
    if Path(job.model).is_dir():
        return _loaded_model(Path(job.model), shape, device, files)
    if is_own_function(job.model):
        with torch.device(device):
            return build_imported(
                job.model, vocab_size=shape.vocab_size, num_labels=shape.num_labels, end_id=shape.end_id
            )
    raise AssertionError(f"{job.model} is one of these, or has been refused")


def sketch_model(job: Job) -> nn.Module | None:
    """Build the model of a job on the meta device before the data exist, with placeholders for the sizes.

    Returns:
        The model, or ``None`` if it can only be built with the data. A checkpoint folder must fit the tokenizer and the
        labels. A user's function is looked up but not called.

    Raises:
        JobError: as in `build_model`.
    """
    num_labels = 2 if job.is_labelled else None
    if isinstance(job.model, str):
        if Path(job.model).is_dir():
            return None
        if is_own_function(job.model):
            find_imported(job.model, vocab_size=0, num_labels=num_labels, end_id=0)
            return None
    is_recurrent = isinstance(job.model, dict) and job.model.get("architecture") in RECURRENT
    given = job.model.get("vocab_size") if isinstance(job.model, dict) and not is_recurrent else None
    vocab_size = job.tokenizer.vocab_size
    if isinstance(given, int):  # it may equal the tokenizer's size, which is not known yet
        vocab_size = SMALLEST_VOCAB_SIZES[job.tokenizer.train] if job.tokenizer.path is None else given
    return build_model(job, vocab_size, num_labels, 0, device="meta")


def import_library_of(job: Job) -> None:
    """Import transformers if the model of a job may need it, before memory is traced or counted."""
    architecture = job.model.get("architecture") if isinstance(job.model, dict) else job.model
    if architecture not in RECURRENT or job.distill is not None:  # the teacher may be a transformers model
        import transformers  # noqa: F401


def save_model(model: nn.Module, folder: Path) -> None:
    """Write a model into ``folder``, which is created if missing. It copies no more memory than `save_weights`.

    ``from_pretrained`` can load the folder of a Hugging Face model, and `load_recurrent` the folder of a recurrent
    model. For any other model only the weights are written, to ``model.safetensors``.

    Raises:
        OutputError: if the folder cannot be written or the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(model, RecurrentModel):
            save_recurrent(model, folder)
        elif is_hugging_face(model):
            save_hugging_face(model, folder)
        else:
            save_weights(model, folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"cannot write the model to {folder}: {error}; free some space or give another --out"
        ) from error


def loss_of(task: Task) -> tuple[LossFunction, Units]:
    """Return a task's loss function, which returns the loss that the model computes, and the units of the loss."""
    units: dict[Task, Units] = {
        "language-modeling": "next-tokens",
        "classification": "samples",
        "token-classification": "tokens",
    }
    return model_loss, units[task]


def name_labels(model: nn.Module, names: tuple[str, ...]) -> None:
    """Store the names of the labels in the configuration of a model, so that `save_model` writes them."""
    if not names:
        return
    if isinstance(model, RecurrentModel):
        model.config = model.config.model_copy(update={"label_names": names})
    elif is_hugging_face(model):
        model.config.id2label = dict(enumerate(names))
        model.config.label2id = {name: number for number, name in enumerate(names)}


def _new_model(fields: dict[str, Any], shape: TextShape, device: str, vectors: VectorSource | None) -> nn.Module:
    architecture = fields["architecture"]
    if architecture in RECURRENT:
        if fields.get("is_tagger") and shape.num_labels is not None and not shape.is_tagger:
            raise JobError(
                f"model: is_tagger {fields['is_tagger']} makes a classifier of tokens, not of texts: leave it out"
            )
        fields = with_dimension(fields, vectors)
        of_text: dict[str, Any] = {"vocab_size": shape.vocab_size, "num_labels": shape.num_labels}
        of_text |= {"is_tagger": True} if shape.is_tagger else {}
        with torch.device(device):
            return build_recurrent(fields | of_text)
    own_fields = {name: value for name, value in fields.items() if name != "architecture"}
    return build_hugging_face(architecture, own_fields, shape, device)


def _loaded_model(folder: Path, shape: TextShape, device: str, files: MappedPool | None) -> nn.Module:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise JobError(
            f"model: {folder} is not a checkpoint folder, its config.json cannot be read ({error}): check the path"
        ) from None
    if config.get("architecture") not in RECURRENT:
        return load_hugging_face(folder, shape, device, files)
    wanted = {"vocab_size": shape.vocab_size, "num_labels": shape.num_labels, "is_tagger": shape.is_tagger}
    found = {name: config.get(name) for name in wanted} | {"is_tagger": config.get("is_tagger", False)}
    if found != wanted:
        raise JobError(
            f"model: {folder} was made for {found}, but the text has {wanted}: "
            "use the tokenizer and the task it was trained with"
        )
    is_dry_run = isinstance(torch.empty(0), FakeTensor)  # needs the shapes only
    if device == "cpu" and not is_dry_run:
        return load_recurrent(folder)
    with torch.device(device):
        return build_recurrent(config)
