"""The loss of a student with a teacher: equal to both models and all logits in memory, for any cut of the batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distillations import (
    KINDS,
    LENGTH,
    SAMPLES,
    VOCABULARY,
    batch_of,
    gradients_of,
    largest_difference,
    model_of,
    plain_loss,
    task_of,
)
from plimsoll.data.batch import count_units, split_batch
from plimsoll.data.samples.teacher_cache import LOG_P, WORDS
from plimsoll.models.distillation.chunked import LossWeights, softened
from plimsoll.models.distillation.loss import Distillation, difference_of_states
from plimsoll.models.workload import model_loss

UNITS: Any = {"language-modeling": "next-tokens", "classification": "samples"}
TOLERANCES = {torch.float32: (1e-5, 2e-5), torch.float64: (1e-12, 1e-10)}


def silent(teacher: nn.Module) -> nn.Module:
    return teacher.eval().requires_grad_(False)


def distillation(kind: str, teacher: nn.Module | None, temperature: float, hard: float, **options: Any) -> Distillation:
    chunk_numbers = 2 * SAMPLES * VOCABULARY
    return Distillation(teacher, task_of(kind), LossWeights(temperature, hard), chunk_numbers=chunk_numbers, **options)


def cut(loss: Distillation, student: nn.Module, batch: dict[str, Tensor], kind: str, num_samples: int) -> float:
    """Accumulate the gradients of micro-batches, weighted as in a step, and return the loss."""
    units, total = UNITS[task_of(kind)], 0.0
    for piece in split_batch(batch, num_samples):
        part = loss(student, piece) * (count_units(piece, units) / count_units(batch, units))
        part.backward()
        total += float(part.detach())
    return total


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("temperature", "hard"), [(1.0, 0.0), (3.0, 0.5), (3.0, 1.0), (1.0, 0.5)])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_whole_logits_in_any_cut(
    kind: str, temperature: float, hard: float, dtype: torch.dtype
) -> None:
    student, teacher = model_of(kind, 0, width=8).to(dtype), silent(model_of(kind, 1).to(dtype))
    batch, (of_loss, of_gradients) = batch_of(kind), TOLERANCES[dtype]
    expected = plain_loss(student, teacher, batch, task_of(kind), temperature, hard)
    expected.backward()
    gradients = gradients_of(student)
    loss = distillation(kind, teacher, temperature, hard)
    for num_samples in (1, 2, 4, SAMPLES):
        student.zero_grad()
        assert cut(loss, student, batch, kind, num_samples) == pytest.approx(float(expected.detach()), rel=of_loss)
        assert largest_difference(gradients, gradients_of(student)) < of_gradients
    assert all(one.grad is None for one in teacher.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_lead_to_the_same_weights(kind: str) -> None:
    teacher, batch = silent(model_of(kind, 1).double()), batch_of(kind)
    students = [model_of(kind, 0, width=8).double() for _ in range(2)]
    optimizers = [torch.optim.SGD(student.parameters(), lr=0.3, momentum=0.9) for student in students]
    loss = distillation(kind, teacher, 3.0, 0.5)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        plain_loss(students[0], teacher, batch, task_of(kind), 3.0, 0.5).backward()
        cut(loss, students[1], batch, kind, 4)
        for optimizer in optimizers:
            optimizer.step()
    states = [dict(student.state_dict()) for student in students]
    assert largest_difference(*states) < 1e-9


def test_layers_that_are_computed_again_change_nothing() -> None:
    student, teacher, batch = model_of("gpt2", 0), silent(model_of("gpt2", 1)), batch_of("gpt2")
    loss, gradients = distillation("gpt2", teacher, 2.0, 0.5, hidden=0.3), []
    for checkpoints in (False, True):
        if checkpoints:
            student.activation_checkpointing_enable()  # type: ignore[operator]
        student.train().zero_grad()
        loss(student, batch).backward()
        gradients.append(gradients_of(student))
    assert largest_difference(*gradients) < 1e-6


def test_without_gradients_it_is_the_tasks_own_loss() -> None:
    for kind in KINDS:
        student, batch = model_of(kind, 0), batch_of(kind)
        with torch.no_grad():
            got = distillation(kind, silent(model_of(kind, 1)), 2.0, 0.5)(student, batch)
            assert torch.equal(got, model_loss(student, batch))


def test_the_fields_of_a_teacher_are_none_of_the_models() -> None:
    student, batch = model_of("lstm", 0), batch_of("lstm")
    more = batch | {WORDS: batch["input_ids"][..., None], LOG_P: torch.zeros(SAMPLES, LENGTH, 1)}
    with torch.no_grad():
        assert torch.equal(distillation("lstm", None, 2.0, 0.5)(student, more), model_loss(student, batch))


@pytest.mark.parametrize("kind", ["gpt2", "lstm"])
def test_what_was_said_before_is_as_good_as_a_teacher(kind: str) -> None:
    """All words are kept here; the tests of `TopTargets` keep only a few."""
    student, teacher, batch = model_of(kind, 0).double(), silent(model_of(kind, 1).double()), batch_of(kind)
    distillation(kind, teacher, 3.0, 0.5)(student, batch).backward()
    expected = gradients_of(student)
    fields = {name: value for name, value in batch.items() if name != "labels"}
    log_p, words = softened(teacher(**fields).logits, 3.0).topk(VOCABULARY, dim=-1)
    student.zero_grad()
    said = batch | {WORDS: words.int(), LOG_P: log_p}
    cut(distillation(kind, None, 3.0, 0.5, num_words=VOCABULARY), student, said, kind, 4)
    assert largest_difference(expected, gradients_of(student)) < 1e-10


def test_what_was_said_of_samples_is_as_good() -> None:
    kind = "lstm classifier"
    student, teacher, batch = model_of(kind, 0), silent(model_of(kind, 1)), batch_of(kind)
    fields = {name: value for name, value in batch.items() if name != "labels"}
    expected = distillation(kind, teacher, 3.0, 0.5)(student, batch)
    said = batch | {LOG_P: softened(teacher(**fields).logits, 3.0)}
    torch.testing.assert_close(distillation(kind, None, 3.0, 0.5)(student, said), expected)


@pytest.mark.parametrize("kind", ["gpt2", "bert classifier"])
def test_hidden_states_are_compared_in_any_cut(kind: str) -> None:
    student = model_of(kind, 0).double()
    teacher, batch = silent(model_of(kind, 1, layers=4).double()), batch_of(kind)
    fields = {name: value for name, value in batch.items() if name != "labels"}
    own, other = (model(**fields, output_hidden_states=True).hidden_states for model in (student, teacher))
    parts = [(own[number] - other[2 * number]).square().mean(-1) for number in range(3)]
    if kind == "gpt2":
        counted = (batch["labels"][:, 1:] != -100).double()
        means = [(part[:, :-1] * counted).sum() / counted.sum() for part in parts]
    else:
        mask = batch["attention_mask"].double()
        means = [((part * mask).sum(1) / mask.sum(1)).mean() for part in parts]
    expected = plain_loss(student, teacher, batch, task_of(kind), 2.0, 0.5) + 0.7 * sum(means) / 3
    expected.backward()
    gradients = gradients_of(student)
    loss = distillation(kind, teacher, 2.0, 0.5, hidden=0.7)
    for num_samples in (1, 4, SAMPLES):
        student.zero_grad()
        assert cut(loss, student, batch, kind, num_samples) == pytest.approx(float(expected.detach()), rel=1e-12)
        assert largest_difference(gradients, gradients_of(student)) < 1e-10


def test_more_layers_than_the_teacher_has_are_spread_over_them() -> None:
    states = tuple(torch.full((1, 1, 2), float(number)) for number in range(5))
    teacher = (states[0], states[4])
    assert float(difference_of_states(states, teacher, torch.ones(1, 1))) == pytest.approx((0 + 1 + 4 + 1 + 0) / 5)


def test_a_teacher_that_is_the_model_itself_teaches_nothing_new() -> None:
    student = model_of("gpt2", 0)
    loss = distillation("gpt2", silent(copy.deepcopy(student)), 2.0, 0.0)(student, batch_of("gpt2"))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0, abs=1e-5)
    assert all(float(one.abs().max()) < 1e-5 for one in gradients_of(student).values())
