"""Evaluations of a planner for one combination, and its choice: small real jobs for a named GPU.

On the CPU it plans for a model of a user's program, whose baseline is this process.
"""

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from plimsoll.planning.inputs import StepInput
from plimsoll.planning.plan import Planner, plan_job, planner_of
from plimsoll.planning.search.time_model import learn_peak, learn_time
from plimsoll.records.comparison import Calibration
from plimsoll.records.device import Budget
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice, parse_pin
from plimsoll.step.fallbacks import samples_of

MIB = 1 << 20
SMALL = {"architecture": "lstm", "embedding_size": 32, "hidden_size": 32}
EVALUATING = {"data": {"train": "nowhere.txt", "validation": 0.1}, "evaluate_every": 5}
WHOLE = (micro_batch_choice(16),)
MANY_WORDS = {"tokenizer": {"vocab_size": 8000}}  # the logits are then most of the peak, not cuDNN's workspace


def job(**changes):
    fields = {"model": SMALL, "data": "nowhere.txt", "tokenizer": {"vocab_size": 1000}, "optimizer": {"name": "sgd"}}
    return Job.from_fields(fields | {"sequence_length": 64, "batch_size": 16} | changes)


def planner(of=None, limit_bytes=1000 * MIB, calibration=None):
    return planner_of(of or job(), "rtx3060", limit_bytes, ((), ()), calibration, None)


def planned(of, limit_bytes, **options):
    return plan_job(of, device="rtx3060", limit_bytes=limit_bytes, **options)


class Net(nn.Module):
    """A model whose Adam moments take twice 40 MiB and a little more."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40 << 10, 256)
        self.head = nn.Linear(256, 10)

    def forward(self, ids):
        return self.head(self.embed(ids))


def on_cpu(limit_bytes=4096 * MIB, pins=()):
    """Return a planner for this CPU and a model without memory."""
    with torch.device("meta"):
        model = Net()
    batch = torch.zeros(8, 16, dtype=torch.long)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    planning_input = StepInput(
        model, optimizer, batch, lambda model, ids: model(ids).mean(), "samples", None, "fp32", frozenset()
    )
    pinned = [parse_pin(pin) for pin in pins]
    return Planner(planning_input, "cpu", Budget(device_bytes=limit_bytes), pinned, (), None, lambda text: None)


def test_a_plan_for_a_gpu_that_is_not_here_starts_no_process(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with planner() as looking:
        assert looking.evaluate(WHOLE, is_short=True).fits


def test_what_a_search_leaves_below_the_limit_is_its_margin():
    with planner() as looking:
        assert (looking.limit_bytes, looking.problem(990 * MIB).margin_bytes) == (1000 * MIB, 10 * MIB)


def test_a_combination_within_half_a_percent_of_the_limit_is_not_chosen():
    pinned = job(**MANY_WORDS, pin=["micro_batch=16"])
    with planner(pinned) as looking:
        need_bytes = looking.evaluate(WHOLE, is_short=True).need_bytes
    reasons = [
        next(one.reason for one in planned(pinned, int(need_bytes / share)).rejected if one.choices == WHOLE)
        for share in (0.994, 0.996)
    ]
    assert reasons[0].startswith("slower")
    assert "too close" in reasons[1]


def test_a_larger_peak_in_evaluation_is_seen_and_another_combination_chosen():
    """The evaluation runs between steps. The choice of short evaluations does not fit it, and the final choice does."""
    evaluating = job(
        **EVALUATING, model=SMALL | {"embedding_size": 256, "hidden_size": 256}, tokenizer={"vocab_size": 8000},
        pin=["micro_batch=1"],
    )  # fmt: skip
    alone = (micro_batch_choice(1),)
    with planner(evaluating) as looking:
        short_bytes, whole_bytes = (looking.evaluate(alone, is_short).need_bytes for is_short in (True, False))
        assert looking.evaluate_at_length(alone).need_bytes == whole_bytes
    limit_bytes = (int(short_bytes / 0.995) + whole_bytes) // 2
    assert short_bytes < 0.995 * limit_bytes < limit_bytes < whole_bytes
    plan = planned(evaluating, limit_bytes)
    assert plan.fits
    assert plan.choices != alone
    assert plan.fallbacks[0].peak.high_bytes <= limit_bytes


def test_where_what_is_found_never_holds_at_length_a_fallback_that_does_is_taken(monkeypatch):
    with planner(job(**MANY_WORDS)) as looking:
        at_length, evaluations = looking.evaluate_at_length, []

        def needs_more(choices):
            evaluations.append(at_length(choices))
            more = evaluations[-1].peak.model_copy(update={"high_bytes": looking.limit_bytes + 1})
            return evaluations[-1] if evaluations[-1].micro_batch < 16 else replace(evaluations[-1], peak=more)

        monkeypatch.setattr(looking, "evaluate_at_length", needs_more)
        plan = looking.plan()
    assert evaluations[0].micro_batch == 16
    assert plan.fits
    assert samples_of(plan.choices) == evaluations[-1].micro_batch < 16
    sizes = [samples_of(configuration.choices) for configuration in plan.fallbacks]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_ranks_exchange_takes_time(ranks):
    def seconds(ranks):
        with planner(job(ranks=ranks, batch_size=4 * ranks)) as looking:
            return looking.evaluate((micro_batch_choice(4),), is_short=True).seconds

    assert seconds(ranks) > 1.05 * seconds(1)


def test_what_calibration_knows_of_a_combination_is_in_its_time_and_its_range():
    names = ["micro_batch"]
    calibration = learn_time(Calibration(), "cuda 8.6", names, predicted_seconds=1.0, measured_seconds=1.25)
    calibration = learn_peak(calibration, "cuda 8.6", names, predicted_bytes=100, measured_bytes=150)
    with planner() as plain, planner(calibration=calibration) as calibrated:
        before, after = plain.evaluate(WHOLE, is_short=True), calibrated.evaluate(WHOLE, is_short=True)
    assert after.seconds > 1.1 * before.seconds
    assert (after.peak.likely_bytes, after.peak.low_bytes) == (before.peak.likely_bytes, before.peak.low_bytes)
    assert after.need_bytes > before.need_bytes
    pinned = job(pin=["micro_batch=16"])
    assert planned(pinned, 1000 * MIB, calibration=calibration).time_factor == 1.25
    assert planned(pinned, 1000 * MIB).time_factor == 1.0


@pytest.mark.long
def test_what_is_kept_beside_the_gpu_is_said_where_it_is_worth_a_word():
    """Two tables of 256 numbers per word, for both of Adam's moments."""
    wide = {"model": SMALL | {"embedding_size": 256, "hidden_size": 256}, "optimizer": {"name": "adamw"}}
    pins = ["micro_batch=8", "optimizer_offload=host"]
    large = planned(job(**wide, tokenizer={"vocab_size": 40_000}, pin=pins), 4000 * MIB)
    kept_bytes = large.off_device.kept_bytes
    assert kept_bytes > 2 * 2 * 40_000 * 256 * 4
    assert kept_bytes < large.off_device.moved_bytes < 4 * kept_bytes
    assert large.off_device.disk_bytes_per_second is None
    assert planned(job(**wide, pin=pins), 4000 * MIB).off_device is None


def test_a_file_that_memory_can_keep_waits_for_no_disk():
    looking = on_cpu(pins=["optimizer_offload=disk", "micro_batch=8"])
    plan = looking.plan()
    assert plan.off_device.kept_bytes >= 80 * MIB
    assert plan.off_device.disk_bytes_per_second is None


def test_a_long_run_on_the_processor_may_need_more_and_most_in_a_heap_that_keeps_large_blocks():
    """In the usual heap a block of the table's size, 40 MiB, is mapped on its own and leaves no hole."""
    looking = on_cpu()
    usual, kept = (
        looking.evaluate((micro_batch_choice(8), *heap), is_short=True).peak
        for heap in ((), (Choice(technique="heap", options={"mapped_from": "never"}),))
    )
    beside_bytes = usual.high_bytes - int(1.15 * (usual.likely_bytes - usual.measured_bytes))
    assert 0 < beside_bytes < 1.1 * usual.measured_bytes
    assert kept.high_bytes > usual.high_bytes + 4 * 40 * MIB


def test_a_plan_for_the_processor_says_what_of_its_budget_is_kept_back():
    looking = on_cpu(200 * MIB)
    assert looking.limit_bytes == 184 * MIB
    plan = looking.plan()
    assert not plan.fits
    needed_bytes = plan.smallest_budget_bytes - 16 * MIB
    assert plan.fallbacks[0].peak.high_bytes <= needed_bytes <= 1.02 * plan.fallbacks[0].peak.high_bytes
    assert plan.lossy_alternatives
    for alternative in plan.lossy_alternatives:
        opened_mib = -(-(alternative.peak.high_bytes + 16 * MIB) // MIB)
        assert alternative.reason.startswith(f"would fit a budget of {opened_mib}MiB if the job had `allow: [")


def test_half_precision_that_is_chosen_is_what_the_prediction_is_of():
    half = job(model={"architecture": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 2}, precision="auto")
    with planner(half) as looking:
        for choices, precision in (
            (WHOLE, "fp32"),
            ((_half("bf16"), *WHOLE), "bf16"),
            ((_half("fp16"), *WHOLE), "fp16"),
        ):
            assert looking.prediction(choices).precision == precision


def _half(dtype):
    return Choice(technique="autocast", options={"dtype": dtype})


@pytest.mark.parametrize(("samples", "is_whole"), [(16, True), (4, False)])
def test_a_micro_batch_of_all_samples_is_said_to_be_the_whole_batch(samples, is_whole):
    plan = planned(job(pin=[f"micro_batch={samples}"]), 1000 * MIB)
    assert (plan.about["micro_batch"] == "the whole batch in one pass") == is_whole
    assert (plan.numerics["micro_batch"] == "bitwise") == is_whole


def test_the_budget_beside_a_gpu_is_the_plan_s():
    of_host = job(budget={"device": "900MiB", "host": "3GiB"}, pin=["micro_batch=16"])
    plan = plan_job(of_host, device="rtx3060")
    assert plan.budget == Budget(device_bytes=900 * MIB, host_bytes=3072 * MIB)
