"""Losses that a split would change, at each place that splits a batch.

A split step must have the loss and update of the whole batch. Otherwise it is refused with a remedy.
"""

import functools
import warnings

import lightning
import pytest
import torch
import transformers
from accelerate import Accelerator
from torch import nn

import plimsoll
from plimsoll.errors import BudgetError, InputError, OutOfMemoryError
from plimsoll.integrations.lightning import OomProof
from plimsoll.models.hooks import StepHooks
from plimsoll.planning.given_plan import require_that_fits
from plimsoll.planning.inputs import JobInput
from plimsoll.records.job import Job
from plimsoll.records.plan import micro_batch_choice
from plimsoll.step.failpoints import armed
from plimsoll.step.train_step import TrainStep

functional = nn.functional
WEIGHT = torch.tensor([1.0, 20.0])
BATCH = {"x": torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), "labels": (torch.arange(12) < 2).long()}
ROWS = [{name: value[row] for name, value in BATCH.items()} for row in range(12)]

CUTS = [{"micro_batch": 4}, {"fallbacks": [[micro_batch_choice(4)]]}]
"""Ways to say that the first step already cuts the batch."""


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1), nn.Tanh(), nn.Linear(6, 2))


def contrastive(model, batch):
    scores = model(batch["x"])
    return functional.cross_entropy(scores @ scores.T, torch.arange(len(scores)))


def weighted(model, batch):
    return functional.cross_entropy(model(batch["x"]), batch["labels"], weight=WEIGHT)


def of_weights(batch):
    return float(WEIGHT[batch["labels"]].sum())


def step_of(loss, units="samples", **options):
    model = net()
    return TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, units=units, **options)


@pytest.mark.parametrize("cut", CUTS)
def test_the_first_step_is_not_cut(cut):
    with pytest.raises(
        InputError, match=r"would cut the batch of 12 samples, but .*CachedMultipleNegativesRankingLoss"
    ):
        step_of(contrastive, **cut)(BATCH)


def test_what_the_user_forbids_is_refused():
    with pytest.raises(InputError, match="but never_cut=True says so: give micro_batch=None, or leave never_cut out"):
        step_of(contrastive, micro_batch=4, never_cut=True)(BATCH)


def test_where_memory_runs_out_the_batch_stays_whole_and_the_step_is_undone():
    step = step_of(contrastive)
    before = [one.detach().clone() for one in step.workload.model.parameters()]
    with (
        armed("backward", 1, 2),
        pytest.raises(OutOfMemoryError, match=r"was not cut, because the loss .* never_cut=True"),
    ):
        step(BATCH)
    assert all(map(torch.equal, before, step.workload.model.parameters()))
    assert step(BATCH).micro_batch == 12
    assert step.micro_batch == 12


def test_the_same_loss_may_be_cut_where_the_user_allows_it_and_one_that_fits_once_more_is_not():
    assert step_of(contrastive, micro_batch=4, recut_loss=True)(BATCH).micro_batch == 4
    step = step_of(contrastive)
    with armed("backward", 1):  # one more try, with the freed memory
        result = step(BATCH)
    assert [event.action for event in result.oom_events] == ["same micro-batch once more"]


def test_class_weights_are_exact_with_their_sum_as_units():
    torch.manual_seed(1)
    step = step_of(weighted, of_weights, micro_batch=3)
    step.workload.model.eval()
    whole = weighted(step.workload.model, BATCH).item()
    result = step(BATCH)
    assert result.loss == pytest.approx(whole, rel=1e-6)
    assert result.num_units == of_weights(BATCH)
    with pytest.raises(
        InputError, match=r"averages over the weights of the labels, and not over samples: .*units=lambda"
    ):
        step_of(weighted, micro_batch=3)(BATCH)


def test_an_evaluation_is_not_cut_either():
    step = step_of(contrastive)
    step.workload.model.eval()
    whole = contrastive(step.workload.model, BATCH).item()
    step.workload.hooks = StepHooks(evaluation_samples=4)
    assert step.evaluate([BATCH]).loss == pytest.approx(whole, rel=1e-6)
    with (
        armed("evaluation", 1, 2, 3),
        pytest.raises(OutOfMemoryError, match="was not cut, because the loss of a batch"),
    ):
        step_of(contrastive).evaluate([BATCH])


@pytest.mark.parametrize("allow", [(), ("recut_loss",)])
def test_a_plan_offers_no_cut(allow):
    model = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 2))
    batch = {"x": torch.randn(512, 4), "labels": torch.zeros(512, dtype=torch.long)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = plimsoll.plan_step(
        model, optimizer, batch, contrastive, units="samples", budget="8GiB", device="rtx3060", allow=allow
    )
    assert (plan.loss_check.verdict, plan.loss_check.may_cut) == (
        ("allowed", True) if allow else ("not additive", False)
    )
    if not allow:
        assert {
            int(c.options["samples"]) for one in plan.choices_by_fallback for c in one if c.technique == "micro_batch"
        } == {512}
        words = " ".join(plimsoll.render(plan).replace("│", " ").split())
        assert "The batch is not split into micro-batches: the loss of a batch is not the sum of the losses" in words
        none = plan.model_copy(update={"smallest_budget_bytes": 1 << 34})
        with pytest.raises(BudgetError, match="the batch is not cut, because the loss .* never_cut=True"):
            require_that_fits(none)


@pytest.mark.parametrize(
    "units",
    [lambda batch: float(batch["mask"].sum()), lambda batch: batch["mask"].sum(), lambda batch: len(batch["x"])],
)
def test_units_that_read_values_can_be_planned_with(units):
    def loss(model, batch):
        each = model(batch["x"]).square().sum(1)
        return (each * batch["mask"]).sum() / batch["mask"].sum()

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = {"x": BATCH["x"], "mask": torch.ones(12)}
    plan = plimsoll.plan_step(model, optimizer, batch, loss, units=units, budget="8GiB", device="rtx3060")
    assert (plan.fits, plan.loss_check.verdict) == (True, "additive")


@pytest.mark.parametrize("cut", CUTS)
def test_accelerate(cut):
    accelerator = Accelerator(cpu=True)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    make = functools.partial(plimsoll.accelerate.step, accelerator, model, optimizer, units="samples", **cut)
    before = [one.detach().clone() for one in model.parameters()]
    with pytest.raises(InputError, match="the loss of a batch is not the sum of the losses of its parts"):
        make(contrastive)(BATCH)
    assert all(map(torch.equal, before, model.parameters()))
    assert make(contrastive, recut_loss=True)(BATCH).micro_batch == 4
    exact = plimsoll.accelerate.step(accelerator, model, optimizer, weighted, units=of_weights, micro_batch=3)
    assert exact(BATCH).micro_batch == 3


class Module(lightning.LightningModule):
    def __init__(self, loss):
        super().__init__()
        self.net, self.loss = net(), loss

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.net, batch)
        self.log("loss", loss)
        assert self.trainer.global_step >= 0
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_lightning(loss, units, folder, cut):
    proof = OomProof(units=units, **cut)
    trainer = lightning.Trainer(
        max_steps=1, callbacks=[proof], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", default_root_dir=folder,
    )  # fmt: skip
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(Module(loss), torch.utils.data.DataLoader(ROWS, batch_size=12))
    return proof.transaction.additivity.found


@pytest.mark.parametrize("cut", CUTS)
def test_lightning(cut, tmp_path):
    with pytest.raises(InputError, match="the loss of a batch is not the sum of the losses of its parts"):
        fit_lightning(contrastive, "samples", tmp_path, cut)
    assert fit_lightning(weighted, of_weights, tmp_path, cut).verdict == "additive"


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, labels=None):
        return {"logits": self.net(x)}


class Trainer(transformers.Trainer):
    loss_of = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = type(self).loss_of(lambda x: outputs["logits"], inputs)
        return (loss, outputs) if return_outputs else loss


def fit_trainer(loss, folder, failures=(1, 2), more=None, **options):
    kind = type("Own", (Trainer,), {"loss_of": staticmethod(loss), **(more or {})})
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=12, max_steps=1, learning_rate=1e-3, report_to=[], save_strategy="no",
        disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = kind(model=Wrapped(), args=arguments, train_dataset=ROWS)
    with warnings.catch_warnings(action="ignore"), armed("backward", *failures):
        plimsoll.transformers.fit(trainer, **options)


def test_trainer(tmp_path):
    with pytest.raises(OutOfMemoryError, match="was not cut, because the loss of a batch is not the sum"):
        fit_trainer(contrastive, tmp_path, units="samples")
    with pytest.raises(OutOfMemoryError, match=r"was not cut, because .*CachedMultipleNegativesRankingLoss"):
        fit_trainer(contrastive, tmp_path)
    with pytest.raises(OutOfMemoryError, match="averages over the weights of the labels"):
        fit_trainer(weighted, tmp_path)
    fit_trainer(weighted, tmp_path, units=of_weights)
    fit_trainer(contrastive, tmp_path, recut_loss=True)


def test_fallbacks_of_a_trainer_that_cut_from_the_first_step_on(tmp_path):
    options = {"failures": (), "fallbacks": CUTS[1]["fallbacks"]}
    with pytest.raises(InputError, match=r"would cut the batch of 12 samples, but the loss of a batch is not the sum"):
        fit_trainer(contrastive, tmp_path, **options)
    fit_trainer(weighted, tmp_path, units=of_weights, **options)


def balanced_step(self, model, inputs, num_items_in_batch=None):
    """Run a training step with another loss than `compute_loss`."""
    loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
    loss = loss + 0.1 * outputs["logits"].softmax(-1).mean(0).square().sum()
    self.accelerator.backward(loss)
    return loss.detach()


def test_what_a_trainers_own_step_adds_to_the_loss_is_compared(tmp_path):
    options = {"failures": (), "fallbacks": CUTS[1]["fallbacks"], "units": of_weights}
    fit_trainer(weighted, tmp_path, **options)
    with pytest.raises(InputError, match="would cut the batch of 12 samples"):
        fit_trainer(weighted, tmp_path, more={"training_step": balanced_step}, **options)


MOE = {
    "architecture": "qwen3_moe", "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "verdict"),
    [
        (MOE | {"output_router_logits": True}, "not additive"),
        (MOE, "known"),
        ({"architecture": "lstm", "hidden_size": 8}, "known"),
    ],
)
def test_a_job(model, verdict, tmp_path):
    (tmp_path / "corpus.txt").write_text("a b c\n" * 50)
    data = {"train": str(tmp_path / "corpus.txt"), "unit": "line"}
    fields = {"model": model, "data": data, "tokenizer": {"train": "bpe", "vocab_size": 300}, "batch_size": 8}
    check = JobInput(Job.model_validate(fields | {"sequence_length": 16})).loss_check()
    assert check.verdict == verdict


def test_after_a_long_batch_that_is_cut_short_ones_are_whole_again():
    model = nn.Linear(1, 1)
    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch["x"].mean(1, True)).mean(),
        units="samples",
    )  # fmt: skip
    sizes = [step({"x": torch.ones(8, 4)}).micro_batch]
    with armed("forward", 1):
        sizes.append(step({"x": torch.ones(8, 32)}).micro_batch)
    sizes += [step({"x": torch.ones(8, 4)}).micro_batch, step({"x": torch.ones(8, 32)}).micro_batch]
    assert sizes == [8, 4, 8, 4]
