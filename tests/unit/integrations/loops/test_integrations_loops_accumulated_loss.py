"""The check whether a loss is divided by the labels of its window: its warnings are right, and so is the remedy."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainers import LENGTH, MeanLoss, assert_alike, classifier, language_model, short_of_memory, trainer_of
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

import plimsoll
from plimsoll.integrations.loops.accumulated_loss import adds_nothing


def _gradients(trainer: Trainer) -> list[Tensor]:
    """Return the gradients of the first update."""
    found: list[Tensor] = []

    class Kept(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            found.extend(parameter.grad.clone() for parameter in kwargs["model"].parameters())
            control.should_training_stop = True

    trainer.add_callback(Kept())
    plimsoll.transformers.fit(trainer)
    return found


@pytest.mark.parametrize(("make", "cls"), [(classifier, Trainer), (language_model, MeanLoss)])
def test_a_loss_that_is_not_divided_by_the_labels_of_its_window_is_warned_of(tmp_path: Path, make, cls: type[Trainer]):
    """The claim of the warning is true, and its remedy corrects the gradients."""
    whole = trainer_of(make(), tmp_path / "a", cls, max_grad_norm=0.0)
    whole.train_dataset = whole.train_dataset[:1] * 8
    expected = _gradients(whole)
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_grad_norm": 0.0}
    for mended in (False, True):
        trainer = trainer_of(make(), tmp_path / str(mended), cls, **given)
        trainer.train_dataset = whole.train_dataset
        if mended:
            trainer.loss_is_scaled_for_ga = False
        with nullcontext() if mended else pytest.warns(UserWarning, match="4 times too large"):
            found = _gradients(trainer)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other * (1 if mended else 4), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}])
def test_a_loss_that_is_divided_by_them_is_not(tmp_path: Path, options: dict[str, Any]):
    undisturbed = trainer_of(language_model(dropout=0.2), tmp_path / "a", gradient_accumulation_steps=2, **options)
    undisturbed.train()
    trainer = trainer_of(language_model(dropout=0.2), tmp_path / "b", gradient_accumulation_steps=2, **options)
    plimsoll.transformers.fit(trainer)  # with warnings as errors
    assert_alike(trainer, undisturbed)


class Picky(nn.Module):
    """A model with BatchNorm, which counts its passes; it may have a loss in training mode only."""

    def __init__(self, only_in_training: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.only_in_training = only_in_training
        self.norm, self.layer = nn.BatchNorm1d(LENGTH), nn.Linear(LENGTH, 3)
        self.register_buffer("num_passes", torch.zeros(()))

    def forward(self, input_ids: Tensor, labels: Tensor, **options: Any) -> dict[str, Tensor]:
        self.num_passes += 1
        logits = self.layer(self.norm(input_ids.float()))
        is_known = self.training or not self.only_in_training
        return {"logits": logits} | ({"loss": nn.functional.cross_entropy(logits, labels)} if is_known else {})


@pytest.mark.filterwarnings("ignore:the loss of this Picky does not depend on num_items_in_batch")
@pytest.mark.parametrize("only_in_training", [True, False])
def test_looking_at_the_loss_changes_nothing(tmp_path: Path, only_in_training: bool):
    """A model in evaluation mode would be split although its BatchNorm forbids it."""
    undisturbed = trainer_of(Picky(only_in_training), tmp_path / "a", gradient_accumulation_steps=2)
    undisturbed.train()
    trainer = trainer_of(Picky(only_in_training), tmp_path / "b", gradient_accumulation_steps=2)
    assert trainer.model is not None
    with short_of_memory(trainer.model, [1], Counter()):
        plimsoll.transformers.fit(trainer)
    assert_alike(trainer, undisturbed)


class OwnStep(Trainer):
    def training_step(self, *arguments, **options):
        return super().training_step(*arguments, **options)


def test_a_trainer_adds_nothing_to_its_models_loss_unless_something_is_the_users(tmp_path, monkeypatch):
    trainer = trainer_of(language_model(), tmp_path)
    assert adds_nothing(trainer)
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "compute_loss", lambda model, inputs, **options: model(**inputs).loss)
        assert not adds_nothing(trainer)
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "compute_loss", lambda *arguments, **options: None)
        assert not adds_nothing(trainer)
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "compute_loss_func", lambda *arguments, **options: None)
        assert not adds_nothing(trainer)
    assert not adds_nothing(OwnStep(trainer.model, trainer.args))
    assert not adds_nothing(trainer_of(language_model(), tmp_path, label_smoothing_factor=0.1))
