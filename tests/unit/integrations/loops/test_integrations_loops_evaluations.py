"""Evaluations of a Trainer inside a limit: unchanged predictions and metrics, and errors that name the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainers import classifier, language_model, trainer_of
from transformers import Trainer

import plimsoll
from plimsoll.device import process
from plimsoll.errors import InputError, OutOfMemoryError
from plimsoll.step.failpoints import exhaust_memory


def metrics_of(prediction: Any) -> dict[str, float]:
    return {"mean": float(np.asarray(prediction.predictions).mean()), "labels": float(prediction.label_ids.sum())}


def evaluator(folder: Path, **arguments: Any) -> Trainer:
    trainer = trainer_of(language_model(), folder, per_device_eval_batch_size=4, **arguments)
    trainer.compute_metrics = metrics_of
    return trainer


@pytest.mark.parametrize("arguments", [{}, {"eval_accumulation_steps": 2}, {"eval_do_concat_batches": False}])
def test_inside_a_limit_predictions_and_metrics_are_those_of_the_trainer(tmp_path: Path, arguments: dict[str, Any]):
    if "eval_do_concat_batches" in arguments:
        trainer = trainer_of(language_model(), tmp_path, per_device_eval_batch_size=4, **arguments)
    else:
        trainer = evaluator(tmp_path, **arguments)
    expected = trainer.predict(trainer.eval_dataset)
    free_bytes = process.private_memory().private_bytes + (256 << 20)
    with plimsoll.limited(free_bytes), plimsoll.transformers.protected(trainer, recut_loss=True) as protection:
        found = trainer.predict(trainer.eval_dataset)
    assert not protection.events
    torch.testing.assert_close(found.predictions, expected.predictions, rtol=0, atol=0)
    torch.testing.assert_close(found.label_ids, expected.label_ids, rtol=0, atol=0)
    assert {name: value for name, value in found.metrics.items() if "second" not in name and "time" not in name} == {
        name: value for name, value in expected.metrics.items() if "second" not in name and "time" not in name
    }


def test_a_batch_that_is_cut_inside_a_limit_has_the_same_predictions(tmp_path: Path):
    trainer = evaluator(tmp_path)
    assert trainer.model is not None
    expected = trainer.predict(trainer.eval_dataset)

    def too_large(module: Any, arguments: Any, options: dict[str, Any]) -> None:
        if len(options["input_ids"]) > 1:
            exhaust_memory()

    handle = trainer.model.register_forward_pre_hook(too_large, with_kwargs=True)
    free_bytes = process.private_memory().private_bytes + (256 << 20)
    with plimsoll.limited(free_bytes), plimsoll.transformers.protected(trainer, recut_loss=True) as protection:
        found = trainer.predict(trainer.eval_dataset)
    handle.remove()
    assert {event.phase for event in protection.events} == {"evaluation"}
    torch.testing.assert_close(found.predictions, expected.predictions, rtol=0, atol=1e-5)


def run_out(*arguments: Any, **options: Any) -> Any:
    exhaust_memory()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("compute_metrics", r"predictions of float32\[10, 16, 50\], 31.2 KiB .*preprocess_logits_for_metrics"),
        ("preprocess_logits_for_metrics", r"logits of a batch, float32\[4, 16, 50\].*per_device_eval_batch_size"),
        ("data_collator", "reading the batches of an evaluation .*smaller per_device_eval_batch_size"),
    ],
)  # fmt: skip
def test_code_of_the_users_that_runs_out_is_named(tmp_path: Path, name: str, words: str):
    trainer = evaluator(tmp_path)
    setattr(trainer, name, run_out)
    assert trainer.model is not None
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    with (
        plimsoll.transformers.protected(trainer),
        pytest.raises(OutOfMemoryError, match=f"{words}.*the training is as it was"),
    ):
        trainer.evaluate()
    assert not {"evaluation_loop", "prediction_step", "evaluate"} & vars(trainer).keys()
    for key, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, before[key])


def test_a_plan_begins_an_evaluation_with_passes_of_the_trainings_size(tmp_path: Path):
    trainer = trainer_of(classifier(), tmp_path, per_device_eval_batch_size=8)
    seen = []
    assert trainer.model is not None
    handle = trainer.model.register_forward_pre_hook(
        lambda module, arguments, options: seen.append(len(options["input_ids"])), with_kwargs=True
    )
    cuts = {"recut_batch_norm": False, "recut_loss": True, "never_cut": False}  # for a model with a hook
    guard = plimsoll.transformers._Guard(trainer, None, None, cuts, None)
    guard.evaluations.begin_with(2 * 17)  # two samples: 16 tokens and a label each
    with guard.at_work():
        trainer.evaluate()
    handle.remove()
    assert set(seen) == {2}


def test_a_loss_of_which_nothing_says_what_it_averages_over_is_not_cut(tmp_path: Path):
    """An example is a contrastive loss. Only predictions are split."""
    trainer = trainer_of(language_model(), tmp_path, Unlabelled, per_device_eval_batch_size=4)
    trainer.can_return_loss, trainer.label_names = True, []
    assert trainer.model is not None

    def too_large(module: Any, arguments: Any, options: dict[str, Any]) -> None:
        if len(options["input_ids"]) > 2:
            exhaust_memory()

    handle = trainer.model.register_forward_pre_hook(too_large, with_kwargs=True)
    with plimsoll.transformers.protected(trainer):
        with pytest.raises(InputError, match=r"has no labels \(it has input_ids.*units="):
            trainer.evaluate()
        trainer.can_return_loss = False
        assert len(trainer.predict(trainer.eval_dataset).predictions) == 10
    handle.remove()


class Contrastive(Trainer):
    """A trainer whose loss compares the samples of a batch."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        scores = outputs.logits.flatten(1)
        return torch.nn.functional.cross_entropy(scores @ scores.T, torch.arange(len(scores))), outputs


class OwnPrediction(Contrastive):
    """A trainer that overrides `prediction_step` without changing it."""

    def prediction_step(self, *arguments: Any, **options: Any) -> Any:
        return super().prediction_step(*arguments, **options)


@pytest.mark.parametrize("kind", [Contrastive, OwnPrediction])
def test_a_loss_that_compares_samples_is_evaluated_whole_or_not_at_all(tmp_path: Path, kind: type[Trainer]):
    trainer = trainer_of(language_model(), tmp_path, kind, per_device_eval_batch_size=4)
    assert trainer.model is not None
    expected = trainer.evaluate()["eval_loss"]
    most = 4

    def too_large(module: Any, arguments: Any, options: dict[str, Any]) -> None:
        if len(options["input_ids"]) > most:
            exhaust_memory()

    handle = trainer.model.register_forward_pre_hook(too_large, with_kwargs=True)
    cuts = {"recut_batch_norm": False, "recut_loss": False, "never_cut": False}
    guard = plimsoll.transformers._Guard(trainer, "samples", None, cuts, None)
    guard.evaluations.begin_with(2 * 32)  # as a plan would, with passes of two samples
    with guard.at_work():
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    most = 2
    not_cut = r"the batch of 4 samples was not cut, because"
    with (
        plimsoll.transformers.protected(trainer, units="samples") as protection,
        pytest.raises(OutOfMemoryError, match=f"{not_cut} the loss of a batch is not the sum.*or a smaller per_device"),
    ):
        trainer.evaluate()
    assert not protection.events
    with (
        plimsoll.transformers.protected(trainer, never_cut=True),
        pytest.raises(OutOfMemoryError, match=f"{not_cut} never_cut=True says so"),
    ):
        trainer.evaluate()
    with plimsoll.transformers.protected(trainer, units="samples", recut_loss=True) as protection:
        assert trainer.evaluate()["eval_loss"] < expected
    assert {event.next_micro_batch for event in protection.events} == {2}
    handle.remove()


class Unlabelled(Trainer):
    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        rows = [{"input_ids": row["input_ids"]} for row in self.eval_dataset]  # type: ignore[union-attr]
        return super().get_eval_dataloader(rows)

    get_test_dataloader = get_eval_dataloader

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        return outputs.logits.mean(), outputs
