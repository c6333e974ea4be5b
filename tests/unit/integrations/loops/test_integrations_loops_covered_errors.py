"""Code that a Trainer runs around its steps: repeated if that is safe, and named if it runs out of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.trainers import assert_alike, language_model, trainer_of
from transformers import Trainer, TrainerCallback

import plimsoll
from plimsoll.errors import OutOfMemoryError
from plimsoll.step.failpoints import exhaust_memory


class Short(Trainer):
    """An object that runs out of memory in the first calls of one of its methods."""

    name, times = "", 0

    def _passes(self, name: str) -> None:
        if name == self.name and self.times:
            self.times -= 1
            exhaust_memory()

    def _save(self, *arguments: Any, **options: Any) -> None:
        self._passes("_save")
        super()._save(*arguments, **options)

    def _save_optimizer_and_scheduler(self, *arguments: Any, **options: Any) -> None:
        self._passes("_save_optimizer_and_scheduler")
        super()._save_optimizer_and_scheduler(*arguments, **options)

    def _save_rng_state(self, *arguments: Any, **options: Any) -> None:
        self._passes("_save_rng_state")
        super()._save_rng_state(*arguments, **options)

    def _load_best_model(self) -> None:
        self._passes("_load_best_model")
        super()._load_best_model()

    def _load_from_checkpoint(self, *arguments: Any, **options: Any) -> None:
        self._passes("_load_from_checkpoint")
        super()._load_from_checkpoint(*arguments, **options)

    def get_batch_samples(self, *arguments: Any, **options: Any) -> Any:
        self._passes("get_batch_samples")
        return super().get_batch_samples(*arguments, **options)


SAVING: dict[str, Any] = {
    "save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4,
    "load_best_model_at_end": True, "auto_find_batch_size": True,
}  # fmt: skip
TWICE = ["_save", "_save_optimizer_and_scheduler", "_load_best_model", "_load_from_checkpoint"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    trainer = trainer_of(language_model(), tmp_path_factory.mktemp("plain"), **SAVING)
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", TWICE)
def test_what_is_read_or_written_is_done_again(tmp_path: Path, name: str, undisturbed: Trainer):
    trainer = trainer_of(language_model(), tmp_path, Short, **SAVING)
    trainer.name, trainer.times = name, 1
    if name == "_load_from_checkpoint":
        folder = Path(undisturbed.args.output_dir) / "checkpoint-4"
        plimsoll.transformers.fit(trainer, resume_from_checkpoint=str(folder))
    else:
        plimsoll.transformers.fit(trainer)
    assert trainer.times == 0
    assert_alike(trainer, undisturbed)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("_save", "while saving the model .*its folder may be incomplete"),
        (
            "_save_optimizer_and_scheduler",
            "while saving the optimizer's states .*give a larger budget, or set save_only_model=True",
        ),
        ("_save_rng_state", "while saving a checkpoint .*its folder may be incomplete"),
        ("_load_best_model", "while reading the best model of the training .*load_best_model_at_end=False"),
        ("get_batch_samples", "while fetching the next batches .*smaller per_device_train_batch_size"),
    ],
)
def test_what_has_no_room_is_named_and_the_training_does_not_begin_anew(tmp_path: Path, name: str, words: str):
    """`auto_find_batch_size` would start the training again after a plain error."""
    trainer = trainer_of(language_model(), tmp_path, Short, **SAVING)
    trainer.name, trainer.times = name, 1000
    with pytest.raises(OutOfMemoryError, match=words):
        plimsoll.transformers.fit(trainer)
    assert trainer.times >= 998
    assert "save_model" not in vars(trainer)


def test_a_callback_that_runs_out_is_an_error_of_ours(tmp_path: Path):
    class Callback(TrainerCallback):
        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            exhaust_memory()

    trainer = trainer_of(language_model(), tmp_path, auto_find_batch_size=True)
    trainer.add_callback(Callback)
    with pytest.raises(OutOfMemoryError, match=r"outside of a step \(in a callback, for example\)"):
        plimsoll.transformers.fit(trainer)
    assert trainer.state.global_step == 1
