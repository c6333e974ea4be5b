"""Accelerate's loop with Plimsoll's step: the weights of the plain loop, after out-of-memory errors, too."""

import resource

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from embedders import NUM_SAMPLES, Encoder, batches, tied
from plimsoll.errors import BudgetError, InputError
from plimsoll.integrations import accelerate as oom_proof
from plimsoll.step.failpoints import armed
from plimsoll.techniques.gradient_cache import gradient_cache_fallbacks
from workloads import mean_square


def prepared(num_passes=1, with_scaler=False):
    """Return Accelerate's objects for ten batches of 2, with a short last window and optionally a scaler for fp16."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_passes)
    if with_scaler:  # Accelerate creates one on a GPU only
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    samples = [{"x": torch.randn(4), "y": torch.randn(1)} for _ in range(20)]
    loader = torch.utils.data.DataLoader(samples, batch_size=2)
    return accelerator, *accelerator.prepare(model, optimizer, loader, schedule)


def plain(num_passes, with_scaler):
    """Train with the loop of Accelerate's documentation."""
    accelerator, model, optimizer, loader, schedule = prepared(num_passes, with_scaler)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = mean_square(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return weights_of(model), losses, schedule.get_last_lr()


def ours(num_passes, with_scaler):
    accelerator, model, optimizer, loader, schedule = prepared(num_passes, with_scaler)
    step = oom_proof.step(accelerator, model, optimizer, mean_square, units="samples", clip_norm=0.5, schedule=schedule)
    results = [step(batch) for batch in loader]
    return weights_of(model), results, schedule.get_last_lr(), step


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("with_scaler", [False, True], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("num_passes", [1, 3])
@pytest.mark.parametrize(
    ("point", "hits"),
    [(None, ()), ("forward", (3,)), ("backward", (5,)), ("clip", (3,)), ("optimizer", (1, 2, 3, 4, 5))],
)
def test_the_plain_loops_weights_losses_and_rates(num_passes, with_scaler, point, hits):
    weights, losses, rates = plain(num_passes, with_scaler)
    with armed(point or "forward", *hits):
        found, results, found_rates, step = ours(num_passes, with_scaler)
    assert torch.equal(found, weights)
    assert [result.loss.item() for result in results] == losses
    assert found_rates == rates
    assert [number for number, result in enumerate(results, 1) if result.updated] == (
        [*range(1, 11)] if num_passes == 1 else [3, 6, 9, 10]
    )
    assert step.metrics()["plimsoll/oom"] == bool(hits)


def test_an_update_that_overflows_is_skipped_as_accelerate_skips_it():
    accelerator, model, optimizer, _, schedule = prepared(with_scaler=True)
    step = oom_proof.step(
        accelerator, model, optimizer, lambda m, b: mean_square(m, b) * 1e38, units="samples", schedule=schedule
    )
    before = weights_of(model)
    with armed("clip", 1):
        result = step({"x": torch.ones(2, 4), "y": torch.zeros(2, 1)})
    assert not result.updated
    assert [event.phase for event in result.oom_events] == ["clip"]
    assert torch.equal(weights_of(model), before)
    assert accelerator.scaler.get_scale() == 512.0
    assert accelerator.scaler is optimizer.scaler


def test_the_loss_is_the_models_own_where_none_is_given():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8}
    accelerator = Accelerator(cpu=True)
    model = BertForSequenceClassification(BertConfig(**sizes, vocab_size=11, num_labels=2))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step = oom_proof.step(accelerator, model, optimizer, micro_batch=1)
    result = step({"input_ids": torch.tensor([[1, 2], [3, 4]]), "labels": torch.tensor([0, 1])})
    assert result.micro_batch == 1
    assert result.loss.item() == pytest.approx(0.69, abs=0.2)
    with pytest.raises(InputError, match="units="):
        step({"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[0, 1]])})


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")  # the test does this on purpose
@pytest.mark.parametrize(("point", "hit"), [("forward", 3), ("backward", 4), ("clip", 3)])
def test_a_rate_that_the_schedule_has_set_within_a_window_stays(point, hit):
    """A schedule that Accelerate does not tie to the updates changes the rate after each of three batches."""

    def trained(*hits):
        accelerator, model, optimizer, loader, _ = prepared(num_passes=3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.9)
        step = oom_proof.step(accelerator, model, optimizer, mean_square, units="samples", schedule=schedule)
        with armed(point, *hits):
            for batch in loader:
                step(batch)
        return weights_of(model), schedule.get_last_lr(), step.metrics()["plimsoll/oom"]

    (weights, rates, _), (found, found_rates, num_ooms) = trained(), trained(hit)
    assert torch.equal(found, weights)
    assert (found_rates, num_ooms) == (rates, 1)


@pytest.mark.parametrize("is_given", [False, True], ids=["the first batch", "a batch given"])
def test_a_budget_is_planned_for_and_enforced_until_the_step_is_closed(is_given):
    before = resource.getrlimit(resource.RLIMIT_DATA)
    accelerator, model, optimizer, loader, _ = prepared()
    largest = next(iter(loader)) if is_given else None
    options = {"units": "samples", "clip_norm": 0.5, "budget": "4GiB", "batch": largest}
    with oom_proof.step(accelerator, model, optimizer, mean_square, **options) as step:
        assert (step.plan is not None) == is_given
        results = [step(batch) for batch in loader]
        assert step.plan.fits
        assert step.transaction.backend.use().limit_bytes == 4 << 30
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert all(result.updated and result.micro_batch == 2 for result in results)


def test_a_budget_that_nothing_fits_says_which_would_do():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    accelerator, model, optimizer, loader, _ = prepared()
    weights = weights_of(model)
    with pytest.raises(BudgetError, match=r"budget of 50\.0 MiB cannot hold .* give --budget \d+MiB or more"):
        oom_proof.step(
            accelerator, model, optimizer, mean_square, units="samples", budget="50MiB", batch=next(iter(loader))
        )
    assert torch.equal(weights_of(model), weights)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_an_optimizer_that_was_not_prepared_is_refused():
    accelerator, model, optimizer, _, _ = prepared()
    with pytest.raises(InputError, match=r"AdamW.*accelerator.prepare"):
        oom_proof.step(accelerator, model, optimizer.optimizer, mean_square, units="samples")


def test_a_loss_without_units_is_refused():
    accelerator, model, optimizer, _, _ = prepared()
    with pytest.raises(InputError, match="without units="):
        oom_proof.step(accelerator, model, optimizer, mean_square)


def test_an_evaluation_is_cut_and_is_the_whole_ones():
    accelerator, model, optimizer, loader, _ = prepared()
    step = oom_proof.step(accelerator, model, optimizer, mean_square, units="samples")
    model.eval()
    with torch.no_grad():
        expected = sum(mean_square(model, batch).item() * len(batch["y"]) for batch in loader) / 20
    model.train()
    with armed("evaluation", 1, 4):
        found = step.evaluate(loader)
    assert found.loss == pytest.approx(expected, rel=1e-6)
    assert (found.num_samples, len(found.oom_events)) == (20, 2)
    assert model.training


@pytest.fixture
def _fresh_state():
    """Reset the state of Accelerate, which keeps the precision of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("_fresh_state")
def test_a_contrastive_batch_embedded_in_slices():
    """Two windows of three whole batches use Accelerate's autocast; memory runs out once."""
    found = []
    for fallbacks in (None, gradient_cache_fallbacks(NUM_SAMPLES, 4)):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, mixed_precision="bf16")
        model = accelerator.prepare(Encoder())
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        step = oom_proof.step(accelerator, model, optimizer, tied, units="samples", fallbacks=fallbacks)
        with armed("backward", *([2] if fallbacks else [])):
            results = [step(batch) for batch in batches(6)]
        assert [result.micro_batch for result in results] == [NUM_SAMPLES] * 6
        assert sum(len(result.oom_events) for result in results) == bool(fallbacks)
        step.close()
        found.append(([result.loss.item() for result in results], weights_of(model)))
    (losses, weights), (losses_in_slices, weights_in_slices) = found
    assert losses_in_slices == pytest.approx(losses, rel=1e-2)
    torch.testing.assert_close(weights_in_slices, weights, rtol=1e-2, atol=1e-2)
