"""The loss in chunks equals the whole loss, as do its gradients. Targets are compared by the formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from distillations import SAMPLES, VOCABULARY, batch_of, gradients_of, largest_difference, model_of, plain_loss
from plimsoll.errors import InputError
from plimsoll.models.distillation.chunked import FullTargets, LossWeights, TopTargets, chunked_distillation, softened
from plimsoll.models.head_apart import head_apart

WORDS = 7


def logits(seed: int, num_words: int = WORDS) -> Tensor:
    return torch.randn((2, 3, num_words), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def full(teacher: Tensor, temperature: float) -> FullTargets:
    return FullTargets(lambda begin, end: teacher[:, begin:end], temperature)


def top(teacher: Tensor, num_kept: int, temperature: float) -> TopTargets:
    log_p, words = softened(teacher, temperature).topk(num_kept, dim=-1)
    return TopTargets(words.int(), log_p, temperature, teacher.shape[-1])


def by_autograd(student: Tensor, divergence: Tensor) -> Tensor:
    return torch.autograd.grad(divergence.sum(), student)[0]


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_it_is_torchs_divergence_and_its_gradient(temperature: float) -> None:
    teacher, student = logits(0), logits(1).requires_grad_()
    scaled = student / temperature
    expected = functional.kl_div(
        scaled.log_softmax(-1), (teacher / temperature).softmax(-1), reduction="none"
    ).sum(-1)  # fmt: skip
    divergence, gradient = full(teacher, temperature).compare(student.detach(), 0, 3)
    torch.testing.assert_close(divergence, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, by_autograd(student, expected) * temperature, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_with_all_words_kept_it_is_the_same(temperature: float) -> None:
    teacher, student = logits(0), logits(1)
    for kept, whole in zip(
        top(teacher, WORDS, temperature).compare(student[:, 1:3], 1, 3),
        full(teacher, temperature).compare(student[:, 1:3], 1, 3),
        strict=True,
    ):
        torch.testing.assert_close(kept, whole, rtol=1e-10, atol=1e-12)


def test_the_words_that_are_left_are_one() -> None:
    teacher, student = logits(0), logits(1).requires_grad_()
    p, q = teacher.softmax(-1), student.softmax(-1)
    kept, words = p.topk(2, dim=-1)
    of_kept = q.gather(-1, words)
    rest_p, rest_q = 1 - kept.sum(-1), 1 - of_kept.sum(-1)
    expected = (kept * (kept / of_kept).log()).sum(-1) + rest_p * (rest_p / rest_q).log()
    divergence, gradient = top(teacher, 2, 1.0).compare(student.detach(), 0, 3)
    torch.testing.assert_close(divergence, expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, by_autograd(student, expected), rtol=1e-10, atol=1e-12)
    assert (divergence <= full(teacher, 1.0).compare(student.detach(), 0, 3)[0] + 1e-12).all()


def test_a_student_that_is_as_the_teacher_is_left_alone_whatever_is_kept() -> None:
    """If the kept words counted as all words, their probabilities would be pushed up."""
    teacher = logits(0)
    divergence, gradient = top(teacher, 2, 1.0).compare(teacher, 0, 3)
    torch.testing.assert_close(divergence, torch.zeros_like(divergence), rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("rows", "others"), [(WORDS + 2, WORDS), (WORDS, WORDS + 2)])
def test_rows_that_only_one_has_are_left_out(rows: int, others: int) -> None:
    student, teacher = logits(1, rows), logits(0, others)
    expected = full(teacher[..., :WORDS], 2.0).compare(student[..., :WORDS], 0, 3)
    divergence, gradient = full(teacher, 2.0).compare(student, 0, 3)
    torch.testing.assert_close(divergence, expected[0])
    torch.testing.assert_close(gradient[..., :WORDS], expected[1])
    assert gradient.shape == student.shape
    assert not gradient[..., WORDS:].any()


def test_neither_is_changed() -> None:
    teacher, student = logits(0), logits(1)
    before = teacher.clone(), student.clone()
    full(teacher, 1.0).compare(student, 0, 3)
    top(teacher, 2, 1.0).compare(student, 0, 3)
    assert torch.equal(teacher, before[0])
    assert torch.equal(student, before[1])


LOSS_WEIGHTS = LossWeights(3.0, 0.5)
POSITION = SAMPLES * VOCABULARY
"""Logits of one position of all samples."""


def chunked(student: nn.Module, teacher: nn.Module, batch: dict[str, Tensor], num_positions: int = 2) -> Tensor:
    fields = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        teacher_output, _ = head_apart(teacher, fields)
    targets = FullTargets(
        lambda begin, end: teacher_output.head(teacher_output.hidden_BTH[:, begin:end]).detach(),
        LOSS_WEIGHTS.temperature,
    )
    parts, _ = head_apart(student, fields)
    return chunked_distillation(parts, batch["labels"], targets, LOSS_WEIGHTS, num_positions * POSITION)


def both(student: nn.Module, teacher: nn.Module, loss: Tensor) -> tuple[float, dict[str, Tensor]]:
    student.zero_grad()
    loss.backward()
    return float(loss.detach()), gradients_of(student)


def with_cap(model: nn.Module) -> nn.Module:
    """Add a function after the head that needs a gradient."""
    model.head.register_forward_hook(lambda layer, given, made: made.tanh() * 3)  # type: ignore[operator, union-attr]
    return model


STUDENTS = {
    "tied": lambda: model_of("gpt2", 0),
    "untied": lambda: model_of("gpt2", 0, tie_word_embeddings=False),
    "with a bias": lambda: model_of("lstm", 0),
    "tied, with a bias": lambda: model_of("lstm", 0, tie_weights=True),
    "with a cap": lambda: with_cap(model_of("lstm", 0)),
    "adaptive": lambda: model_of("lstm", 0, adaptive_cutoffs=(10, 20)),
}


@pytest.mark.parametrize("num_positions", [1, 3, 100])
@pytest.mark.parametrize("name", STUDENTS)
def test_it_is_the_loss_of_all_logits(name: str, num_positions: int) -> None:
    student, teacher, batch = STUDENTS[name]().double(), model_of("gpt2", 1).double().eval(), batch_of("gpt2")
    expected = both(student, teacher, plain_loss(student, teacher, batch, "language-modeling", *LOSS_WEIGHTS))
    got = both(student, teacher, chunked(student, teacher, batch, num_positions))
    assert got[0] == pytest.approx(expected[0], rel=1e-12)
    assert largest_difference(expected[1], got[1]) < 1e-10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_only_products_are_rounded(dtype: torch.dtype) -> None:
    student, teacher, batch = model_of("gpt2", 0), model_of("gpt2", 1).eval(), batch_of("gpt2")
    with torch.autocast("cpu", dtype):
        loss = plain_loss(student, teacher, batch, "language-modeling", *LOSS_WEIGHTS)
    expected = both(student, teacher, loss)
    with torch.autocast("cpu", dtype):
        loss = chunked(student, teacher, batch)
    got = both(student, teacher, loss)
    assert loss.dtype == torch.float32
    assert got[0] == pytest.approx(expected[0], rel=1e-3)
    assert largest_difference(expected[1], got[1]) < 4e-2


def test_small_gradients_are_not_lost_in_fp16() -> None:
    """Gradients of the sum are computed, and divided only in float32."""
    student, teacher, batch = STUDENTS["untied"](), model_of("gpt2", 1).eval(), batch_of("gpt2")
    expected = both(student, teacher, chunked(student, teacher, batch))[1]
    with torch.autocast("cpu", torch.float16):
        loss = chunked(student, teacher, batch)
    tiny = {name: one * 1e7 for name, one in both(student, teacher, loss * 1e-7)[1].items()}
    name = "lm_head.weight"
    torch.testing.assert_close(tiny[name], expected[name], rtol=0.1, atol=2e-2 * float(expected[name].abs().max()))


def test_what_is_frozen_has_no_gradient() -> None:
    student, teacher, batch = model_of("lstm", 0), model_of("gpt2", 1).eval(), batch_of("gpt2")
    for parameter in student.head.parameters():  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    expected = both(student, teacher, plain_loss(student, teacher, batch, "language-modeling", *LOSS_WEIGHTS))[1]
    got = both(student, teacher, chunked(student, teacher, batch))[1]
    assert "head.weight" not in got
    assert largest_difference(expected, got) < 1e-5


def test_a_second_backward_is_refused() -> None:
    student, teacher = model_of("gpt2", 0), model_of("gpt2", 1).eval()
    loss = chunked(student, teacher, batch_of("gpt2"))
    loss.backward(retain_graph=True)
    with pytest.raises(InputError, match="a second time"):
        loss.backward()


def test_never_more_logits_than_asked_for() -> None:
    """The only exception is one position, with which a whole transformers model is called."""
    student, teacher, sizes = model_of("gpt2", 0), model_of("gpt2", 1).eval(), []
    for model in (student, teacher):
        head = model.lm_head
        run = head.forward
        head.forward = lambda inputs, run=run: sizes.append(inputs.shape[1]) or run(inputs)  # type: ignore[func-returns-value, union-attr]
    chunked(student, teacher, batch_of("gpt2"), 3).backward()
    assert sorted(sizes) == [1, 1, 2, 2, 3, 3, 3, 3]
