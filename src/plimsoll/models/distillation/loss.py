"""The loss of a student that learns from labels and a teacher: the `LossFunction` of a job with ``distill``.

    loss = hard * (the task's loss) + (1 - hard) * T^2 * KL(teacher_T || student_T)
         + hidden * mean square difference of hidden states

Each term is a mean over the units of the task: the labels that count, or the samples.
`plimsoll.models.distillation.chunked` defines the divergence (KL). The teacher is in evaluation mode and has no
gradients. It is not part of the model, its checkpoints or its optimizer.

Not handled: windows of a stream, because the teacher would have to carry its state too.

Shapes: B samples, T tokens, H hidden size, L labels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll.data.batch import IGNORED_LABEL
from plimsoll.data.samples.teacher_cache import LOG_P, WORDS
from plimsoll.models.distillation.chunked import (
    CHUNK_NUMBERS,
    FullTargets,
    LossWeights,
    SoftTargets,
    TopTargets,
    chunked_distillation,
    softened,
)
from plimsoll.models.head_apart import HeadApart, head_apart
from plimsoll.models.workload import model_loss
from plimsoll.records.job import Task


class Distillation:
    """The `LossFunction` for labels and a teacher.

    Args:
        teacher: the teacher on the student's device, in evaluation mode and without gradients. ``None``: its
            log-probabilities are in the batches (fields `WORDS` and `LOG_P`), at the temperature of ``loss_weights``.
        task: the task of teacher and student.
        loss_weights: the weights of the loss from the labels and of the divergence.
        hidden: the weight of the mean square difference of hidden states.
        num_words: the size of the teacher's vocabulary, if ``teacher`` is ``None``.
        chunk_numbers: the maximum number of logits per chunk.
    """

    def __init__(
        self,
        teacher: nn.Module | None,
        task: Task,
        loss_weights: LossWeights,
        *,
        hidden: float = 0.0,
        num_words: int = 0,
        chunk_numbers: int = CHUNK_NUMBERS,
    ) -> None:
        self.teacher, self._task, self._loss_weights, self._hidden = teacher, task, loss_weights, hidden
        self._num_words, self._chunk_numbers = num_words, chunk_numbers

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Return the mean loss of a batch.

        If gradients are disabled, it is the task's loss alone, so that evaluations do not depend on the teacher.
        """
        fields = {name: value for name, value in batch.items() if name not in {WORDS, LOG_P}}
        if not torch.is_grad_enabled():
            return model_loss(model, fields)
        labels = fields.pop("labels")
        if self._task == "language-modeling":
            return self._of_next_tokens(model, fields, labels, batch)
        return self._of_labels(model, fields, labels, batch)

    def _of_next_tokens(
        self, model: nn.Module, fields: Mapping[str, Any], labels_BT: Tensor, batch: Mapping[str, Any]
    ) -> Tensor:
        teacher_output = None
        if self.teacher is not None:
            with torch.no_grad():
                teacher_output, _ = head_apart(self.teacher, fields, with_states=self._hidden > 0)
        student, _ = head_apart(model, fields, with_states=self._hidden > 0)
        loss = chunked_distillation(
            student, labels_BT, self._targets(teacher_output, batch), self._loss_weights, self._chunk_numbers
        )
        if not self._hidden:
            return loss
        assert teacher_output is not None
        shares_BT = functional.pad(_shares_of(labels_BT[:, 1:], loss.dtype), (0, 1))
        return loss + self._hidden * difference_of_states(student.states, teacher_output.states, shares_BT)

    def _targets(self, teacher_output: HeadApart | None, batch: Mapping[str, Any]) -> SoftTargets:
        if teacher_output is None:
            return TopTargets(batch[WORDS], batch[LOG_P], self._loss_weights.temperature, self._num_words)
        known = teacher_output  # keeps its narrowed type in the closure

        @torch.no_grad()
        def logits_of(begin: int, end: int) -> Tensor:
            return known.head(known.hidden_BTH[:, begin:end])

        return FullTargets(logits_of, self._loss_weights.temperature)

    def _of_labels(
        self, model: nn.Module, fields: Mapping[str, Any], labels: Tensor, batch: Mapping[str, Any]
    ) -> Tensor:
        """Return the loss of a classifier or tagger. It needs no chunks, because it has logits for few labels."""
        named = {**fields, "output_hidden_states": True} if self._hidden else fields
        temperature, hard = self._loss_weights
        teacher_output = None
        if self.teacher is not None:
            with torch.no_grad():
                teacher_output = self.teacher(**named)
        student = model(**named, labels=labels)
        logits_NL = student.logits.to(torch.promote_types(student.logits.dtype, torch.float32))
        log_p = (
            batch[LOG_P].to(logits_NL.dtype)
            if teacher_output is None
            else softened(teacher_output.logits.to(logits_NL.dtype), temperature)
        )
        divergence = functional.kl_div(softened(logits_NL, temperature), log_p, reduction="none", log_target=True)
        shares = _shares_of(labels, logits_NL.dtype)
        soft = (divergence.sum(dim=-1) * shares).sum() * temperature**2
        loss: Tensor = hard * student.loss + (1 - hard) * soft
        if not self._hidden:
            return loss
        assert teacher_output is not None
        shares_BT = shares
        if self._task == "classification":
            # The mean over each sample's tokens, so that a batch can be split between any two samples.
            mask_BT = fields["attention_mask"].to(shares.dtype)
            shares_BT = mask_BT / mask_BT.sum(dim=1, keepdim=True).clamp(min=1) / len(mask_BT)
        return loss + self._hidden * difference_of_states(
            student.hidden_states, teacher_output.hidden_states, shares_BT
        )


def _shares_of(labels: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight of each label in the mean. Labels of -100 have the weight 0."""
    counted = (labels != IGNORED_LABEL).to(dtype)
    return counted / counted.sum()


def difference_of_states(student: tuple[Tensor, ...], teacher: tuple[Tensor, ...], shares_BT: Tensor) -> Tensor:
    """Return the mean square difference of hidden states (B, T, H), with layers matched evenly.

    The student's layer i is compared with the teacher's layer round(i * teacher's layers / student's layers); layer 0
    is the embeddings. DistilBERT and TinyBERT match layers in the same way (Jiao et al. 2020, arXiv:1909.10351). No
    learned projection is needed, because both hidden sizes are equal.

    Args:
        student: the student's embeddings and the output of each layer.
        teacher: the teacher's embeddings and the output of each layer, with the same hidden size.
        shares_BT: the weight of each token in the mean; the weights sum to 1.
    """
    last = max(len(student) - 1, 1)
    total = torch.zeros((), dtype=shares_BT.dtype, device=shares_BT.device)
    for number, own in enumerate(student):
        other = teacher[round(number * (len(teacher) - 1) / last)]
        squares = (own - other).square().mean(dim=-1, dtype=shares_BT.dtype)
        total = total + (squares * shares_BT).sum()
    return total / len(student)
