"""A `Trainer` under the adapter against the plain one: same steps, losses and weights after any out-of-memory error.

One scenario is known from `auto_find_batch_size`: memory runs out at batch 5 of 8. Each of 64 samples must be trained
once.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import run_program
from tests.trainers import (
    BATCH_SAMPLES,
    NUM_SAMPLES,
    MeanLoss,
    assert_alike,
    assert_unwrapped,
    classifier,
    language_model,
    short_of_memory,
    trainer_of,
)
from torch import nn
from transformers import (
    TrainerCallback,
)

import plimsoll
from plimsoll.errors import BudgetError, InputError, OutOfMemoryError
from plimsoll.records.run import OomEvent
from plimsoll.step.failpoints import armed, exhaust_memory


def test_memory_that_runs_out_at_batch_5_of_8_costs_no_sample_and_repeats_none(tmp_path: Path):
    """In this situation `auto_find_batch_size` trains 32 of 64 samples twice."""
    undisturbed = trainer_of(language_model(), tmp_path / "a")
    undisturbed.train()
    trainer, seen = trainer_of(language_model(), tmp_path / "b"), Counter[tuple[int, ...]]()
    events: list[OomEvent] = []
    assert trainer.model is not None
    with short_of_memory(trainer.model, [5, 6], seen):
        plimsoll.transformers.fit(trainer, on_oom=events.append, recut_loss=True)  # for a model with a hook
    assert [(event.step, event.action) for event in events] == [
        (5, "same micro-batch once more"),
        (5, "micro-batch 8 -> 4"),
    ]
    assert sum(seen.values()) == NUM_SAMPLES
    assert set(seen.values()) == {1}
    assert_alike(trainer, undisturbed)


undivided = pytest.mark.filterwarnings("ignore:the loss of .* does not depend on num_items_in_batch")


@undivided
@pytest.mark.parametrize("make", [language_model, classifier])
@pytest.mark.parametrize("accumulated", [2, 3])
def test_a_window_of_batches_is_done_again_as_a_whole(tmp_path: Path, make, accumulated: int):
    undisturbed = trainer_of(make(), tmp_path / "a", gradient_accumulation_steps=accumulated)
    undisturbed.train()
    trainer = trainer_of(make(), tmp_path / "b", gradient_accumulation_steps=accumulated)
    assert trainer.model is not None
    with short_of_memory(trainer.model, [2, 3, 9, 11], Counter()):
        plimsoll.transformers.fit(trainer)
    assert_alike(trainer, undisturbed)


def test_dropout_masks_are_drawn_again_where_the_batch_is_not_cut(tmp_path: Path):
    undisturbed = trainer_of(language_model(dropout=0.2), tmp_path / "a", gradient_accumulation_steps=2)
    undisturbed.train()
    trainer = trainer_of(language_model(dropout=0.2), tmp_path / "b", gradient_accumulation_steps=2)
    assert trainer.model is not None
    with short_of_memory(trainer.model, [4], Counter()):
        plimsoll.transformers.fit(trainer)
    assert_alike(trainer, undisturbed)


@pytest.mark.parametrize(
    ("option", "value"), [("label_smoothing_factor", 0.1), ("average_tokens_across_devices", True)]
)
def test_other_ways_to_make_a_loss_are_cut_right(tmp_path: Path, option: str, value: Any):
    undisturbed = trainer_of(language_model(), tmp_path / "a", **{option: value})
    undisturbed.train()
    trainer = trainer_of(language_model(), tmp_path / "b", **{option: value})
    assert trainer.model is not None
    with short_of_memory(trainer.model, [1, 2, 3], Counter()):
        plimsoll.transformers.fit(trainer)
    assert_alike(trainer, undisturbed)


@undivided
def test_a_trainer_that_divides_by_nothing_is_weighted_by_what_its_loss_averages_over(tmp_path: Path):
    undisturbed = trainer_of(language_model(), tmp_path / "a", MeanLoss, gradient_accumulation_steps=2)
    undisturbed.train()
    trainer = trainer_of(language_model(), tmp_path / "b", MeanLoss, gradient_accumulation_steps=2)
    assert trainer.model is not None
    with short_of_memory(trainer.model, [1, 2, 3], Counter()):
        plimsoll.transformers.fit(trainer)
    assert_alike(trainer, undisturbed)


@pytest.mark.parametrize("optimizer", ["adamw_torch", "sgd"])
def test_an_update_that_runs_out_of_memory_happens_once(tmp_path: Path, optimizer: str):
    undisturbed = trainer_of(language_model(), tmp_path / "a", optim=optimizer, warmup_steps=2)
    undisturbed.train()
    trainer = trainer_of(language_model(), tmp_path / "b", optim=optimizer, warmup_steps=2)
    events: list[OomEvent] = []
    with armed("optimizer", 1, 4):
        plimsoll.transformers.fit(trainer, on_oom=events.append)
    assert [event.phase for event in events] == ["optimizer"] * 2
    assert_alike(trainer, undisturbed)


def test_a_run_that_was_saved_goes_on(tmp_path: Path):
    undisturbed = trainer_of(language_model(), tmp_path / "a")
    undisturbed.train()
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    first = trainer_of(language_model(), tmp_path / "b", **saving)
    first.add_callback(StopAfter(4))
    plimsoll.transformers.fit(first)
    second = trainer_of(language_model(), tmp_path / "b", **saving)
    assert second.model is not None
    with short_of_memory(second.model, [2, 3], Counter()):
        plimsoll.transformers.fit(second, resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-3"))
    assert_alike(second, undisturbed)


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def test_an_evaluation_that_runs_out_of_memory_is_the_same(tmp_path: Path):
    for make in (language_model, classifier):
        trainer = trainer_of(make(), tmp_path / "a", per_device_eval_batch_size=10)
        expected = trainer.predict(trainer.eval_dataset)
        model = trainer.model
        assert model is not None
        num_passes = 0

        def fail_at_first(module: nn.Module, arguments: Any) -> None:
            nonlocal num_passes
            num_passes += 1
            if num_passes in {1, 2}:
                exhaust_memory()

        handle = model.register_forward_pre_hook(fail_at_first)
        with plimsoll.transformers.protected(trainer, recut_loss=True) as protection:  # as above
            found = trainer.predict(trainer.eval_dataset)
        handle.remove()
        assert [event.phase for event in protection.events] == ["evaluation"] * 2
        torch.testing.assert_close(found.predictions, expected.predictions, atol=1e-5, rtol=0)
        assert abs(found.metrics["test_loss"] - expected.metrics["test_loss"]) < 1e-5


def test_a_batch_that_never_fits_ends_with_the_step_undone(tmp_path: Path):
    trainer = trainer_of(language_model(), tmp_path)
    assert trainer.model is not None
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    seen: Counter[tuple[int, ...]] = Counter()
    with (
        short_of_memory(trainer.model, range(1, 100), seen),
        pytest.raises(OutOfMemoryError, match="micro-batch 1 is the smallest possible"),
    ):
        plimsoll.transformers.fit(trainer)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_the_trainer_is_as_it_was_afterwards(tmp_path: Path):
    trainer = trainer_of(language_model(), tmp_path)
    names = set(vars(trainer))
    plimsoll.transformers.fit(trainer)
    assert_unwrapped(trainer)
    assert names <= set(vars(trainer))
    trainer.train()  # and continues without Plimsoll


def test_what_the_memory_did_is_in_the_trainers_own_log(tmp_path: Path):
    trainer = trainer_of(language_model(), tmp_path)
    plimsoll.transformers.fit(trainer)
    line = trainer.state.log_history[0]
    assert line["plimsoll/peak_bytes"] > 1 << 20
    assert (line["plimsoll/micro_batch"], line["plimsoll/oom"]) == (BATCH_SAMPLES, 0)


def test_batch_norm_is_not_cut(tmp_path: Path):
    model = classifier()
    model.norm = nn.BatchNorm1d(3).requires_grad_(False)  # type: ignore[assignment]  # nothing calls it
    trainer = trainer_of(model, tmp_path)
    with (
        short_of_memory(model, [1, 2], Counter()),
        pytest.raises(OutOfMemoryError, match="was not cut, because BatchNorm's statistics depend on the cut"),
    ):
        plimsoll.transformers.fit(trainer)
    with short_of_memory(model, [1, 2], Counter()):
        plimsoll.transformers.fit(trainer, recut_batch_norm=True)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("_n_gpu", 2, "DataParallel on 2 GPUs: one process copies the model"),
        ("deepspeed", "ds.json", "hands its steps to DeepSpeed"),
    ],
)
def test_what_is_not_covered_is_refused(tmp_path: Path, name: str, value: Any, words: str):
    trainer = trainer_of(language_model(), tmp_path)
    object.__setattr__(trainer.args, name, value)
    with pytest.raises(InputError, match=words):
        plimsoll.transformers.fit(trainer)


def test_a_trainer_of_another_kind_is_refused():
    class Other:
        def compute_loss(self) -> None: ...

    with pytest.raises(InputError, match="a Other has no training_step, prediction_step, log"):
        plimsoll.transformers.fit(Other())  # type: ignore[arg-type]


def test_a_budget_that_nothing_fits_says_which_would_do(tmp_path: Path):
    trainer = trainer_of(language_model(), tmp_path)
    with pytest.raises(BudgetError, match="MiB"):
        plimsoll.transformers.fit(trainer, budget="100MiB")


REAL = """
import sys, torch, plimsoll
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from tests import trainers as here
from tests.trainers import trainer_of, language_model, losses_of
here.LENGTH, here.NUM_WORDS = 128, 4000
trainer = trainer_of(language_model(), Path(sys.argv[3]), per_device_train_batch_size=32, max_steps=3)
backend = plimsoll.transformers.backend_for("cpu")
if sys.argv[4] == "limited":
    from plimsoll.device.base import limited
    trainer.create_optimizer()
    with limited(backend.use().used_bytes + (120 << 20)):
        with plimsoll.transformers.protected(trainer) as protection:
            trainer.train()
    assert protection.events, "it was not short of memory"
else:
    trainer.train()
total = sum(float(tensor.double().abs().sum()) for tensor in trainer.model.state_dict().values())
print(*[round(loss, 5) for loss in losses_of(trainer)], round(total, 4))
"""


def test_memory_that_really_runs_out_changes_nothing(tmp_path: Path):
    """In a process with a limited allocator: a batch of 32 rows of 128 words with 4,000 logits each does not fit."""
    here = Path(__file__).parent
    ends = [
        run_program(REAL, here, here.parents[2], tmp_path / name, name, CUDA_VISIBLE_DEVICES="")
        for name in ("plain", "limited")
    ]
    assert [end.returncode for end in ends] == [0, 0], ends[1].stderr
    found, expected = ([float(word) for word in end.stdout.splitlines()[-1].split()] for end in ends)
    assert found == pytest.approx(expected, rel=1e-5)
