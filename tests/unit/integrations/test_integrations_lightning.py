"""Lightning's loop with the callback: unchanged results, logs and metrics, after out-of-memory errors, too."""

import csv
import logging
import resource

import lightning
import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from plimsoll.device.cpu.data_limit import budget_in_force_bytes
from plimsoll.errors import BudgetError, InputError, OutOfMemoryError
from plimsoll.integrations.lightning import OomProof
from plimsoll.records.plan import micro_batch_choice
from plimsoll.step.failpoints import armed

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers, loggers and devices


@pytest.fixture(autouse=True)
def _quiet():
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


class Module(lightning.LightningModule):
    """A module that logs in all ways of Lightning, keeps a metric, and records the arguments of hooks."""

    def __init__(self, dropout=0.2):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 1))
        self.mean = torchmetrics.MeanMetric()
        self.outputs, self.num_updates = [], 0

    def training_step(self, batch, batch_idx):
        predicted = self.net(batch["x"])
        loss = (predicted - batch["y"]).square().mean()
        self.mean.update(loss.detach(), len(predicted))
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, reduce_fx="max")
        self.log("last", loss)
        return {"loss": loss, "predicted": predicted.detach(), "mean": loss.detach(), "name": "whole"}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.outputs.append({name: value for name, value in outputs.items() if name != "name"})

    def on_before_optimizer_step(self, optimizer):
        self.num_updates += all(parameter.grad is not None for parameter in self.net.parameters())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def steady():
    """Return a module without dropout, for batches that are split."""
    return Module(dropout=0.0)


def fitted(folder, callback=None, num_passes=1, scaled=False, make=Module, **options):
    """Train two epochs of five batches of 4 samples, and return the trainer."""
    torch.manual_seed(0)
    module = make()
    samples = [{"x": torch.randn(4), "y": torch.randn(1)} for _ in range(20)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=num_passes,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)] if scaled else None,
        **{
            "max_epochs": 2,
            "enable_checkpointing": False,
            "gradient_clip_val": 0.5,
            "logger": CSVLogger(folder),
            "callbacks": [callback] if callback else [],
            **options,
        },
    )
    trainer.fit(module, torch.utils.data.DataLoader(samples, batch_size=4))
    return trainer, module


def results_of(trainer, module):
    return {
        "weights": torch.cat([parameter.detach().flatten() for parameter in module.parameters()]),
        "mean": module.mean.compute(),
        "steps": trainer.global_step,
        "updates": module.num_updates,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "rows": [{k: v for k, v in row.items() if "plimsoll" not in k} for row in rows_of(trainer)],
        "outputs": module.outputs,
    }


@pytest.mark.parametrize("failing", [(), (1, 4)])
def test_a_loss_in_double_precision_stays_one(tmp_path, failing):
    plain = fitted(tmp_path / "plain", make=steady, precision="64-true")[1]
    with armed("forward", *failing):
        ours = fitted(tmp_path / "ours", OomProof(units="samples"), make=steady, precision="64-true")[1]
    for one, other in zip(plain.outputs, ours.outputs, strict=True):
        assert other["loss"].dtype == torch.float64
        torch.testing.assert_close(other["loss"], one["loss"], rtol=1e-12 if failing else 0, atol=0)


def rows_of(trainer):
    """Return the rows of the logger: one per step and one per epoch."""
    trainer.logger.save()
    with open(trainer.logger.experiment.metrics_file_path) as file:
        rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]
    return [row for row in rows if row.keys() - {"step", "epoch"}]


@pytest.mark.parametrize(
    ("point", "hits", "num_passes", "scaled"),
    [
        (None, (), 1, False),
        (None, (), 2, True),
        ("forward", (4,), 2, False),
        ("backward", (2,), 1, True),
        ("clip", (2,), 2, False),
        ("optimizer", (1, 2, 3, 4, 5), 1, False),
        ("optimizer", (1, 2, 3, 4, 5), 2, True),
    ],
)
def test_what_lightning_does_is_done_to_the_bit(point, hits, num_passes, scaled, tmp_path):
    wanted = results_of(*fitted(tmp_path / "a", num_passes=num_passes, scaled=scaled))
    callback = OomProof(units="samples", logs_memory=False)
    with armed(point or "forward", *hits):
        found = results_of(*fitted(tmp_path / "b", callback, num_passes, scaled))
    assert callback.transaction.num_ooms == bool(hits)
    assert found.pop("rows") == wanted.pop("rows")
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_batch_in_micro_batches_logs_and_returns_what_the_whole_one_does(tmp_path):
    wanted = results_of(*fitted(tmp_path / "a", make=steady))
    callback = OomProof(units="samples", micro_batch=3, logs_memory=False)
    found = results_of(*fitted(tmp_path / "b", callback, make=steady))
    assert wanted["outputs"][0]["predicted"].shape == (4, 1)
    for row, other in zip(found.pop("rows"), wanted.pop("rows"), strict=True):
        assert row.keys() == other.keys()
        exact = {k: float(v) for k, v in row.items() if k != "largest"}  # of the micro-batches: a mean has no maximum
        assert exact == pytest.approx({k: float(v) for k, v in other.items() if k != "largest"}, abs=1e-5)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_memory_is_in_the_trainers_own_log(tmp_path):
    callback = OomProof(units="samples")
    with armed("backward", 3):
        trainer, _ = fitted(tmp_path, callback)
    rows = [row for row in rows_of(trainer) if "plimsoll/oom" in row]
    assert [float(row["plimsoll/oom"]) for row in rows] == [0, 0, *[1] * 8]
    assert {float(row["plimsoll/micro_batch"]) for row in rows} == {4}
    assert all(float(row["plimsoll/peak_bytes"]) >= float(row["plimsoll/used_bytes"]) > 2**20 for row in rows)


def test_tensorboard_gets_the_loss_and_the_memory(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is an extra")
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer, _ = fitted(tmp_path, OomProof(units="samples"), logger=TensorBoardLogger(tmp_path))
    events = EventAccumulator(trainer.logger.log_dir).Reload()
    assert {"loss_step", "plimsoll/peak_bytes", "plimsoll/micro_batch", "plimsoll/oom"} <= set(events.Tags()["scalars"])
    assert len(events.Scalars("plimsoll/peak_bytes")) == len(events.Scalars("loss_step")) == 10


def test_a_training_goes_on_from_lightnings_checkpoint(tmp_path):
    wanted, whole = fitted(tmp_path / "a", OomProof(units="samples"), make=steady)
    first, _ = fitted(tmp_path / "b", OomProof(units="samples"), make=steady, max_epochs=1)
    first.save_checkpoint(tmp_path / "one.ckpt")
    resumed = steady()
    second = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, gradient_clip_val=0.5, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[OomProof(units="samples")],
    )  # fmt: skip
    loader = wanted.train_dataloader
    second.fit(resumed, loader, ckpt_path=tmp_path / "one.ckpt", weights_only=False)
    assert second.global_step == wanted.global_step == 10
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))


def test_where_nothing_fits_the_error_says_so_and_lightning_is_given_back(tmp_path):
    callback = OomProof(units="samples", fallbacks=[[micro_batch_choice(4)], [micro_batch_choice(2)]])
    made = []
    with armed("forward", *range(1, 30)), pytest.raises(OutOfMemoryError, match="the step was undone"):
        fitted(tmp_path, callback, make=lambda: made.append(Module()) or made[0])
    (module,) = made
    assert "run" not in module.trainer.fit_loop.epoch_loop.automatic_optimization.__dict__
    assert module.trainer.global_step == 0


def test_a_batch_that_training_step_skips_is_skipped(tmp_path):
    class Skips(Module):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 2 else super().training_step(batch, batch_idx)

    wanted = results_of(*fitted(tmp_path / "a", make=Skips))
    found = results_of(*fitted(tmp_path / "b", OomProof(units="samples", logs_memory=False), make=Skips))
    torch.testing.assert_close(found["weights"], wanted["weights"], rtol=0, atol=0)
    assert found["steps"] == wanted["steps"]


def test_a_budget_is_planned_for_with_the_first_batch_and_enforced_until_the_end(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_DATA)
    seen = []

    class Watched(Module):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            seen.append(budget_in_force_bytes())

    wanted = results_of(*fitted(tmp_path / "a", make=Watched))
    callback = OomProof(units="samples", budget="4GiB", logs_memory=False)
    found = results_of(*fitted(tmp_path / "b", callback, make=Watched))
    assert callback.plan.fits
    assert seen == [None] * 10 + [4 << 30] * 10
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert found.pop("rows") == wanted.pop("rows")
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_budget_that_nothing_fits_says_which_would_do_and_lightning_is_given_back(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_DATA)
    made = []
    with pytest.raises(BudgetError, match=r"budget of 50\.0 MiB cannot hold .* give --budget \d+MiB or more"):
        fitted(tmp_path, OomProof(units="samples", budget="50MiB"), make=lambda: made.append(Module()) or made[0])
    assert "run" not in made[0].trainer.fit_loop.epoch_loop.automatic_optimization.__dict__
    assert made[0].trainer.global_step == 0
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"]
)
def test_a_callback_that_raises_leaves_lightning_as_it_was(tmp_path, hook):
    def breaks(self, trainer, *_):
        if trainer.global_step == 2:
            raise KeyError(hook)

    breaking, made = type("Breaking", (lightning.Callback,), {hook: breaks})(), []
    with pytest.raises(KeyError, match=hook):
        fitted(
            tmp_path, None, num_passes=2, make=lambda: made.append(Module()) or made[0], logger=False,
            callbacks=[OomProof(units="samples"), breaking],
        )  # fmt: skip
    assert "run" not in made[0].trainer.fit_loop.epoch_loop.automatic_optimization.__dict__


@pytest.mark.parametrize(
    "options",
    [
        {"num_passes": 3, "limit_train_batches": 4},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"precision": "bf16-mixed"},
        {"overfit_batches": 2},
        {"fast_dev_run": 3, "logger": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_trainings_of_other_kinds_are_lightnings_to_the_bit(tmp_path, options):
    def weights(callback, folder):
        _, module = fitted(folder, callback, **options)
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    wanted = weights(None, tmp_path / "a")
    callback = OomProof(units="samples", logs_memory=False)
    with armed("backward", 3), armed("optimizer", 1, 2):
        found = weights(callback, tmp_path / "b")
    assert callback.transaction.num_ooms > 0
    assert torch.equal(found, wanted)


def test_manual_optimization_is_refused(tmp_path):
    class Manual(Module):
        automatic_optimization = False

    with pytest.raises(InputError, match=r"automatic_optimization=False.*use plimsoll.TrainStep"):
        fitted(tmp_path, OomProof(units="samples"), make=Manual, gradient_clip_val=None)


def test_an_iterator_is_refused(tmp_path):
    class Iterates(Module):
        def training_step(self, dataloader_iter):
            raise AssertionError("not reached")

    with pytest.raises(InputError, match="nothing can be taken twice"):
        fitted(tmp_path, OomProof(units="samples"), make=Iterates)


def test_a_version_with_other_names_inside_is_refused(tmp_path, monkeypatch):
    from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization

    monkeypatch.delattr(_AutomaticOptimization, "_make_step_fn")
    monkeypatch.delattr(_AutomaticOptimization, "_make_backward_fn")
    with pytest.raises(InputError, match=r"_make_backward_fn.*install lightning"):
        fitted(tmp_path, OomProof(units="samples"))
