"""The loss of a student that learns from the labels and from a teacher: a `LossFunction` of a job with ``distill``.

    loss = hard * (the task's own loss) + (1 - hard) * T^2 * KL(teacher_T || student_T)
         + hidden * mean square difference of hidden states

each a mean over the units of the task: the labels that count, or the samples (`plimsoll.models.distillation.chunked`
has the divergence). The teacher is in evaluation mode, has no gradients and is no part of the model, its checkpoints or
its optimizer. Does NOT cover windows of a stream, whose state the teacher would have to carry as well.

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
    """`LossFunction`: of the labels and a teacher.

    Args:
        teacher: what teaches, on the student's device, in evaluation mode and without gradients; ``None``: what it says
            is in the batches (`WORDS` and `LOG_P`), at this temperature.
        task: of both.
        loss_weights: of both losses.
        hidden: how much hidden states count.
        num_words: with no teacher, the words that it had.
        chunk_numbers: the most logits at once.
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
        """Return the mean loss of a batch; without gradients the task's own, so that evaluations compare."""
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
        known = teacher_output  # which mypy would forget

        @torch.no_grad()
        def logits_of(begin: int, end: int) -> Tensor:
            return known.head(known.hidden_BTH[:, begin:end])

        return FullTargets(logits_of, self._loss_weights.temperature)

    def _of_labels(
        self, model: nn.Module, fields: Mapping[str, Any], labels: Tensor, batch: Mapping[str, Any]
    ) -> Tensor:
        """Of samples, or of their tokens: there are few labels, so that logits are as nothing."""
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
            # Each sample's mean over its tokens, so that a batch may be cut anywhere.
            mask_BT = fields["attention_mask"].to(shares.dtype)
            shares_BT = mask_BT / mask_BT.sum(dim=1, keepdim=True).clamp(min=1) / len(mask_BT)
        return loss + self._hidden * difference_of_states(
            student.hidden_states, teacher_output.hidden_states, shares_BT
        )


def _shares_of(labels: Tensor, dtype: torch.dtype) -> Tensor:
    """What each label counts in the mean: those of no token (-100) do not."""
    counted = (labels != IGNORED_LABEL).to(dtype)
    return counted / counted.sum()


def difference_of_states(student: tuple[Tensor, ...], teacher: tuple[Tensor, ...], shares_BT: Tensor) -> Tensor:
    """Return the mean square difference of hidden states (B, T, H), layers matched evenly.

    Student's layer i is compared with teacher's layer round(i * teacher's layers / student's layers), the embeddings
    (i = 0) among them: the even choice of DistilBERT and TinyBERT (Jiao et al. 2020, arXiv:1909.10351), without a
    learned projection, since both have the same size.

    Args:
        student: the embeddings and what each layer passes on.
        teacher: the same, of as many numbers each.
        shares_BT: what each token counts, 1 in sum.
    """
    last = max(len(student) - 1, 1)
    total = torch.zeros((), dtype=shares_BT.dtype, device=shares_BT.device)
    for number, own in enumerate(student):
        other = teacher[round(number * (len(teacher) - 1) / last)]
        squares = (own - other).square().mean(dim=-1, dtype=shares_BT.dtype)
        total = total + (squares * shares_BT).sum()
    return total / len(student)
