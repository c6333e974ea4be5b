"""The divergence of two distributions and its gradient: torch's, whole and with the words that are left as one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from plimsoll.models.soft_targets import FullTargets, TopTargets, softened

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
    """To take the words that are kept as if they were all would push them up."""
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
