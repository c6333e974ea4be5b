"""Trainers, models and data as users have them, with out-of-memory errors: equal to the undisturbed trainer."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainers import (
    BATCH_SAMPLES,
    LENGTH,
    assert_alike,
    assert_unwrapped,
    language_model,
    samples,
    short_of_memory,
    trainer_of,
)
from torch import Tensor, nn
from transformers import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

import plimsoll
from plimsoll.errors import InputError, OutOfMemoryError
from plimsoll.step.failpoints import armed


class OwnStep(Trainer):
    """A trainer that overrides the training step and removes a field from the batch."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        labels = inputs.pop("labels")
        logits = model(**self._prepare_inputs(inputs)).logits[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
        self.accelerator.backward(loss)
        return loss.detach()


class OwnBackward(OwnStep):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()


def run_short(tmp_path: Path, passes: Sequence[int], cls: type[Trainer] = Trainer, **arguments: Any) -> list[Trainer]:
    """Train with out-of-memory errors in some passes, and without; return both trainers."""
    undisturbed = trainer_of(language_model(), tmp_path / "a", cls, **arguments)
    undisturbed.train()
    trainer = trainer_of(language_model(), tmp_path / "b", cls, **arguments)
    assert trainer.model is not None
    with short_of_memory(trainer.model, passes, Counter()):
        plimsoll.transformers.fit(trainer)
    return [trainer, undisturbed]


def test_a_trainer_with_a_step_of_its_own_is_cut_right(tmp_path: Path):
    assert_alike(*run_short(tmp_path, [2, 3, 4, 6], OwnStep))


def test_a_step_whose_micro_batches_cannot_be_weighted_is_refused_and_undone(tmp_path: Path):
    trainer = trainer_of(language_model(), tmp_path, OwnBackward)
    assert trainer.model is not None
    with (
        short_of_memory(trainer.model, [1, 2], Counter()),
        pytest.raises(InputError, match=r"OwnBackward.training_step does not call self.accelerator.backward"),
    ):
        plimsoll.transformers.fit(trainer)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert "backward" not in vars(trainer.accelerator)


def test_a_last_window_of_fewer_batches(tmp_path: Path):
    """8 batches in windows of 3: the third window has two."""
    for passes in ([2, 3], [10, 11], [8, 9]):
        trainer, undisturbed = run_short(tmp_path, passes, gradient_accumulation_steps=3, num_train_epochs=2)
        assert trainer.state.global_step == 6
        assert_alike(trainer, undisturbed)


def test_an_update_that_fails_is_done_with_gradients_that_are_clipped_again(tmp_path: Path):
    class Called(TrainerCallback):
        times = 0

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            self.times += 1

    settings: dict[str, Any] = {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2}
    undisturbed = trainer_of(language_model(), tmp_path / "a", **settings)
    undisturbed.train()
    trainer, called = trainer_of(language_model(), tmp_path / "b", **settings), Called()
    trainer.add_callback(called)
    with armed("optimizer", *range(1, 9)), plimsoll.transformers.protected(trainer) as protection:
        trainer.train()
    assert {event.phase for event in protection.events} == {"optimizer"}
    assert called.times == 5  # 4 updates; the first did not fit even parameter by parameter
    assert_alike(trainer, undisturbed)


class Unlabelled(nn.Module):
    """A model that needs no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layer(input_ids) - input_ids).square().mean()}


@pytest.mark.parametrize("units", [None, "samples"])
def test_a_collator_without_labels_is_cut_only_where_units_are_given(tmp_path: Path, units: Any):
    torch.manual_seed(0)
    data = [{"input_ids": torch.randn(4)} for _ in range(12)]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, num_train_epochs=1, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, optim="sgd", logging_steps=1,
    )  # fmt: skip
    first = Unlabelled()
    trainers = [Trainer(copy.deepcopy(first), arguments, train_dataset=data) for _ in range(2)]
    trainers[1].train()
    assert trainers[0].model is not None
    with short_of_memory(trainers[0].model, [2, 3], Counter()):
        if units is None:
            with pytest.raises(InputError, match=r"a batch without labels \(it has input_ids\).*units="):
                plimsoll.transformers.fit(trainers[0])
        else:
            plimsoll.transformers.fit(trainers[0], units=units)
            assert_alike(*trainers)


class Stream(torch.utils.data.IterableDataset):
    """A data set of texts that can be read only once and has no length."""

    def __init__(self, data: list[dict[str, Tensor]]) -> None:
        self.left = iter(data)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self.left


def streaming(folder: Path) -> Trainer:
    trainer = trainer_of(language_model(), folder, max_steps=4, gradient_accumulation_steps=2)
    trainer.train_dataset = Stream(samples(language_model()))
    return trainer


def test_a_stream_is_read_once(tmp_path: Path):
    undisturbed, trainer = streaming(tmp_path / "a"), streaming(tmp_path / "b")
    undisturbed.train()
    assert trainer.model is not None
    with pytest.raises(InputError, match="a Stream, has no length"):
        plimsoll.transformers.fit(trainer, budget="4GiB")
    with short_of_memory(trainer.model, [8, 9], Counter()):
        plimsoll.transformers.fit(trainer)
    assert_alike(trainer, undisturbed)


def test_a_batch_in_which_nothing_is_to_be_learned_is_done_as_the_trainer_does(tmp_path: Path):
    trainers = [trainer_of(language_model(), tmp_path / name, gradient_accumulation_steps=2) for name in "ab"]
    for trainer in trainers:
        for sample in trainer.train_dataset[:30]:  # type: ignore[index]
            sample["labels"] = torch.full((LENGTH,), -100)
    trainers[1].train()
    assert trainers[0].model is not None
    with short_of_memory(trainers[0].model, [1, 2, 5], Counter()):
        plimsoll.transformers.fit(trainers[0])
    assert_alike(*trainers)


def test_a_batch_that_cannot_be_cut_is_done_as_a_whole(tmp_path: Path):
    """An example is rows packed into one, with the positions at which they begin."""

    def packed(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
        ids = torch.cat([row["input_ids"] for row in rows])[None]
        return {"input_ids": ids, "labels": ids, "num_items_of": torch.tensor([len(row["input_ids"]) for row in rows])}

    class Packed(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            inputs.pop("num_items_of")
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    trainers = []
    for name in "ab":
        trainer = trainer_of(
            language_model(), tmp_path / name, Packed, per_device_train_batch_size=1, remove_unused_columns=False
        )
        trainer.data_collator = packed
        trainer.args.per_device_train_batch_size = trainer._train_batch_size = 1
        trainers.append(trainer)
    trainers[1].train()
    assert trainers[0].model is not None
    with short_of_memory(trainers[0].model, [5], Counter()):
        plimsoll.transformers.fit(trainers[0])
    assert_alike(*trainers)


def test_bf16_on_a_processor(tmp_path: Path):
    trainer, undisturbed = run_short(tmp_path, [2], bf16=True)  # bf16 depends on the micro-batches
    assert_alike(trainer, undisturbed)


def test_a_model_that_is_made_when_training_begins(tmp_path: Path):
    """The model is made again for each training in the block."""
    arguments = trainer_of(language_model(), tmp_path).args
    data = samples(language_model())
    trainers = [Trainer(args=arguments, train_dataset=data, model_init=lambda: language_model()) for _ in range(2)]
    for _ in range(2):
        trainers[1].train()
    with plimsoll.transformers.protected(trainers[0]) as protection:
        for _ in range(2):
            with armed("backward", 3):
                trainers[0].train()
    assert len(protection.events) == 2
    assert_alike(*trainers)


def test_auto_find_batch_size_has_nothing_to_find(tmp_path: Path):
    trainer, undisturbed = run_short(tmp_path, [5, 6], auto_find_batch_size=True)
    assert trainer.state.train_batch_size == BATCH_SAMPLES
    assert_alike(trainer, undisturbed)


def test_what_nothing_survives_does_not_begin_anew_with_another_batch_size(tmp_path: Path):
    trainer = trainer_of(language_model(), tmp_path, auto_find_batch_size=True)
    assert trainer.model is not None
    with (
        short_of_memory(trainer.model, range(3, 1000), seen := Counter[tuple[int, ...]]()),
        pytest.raises(OutOfMemoryError, match="smallest possible"),
    ):
        plimsoll.transformers.fit(trainer)
    assert max(seen.values()) == 1
    assert trainer.state.train_batch_size == BATCH_SAMPLES


def test_a_callback_that_stops_within_a_window(tmp_path: Path):
    """A second training follows in the same block and starts without gradients."""

    class StopEarly(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    trainers = [trainer_of(language_model(), tmp_path / name, gradient_accumulation_steps=2) for name in "ab"]
    for trainer in trainers:
        trainer.add_callback(StopEarly)
    guards: list[Any] = [plimsoll.transformers.protected(trainers[0]), nullcontext()]
    for trainer, guard in zip(trainers, guards, strict=True):
        with guard:
            trainer.train()
            trainer.remove_callback(StopEarly)
            trainer.train()
    assert_alike(*trainers)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupted_step_is_undone_and_the_trainer_unwrapped(tmp_path: Path, error: type[BaseException]):
    trainer = trainer_of(language_model(), tmp_path, gradient_accumulation_steps=2)
    model = trainer.model
    assert model is not None
    num_passes = 0

    def interrupt(module: nn.Module, arguments: Any) -> None:
        nonlocal num_passes
        num_passes += 1
        if num_passes == 4:
            raise error

    handle = model.register_forward_pre_hook(interrupt)
    with pytest.raises(error):
        plimsoll.transformers.fit(trainer)
    handle.remove()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_unwrapped(trainer)
    trainer.train()
    assert trainer.state.global_step == 4


@pytest.mark.parametrize("optim", ["lomo", "adalomo"])
def test_updates_inside_backward_are_refused(tmp_path: Path, optim: str):
    trainer = trainer_of(language_model(), tmp_path)
    object.__setattr__(trainer.args, "optim", optim)
    with pytest.raises(InputError, match=f"optim={optim} updates the parameters inside backward"):
        plimsoll.transformers.fit(trainer)


def test_a_layer_wise_optimizer_is_refused_before_its_first_step(tmp_path: Path):
    trainer = trainer_of(language_model(), tmp_path)
    trainer.optimizer = LayerWiseDummyOptimizer()
    assert trainer.model is not None
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(InputError, match="a LayerWiseDummyOptimizer, but it must be prepared by Accelerate"):
        plimsoll.transformers.fit(trainer)
    assert all(torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True))


def test_a_loss_that_is_partly_divided_by_the_items_is_cut_right(tmp_path: Path):
    """A mixture of experts is an example: a sum over tokens, which is divided, plus a mean over the batch."""

    class Mixed(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(input_ids=inputs["input_ids"])
            logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
            each = nn.functional.cross_entropy(logits, labels, reduction="none")
            mean = logits[labels != -100].square().mean()
            num_items = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
            return each.sum() / num_items + 0.1 * mean

    assert_alike(*run_short(tmp_path, [2, 3, 4, 7], Mixed))
