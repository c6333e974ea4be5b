"""The loss of a Trainer, computed with a model that replaces the trainer's model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tests.trainers import BATCH_SAMPLES, language_model, trainer_of
from torch import Tensor, nn
from transformers import Trainer

from plimsoll.integrations.loops.trainer_loss import loss_of


class Distance(nn.Module):
    """A loss that contains the model, as in sentence-transformers, and also calls it in backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        loss = self.model(input_ids=ids).logits.square().mean()

        def again(gradient: Tensor) -> None:
            with torch.enable_grad():
                self.model(input_ids=ids).logits.mean().backward()

        loss.register_hook(again)
        return loss


class WithModules(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return self.losses[inputs.pop("dataset_name")](inputs["input_ids"])  # type: ignore[attr-defined]


def test_a_loss_that_has_the_model_in_it_has_the_other_one_and_keeps_its_own(tmp_path: Path):
    trainer = trainer_of(language_model(), tmp_path, WithModules)
    assert trainer.model is not None
    loss_module = nn.Sequential(Distance(trainer.model))
    trainer.losses = {"pairs": loss_module}  # type: ignore[attr-defined]
    other = copy.deepcopy(trainer.model)
    batch = {"input_ids": torch.arange(8)[None]}
    loss_of(trainer, {"dataset_name": "pairs"}, None, other, batch).backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert all(parameter.grad is not None for parameter in other.parameters())
    assert trainer.losses == {"pairs": loss_module}  # type: ignore[attr-defined]
    assert loss_module[0].model is trainer.model


def test_the_loss_of_a_subclass_is_planned_with(tmp_path: Path):
    """With this model `model(**batch).loss` would fail."""
    import plimsoll

    trainer = trainer_of(language_model(), tmp_path, WithModules, remove_unused_columns=False)
    assert trainer.model is not None
    trainer.losses = {"pairs": Distance(trainer.model)}  # type: ignore[attr-defined]
    plain = trainer.data_collator
    trainer.data_collator = lambda rows: {
        "input_ids": plain(rows)["input_ids"], "dataset_name": "pairs", "return_loss": True
    }  # fmt: skip
    with plimsoll.transformers.protected(trainer, budget="4GiB") as protection:
        assert protection.plan is not None
    # The weights of micro-batches are unknown.
    assert {fallback.micro_batch for fallback in protection.plan.fallbacks} == {BATCH_SAMPLES}
