"""The loss of a job with a teacher, for runs, dry runs and planning.

The teacher's weights are in device memory (``memory``), in memory-mapped files (``mapped``, on the CPU), or in memory
as int8 codes (``int8``). A budget of private memory does not count mapped files. With ``int8``, the weights of linear
layers are dequantized while the layer computes (`plimsoll.techniques.mechanisms.codes`). This includes `nn.Linear` and
the ``Conv1D`` of GPT-2, but not the output over the vocabulary, nor weights shared by two layers.

A run and its dry run both use this module, so their decisions agree. Not covered: streaming a teacher to a GPU layer by
layer.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from torch import nn

from plimsoll.data.samples.packable import packing_fault
from plimsoll.data.tokens.given_tokenizer import load_tokenizer
from plimsoll.device.cpu import heap
from plimsoll.device.off_device import outside_the_device
from plimsoll.errors import JobError
from plimsoll.models.assemble import choose_device
from plimsoll.models.build import loss_of
from plimsoll.models.distillation.chunked import LossWeights
from plimsoll.models.distillation.loss import Distillation
from plimsoll.models.distillation.teacher import load_teacher, require_same_tokens, sketch_teacher
from plimsoll.models.hugging_face import TextShape, is_hugging_face
from plimsoll.models.workload import LossFunction
from plimsoll.planning.job_checks import require_teacher_folder
from plimsoll.records.job import Job
from plimsoll.techniques.mechanisms.codes import CODECS
from plimsoll.techniques.mechanisms.frozen_base import CodedLinear

Form = Literal["memory", "mapped", "int8"]

_TOKENIZER_FILE = "tokenizer.json"


class Texts(Protocol):
    """The facts of the data that a model depends on."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the tokenizer's vocabulary."""
        ...

    @property
    def num_labels(self) -> int | None:
        """Number of labels of a labelled task; ``None`` for other tasks."""
        ...

    @property
    def end_id(self) -> int:
        """Id of the token that ends a text."""
        ...

    @property
    def pad_id(self) -> int:
        """Id of the token that pads shorter texts."""
        ...


def form_of(job: Job, device: str | None = None) -> Form:
    """Return the form of the weights of a job's teacher: ``memory``, ``mapped`` or ``int8``.

    Raises:
        JobError: if the device does not support this form.
    """
    assert job.distill is not None
    is_cpu = (device or choose_device(job)).partition(":")[0] == "cpu"
    form = job.distill.form or ("mapped" if is_cpu else "memory")
    if form == "mapped" and not is_cpu:
        raise JobError(f"distill.form: {form} leaves weights in files, which a GPU cannot read: use int8 or memory")
    return form


def loss_for(job: Job, texts: Texts, device: str) -> LossFunction:
    """Return the loss of a job, and load its teacher if it has one.

    Args:
        job: the job.
        texts: the facts of the data that a model depends on.
        device: device of the training, or of the dry run.

    Raises:
        JobError: if the teacher does not fit the job.
        OutputError: see `load_teacher`.
    """
    if job.distill is None:
        return loss_of(job.task)[0]
    if job.distill.cache:
        return _distillation(job, None, texts)
    return _distillation(job, teacher_of(job, texts, device), texts)


def sketched_loss(job: Job, texts: Texts, model: nn.Module) -> LossFunction:
    """Return the loss of a job for planning, with a teacher whose weights take no memory.

    Args:
        job: the job.
        texts: the facts of the data that a model depends on.
        model: the trained model.

    Raises:
        JobError: see `require_teacher` and `require_alike`.
    """
    if job.distill is None:
        return loss_of(job.task)[0]
    teacher = require_teacher(job, texts)
    require_alike(job, model, teacher)
    return _distillation(job, teacher, texts)


def require_folder(job: Job) -> None:
    """Check the folder and the form of a job's teacher, if it has one, before the data are prepared.

    Raises:
        JobError: if the folder does not exist, or the device does not support the form.
    """
    if job.distill is None:
        return
    form_of(job)
    require_teacher_folder(job)


def require_teacher(job: Job, texts: Texts, label_names: tuple[str, ...] = ()) -> nn.Module:
    """Check that the teacher of a job fits the job, and return the teacher without memory for its weights.

    Args:
        job: the job, with ``distill``.
        texts: the facts of the data that a model depends on.
        label_names: names of the labels in the data, if they are known.

    Raises:
        JobError: if the teacher does not fit; the message names the field and the reason.
    """
    assert job.distill is not None
    folder = Path(job.distill.teacher)
    teacher = sketch_teacher(folder, job.task, _shape(job, texts), label_names)
    if job.distill.hidden and not is_hugging_face(teacher):
        raise JobError(
            f"distill.hidden: {job.distill.hidden:g} compares hidden states, which a recurrent teacher "
            f"({type(teacher).__name__}) does not return: leave distill.hidden out"
        )
    if job.tokenizer.path is not None:
        require_tokens(job, Path(job.tokenizer.path))
    return teacher


def require_tokens(job: Job, tokenizer: Path) -> None:
    """Check that the teacher of a job uses the same tokens as a tokenizer, if its folder has a tokenizer.

    Raises:
        JobError: if the tokens differ.
    """
    assert job.distill is not None
    folder = Path(job.distill.teacher)
    if (folder / _TOKENIZER_FILE).is_file():
        own, others = (load_tokenizer(path).backend.get_vocab(with_added_tokens=True) for path in (folder, tokenizer))
        require_same_tokens(folder, own, others)


def require_alike(job: Job, model: nn.Module, teacher: nn.Module) -> None:
    """Check that hidden states of a model can be compared with those in its teacher.

    Raises:
        JobError: if they cannot be compared.
    """
    if job.distill is None or not job.distill.hidden:
        return
    sizes = []
    for one in (model, teacher):
        if not is_hugging_face(one):
            raise JobError(
                f"distill.hidden: {job.distill.hidden:g} compares hidden states, which a "
                f"{type(one).__name__} does not return: leave distill.hidden out"
            )
        sizes.append(one.config.get_text_config().hidden_size)
    if sizes[0] != sizes[1]:
        raise JobError(
            f"distill.hidden: {job.distill.hidden:g} compares hidden states, which have {sizes[1]} numbers in the "
            f"teacher and {sizes[0]} in the model, and a projection between them would be trained and thrown away: "
            "leave distill.hidden out, or train a model as wide as its teacher, of fewer layers, heads or channels"
        )


def _shape(job: Job, texts: Texts) -> TextShape:
    labels = texts.num_labels if job.is_labelled else None
    is_tagger = job.task == "token-classification"
    return TextShape(texts.vocab_size, labels, texts.end_id, job.sequence_length, is_tagger, texts.pad_id)


def _distillation(job: Job, teacher: nn.Module | None, texts: Texts) -> Distillation:
    assert job.distill is not None
    loss_weights = LossWeights(job.distill.temperature, job.distill.hard)
    num_words = 0 if teacher is not None else texts.vocab_size
    return Distillation(teacher, job.task, loss_weights, hidden=job.distill.hidden, num_words=num_words)


def teacher_of(job: Job, texts: Texts, device: str) -> nn.Module:
    """Load the teacher of a job.

    Raises:
        JobError: see `loss_for`.
        OutputError: see `loss_for`.
    """
    assert job.distill is not None
    form, folder, shape = form_of(job, device), Path(job.distill.teacher), _shape(job, texts)
    if form == "memory":
        teacher = load_teacher(folder, job.task, shape, device=device)
    else:
        with outside_the_device():
            teacher = load_teacher(folder, job.task, shape, place="read-only")
    if form == "int8":
        _to_int8(teacher, device)
    fault = packing_fault(teacher) if job.data.pack and not _is_fake(teacher) else None
    if fault is not None:
        raise JobError(f"data.pack: the teacher of distill.teacher: {fault}: leave data.pack out, or give another")
    return teacher


def _is_fake(model: nn.Module) -> bool:
    return any(hasattr(parameter, "fake_mode") for parameter in model.parameters())


def _to_int8(teacher: nn.Module, device: str) -> None:
    """Convert the linear layers of a teacher to int8 codes, one by one, and move all other tensors to the device."""
    from transformers.pytorch_utils import Conv1D

    named = dict(teacher.named_modules())
    owners = Counter(id(one) for module in named.values() for one in module.parameters(recurse=False))
    output = cast(Any, teacher).get_output_embeddings() if is_hugging_face(teacher) else None
    num_coded = 0
    for name, layer in named.items():
        if type(layer) not in {nn.Linear, Conv1D} or layer is output or owners[id(layer.weight)] > 1:
            continue
        weight, bias = layer.weight.to(device), layer.bias
        parent, _, child = name.rpartition(".")
        coded = CodedLinear(weight, bias, not isinstance(layer, nn.Linear), CODECS["int8"])
        setattr(named[parent], child, coded.eval())
        num_coded += 1
        del weight
    if not num_coded:
        raise JobError(f"distill.form: int8 finds no linear layers in a {type(teacher).__name__}: use mapped or memory")
    if torch.device(device).type != "cpu":
        teacher.to(device)
    elif not _is_fake(teacher):
        heap.trim()  # free the temporary copies of the layers
