"""Lightning's validation, test and prediction when memory runs out: split if that is exact, otherwise an error."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import lightning
import pytest
import torch
import torchmetrics
from torch import nn

from plimsoll.device.cpu.data_limit import budget_in_force_bytes
from plimsoll.errors import OutOfMemoryError
from plimsoll.integrations.lightning import OomProof
from plimsoll.step.failpoints import exhaust_memory

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers, loggers and devices


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


class Module(lightning.LightningModule):
    """Two layers that fit at most `most` samples outside of training."""

    def __init__(self, most: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.most, self.seen, self.limits = most, [], set()

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if not torch.is_grad_enabled():
            self.limits.add(budget_in_force_bytes())
            if len(batch["x"]) > self.most:
                exhaust_memory()
            self.seen = (*self.seen, len(batch["x"]))
        return self.net(batch["x"])

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch), batch["y"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scores = self(batch)
        loss = nn.functional.cross_entropy(scores, batch["y"])
        self.accuracy(scores, batch["y"])
        self.log("loss", loss)
        self.log("accuracy", self.accuracy)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class MeanOfTargets(Module):
    """A module that logs a mean over targets as if it were a mean over samples."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        targets = torch.where(torch.arange(len(batch["y"])) % 4 == 0, batch["y"], -100)
        targets = batch["y"].where(batch["x"][:, 0] > 0, -100)
        self.log("loss", nn.functional.cross_entropy(self(batch), targets))


class Keeps(Module):
    """A module that keeps its outputs until the end of the epoch."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.outputs: list[torch.Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.append(self(batch))


class EndsShort(Module):
    def on_validation_epoch_end(self) -> None:
        exhaust_memory()


def loader(num_samples: int, batch_size: int) -> Any:
    torch.manual_seed(1)
    data = [{"x": torch.randn(4), "y": torch.randint(3, ())} for _ in range(num_samples)]
    return torch.utils.data.DataLoader(data, batch_size=batch_size)


def trainer_with(*callbacks: lightning.Callback) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, callbacks=[*callbacks], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def test_a_validation_batch_eight_times_as_large_is_cut_and_logs_the_same():
    plain, module = trainer_with(), Module(most=100)
    plain.fit(module, loader(8, 2), loader(44, 16))
    callback, short = OomProof(units="samples"), Module(most=4)
    trainer = trainer_with(callback)
    trainer.fit(short, loader(8, 2), loader(44, 16))
    assert plain.callback_metrics.keys() == trainer.callback_metrics.keys() == {"loss", "accuracy"}
    torch.testing.assert_close(dict(trainer.callback_metrics), dict(plain.callback_metrics))
    assert max(short.seen) == 4
    assert {event.phase for event in callback.evaluation_events} == {"evaluation"}
    for one, other in zip(module.parameters(), short.parameters(), strict=True):
        assert torch.equal(one, other)
    assert "validation_step" not in vars(trainer.strategy)
    assert "_run_stage" not in vars(trainer)


@pytest.mark.parametrize("cut", [Module, Keeps])
def test_tests_and_predictions_are_those_of_whole_batches(cut: type[Module]):
    expected = torch.cat(trainer_with().predict(Module(100), loader(20, 16)))  # type: ignore[arg-type]
    short = cut(most=3)
    predicted = torch.cat(trainer_with(OomProof(units="samples")).predict(short, loader(20, 16)))  # type: ignore[arg-type]
    torch.testing.assert_close(predicted, expected)
    (whole,) = trainer_with().test(Module(100), loader(20, 16), verbose=False)
    (micro_batches,) = trainer_with(OomProof(units="samples")).test(short, loader(20, 16), verbose=False)
    assert micro_batches == pytest.approx(whole)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (MeanOfTargets, "what it logs as 'loss' is not the same when 8 of its samples are done in two passes"),
        (Keeps, "the list outputs of the module, which it fills, is not the same"),
    ],
)
def test_what_a_cut_would_change_is_not_cut_and_said(kind: type[Module], reason: str):
    module = kind(most=8)
    trainer = trainer_with(OomProof(units="samples"))
    message = rf"in validation_step with 16 samples of a batch of 16 .* was not cut, because {reason}.*batch_size=8"
    with pytest.raises(OutOfMemoryError, match=message):
        trainer.validate(module, loader(20, 16))
    assert not getattr(module, "outputs", [])
    assert "validation_step" not in vars(trainer.strategy)


def test_no_batch_is_cut_where_the_user_forbids_it():
    with pytest.raises(OutOfMemoryError, match="was not cut, because never_cut=True says so"):
        trainer_with(OomProof(units="samples", never_cut=True)).validate(Module(most=8), loader(20, 16))


class Weighted(Module):
    """A module that logs a mean over the weights of the labels."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", nn.functional.cross_entropy(self(batch), batch["y"], weight=torch.tensor([1.0, 9.0, 1.0])))


@pytest.mark.parametrize("batch_of_the_rare", [0, 1])
def test_labels_that_are_rare_or_come_later_are_seen(batch_of_the_rare: int):
    """One of 16 samples has another label. The batch before is split, since all its weights are equal."""
    torch.manual_seed(1)
    data = [{"x": torch.randn(4), "y": torch.tensor(int(row == 16 * batch_of_the_rare + 3))} for row in range(32)]
    module = Weighted(most=8)
    with pytest.raises(OutOfMemoryError, match="was not cut, because what it logs as 'loss' is not the same"):
        trainer_with(OomProof(units="samples")).validate(module, torch.utils.data.DataLoader(data, batch_size=16))
    compared = (8, 1, 7)  # samples per pass
    assert module.seen == (*compared, *((8, 8, *compared) if batch_of_the_rare else ()))


def test_where_no_micro_batch_is_small_enough_the_error_is_ours():
    with pytest.raises(OutOfMemoryError, match=r"in validation_step .*not even 2 samples"):
        trainer_with(OomProof(units="samples")).validate(Module(most=0), loader(20, 16))


def test_a_hook_that_runs_out_is_named_with_its_stage():
    with pytest.raises(OutOfMemoryError, match="in its stage 'validate', outside of a step"):
        trainer_with(OomProof(units="samples")).validate(EndsShort(100), loader(20, 16))


def test_the_budget_holds_in_every_stage():
    """The limit holds from the sanity check before the plan to the end, and is then removed."""
    module = Module(most=100)
    trainer = trainer_with(OomProof(units="samples", budget="3GiB"))
    trainer.fit(module, loader(8, 2), loader(20, 16))
    trainer.validate(module, loader(20, 16), verbose=False)
    trainer.predict(module, loader(20, 16))
    assert module.limits == {3 << 30}
    assert budget_in_force_bytes() is None
