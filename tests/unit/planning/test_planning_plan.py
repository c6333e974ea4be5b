"""Plans of small real jobs: the choice, its reasons, the rest of a plan, and refused plans.

Most are for a named GPU that is absent: nothing is measured for it, so a plan is the same on every machine. The context
alone takes some 120 MiB there, and the training as a plain loop 436 MiB.
"""

import re
import sys

import pytest
import torch
from torch import nn

from plimsoll.errors import BudgetError, InputError
from plimsoll.planning import inputs
from plimsoll.planning.constraints import require_possible
from plimsoll.planning.given_plan import require_same, require_that_fits
from plimsoll.planning.plan import plan_job, plan_step
from plimsoll.records.job import Job
from plimsoll.records.plan import Plan, micro_batch_choice, parse_pin
from plimsoll.records.prediction import Estimate

MIB = 1 << 20
LSTM = {"architecture": "lstm", "embedding_size": 256, "hidden_size": 256}
NOT_THE_UPDATE = ["optimizer_offload", "optimizer_in_backward"]
IMPOSSIBLE_MIB, TIGHT_MIB, AMPLE_MIB = 150, 330, 1000
LOSSY = ["adaptive_softmax", "adafactor", "low_bit_optimizer"]


def job(**changes):
    """Return a job with 8000 words and a batch of 16, dominated by logits and their gradient, then by states."""
    fields = {"model": LSTM, "data": "nowhere.txt", "tokenizer": {"vocab_size": 8000}}
    return Job.from_fields(fields | {"sequence_length": 64, "batch_size": 16} | changes)


def planned(limit_mib, pins=(), forbids=(), **changes):
    limit_bytes = limit_mib * MIB
    return plan_job(
        job(**changes),
        device="rtx3060",
        limit_bytes=limit_bytes,
        pins=[parse_pin(pin) for pin in pins],
        forbids=forbids,
    )


def names(choices):
    return [choice.technique for choice in choices]


@pytest.fixture(scope="module")
def tight():
    return planned(TIGHT_MIB)


@pytest.fixture(scope="module")
def impossible():
    """Return a plan that keeps states and gradients on the device."""
    return planned(IMPOSSIBLE_MIB, forbids=NOT_THE_UPDATE)


@pytest.fixture(scope="module")
def on_cpu():
    """Return a plan for this machine."""
    return plan_job(job(budget={"device": "1GiB"}), device="cpu")


def test_where_the_plain_training_fits_it_is_the_plan_and_smaller_ones_are_behind_it():
    plan = planned(AMPLE_MIB, forbids=["optimizer_kernel", "chunked_loss", "attention"])
    assert plan.choices == (micro_batch_choice(16),)
    assert plan.fits
    assert plan.plain == plan.fallbacks[0].model_copy(
        update={"peak": plan.plain.peak, "step_time": plan.plain.step_time}
    )
    assert plan.fallbacks[-1].micro_batch < 16
    assert plan.limit_bytes == plan.budget.device_bytes == AMPLE_MIB * MIB


def test_a_tight_budget_is_kept_by_techniques(tight):
    assert tight.fits
    assert tight.plain.peak.likely_bytes > TIGHT_MIB * MIB
    assert len(tight.choices) > 1
    assert tight.fallbacks[0].peak.high_bytes <= TIGHT_MIB * MIB
    assert tight.fallbacks[0].peak == tight.prediction.peak
    assert tight.prediction.limit_bytes == TIGHT_MIB * MIB
    assert tight.fallbacks[0].step_time.low_seconds <= tight.fallbacks[0].step_time.likely_seconds


def test_the_fallbacks_of_a_plan_need_less_and_less():
    plan = planned(AMPLE_MIB)
    needs = [configuration.peak.high_bytes for configuration in plan.fallbacks]
    assert len(needs) >= 2
    assert needs == sorted(set(needs), reverse=True)
    assert needs[-1] < needs[0] * 3 // 4


def test_a_plan_says_why_not_and_what_each_technique_does(tight):
    assert "micro_batch=16" in [" ".join(map(str, one.choices)) for one in tight.rejected]
    for one in tight.rejected:
        assert one.reason
        assert set(names(one.choices)) <= tight.about.keys()
    assert tight.numerics["chunked_loss"] == "reordered"
    assert tight.num_traces >= 3
    assert tight.made_for["batch_size"] == "16"
    assert tight.made_for["target"] == "cuda 8.6"
    assert Plan.from_json(tight.to_json()) == tight


@pytest.mark.long
def test_where_nothing_fits_the_smallest_budget_is_said_and_holds(impossible):
    assert not impossible.fits
    smallest_mib = -(-impossible.smallest_budget_bytes // MIB)
    assert IMPOSSIBLE_MIB < smallest_mib < TIGHT_MIB
    assert impossible.smallest_budget_bytes <= 1.02 * impossible.fallbacks[0].peak.high_bytes
    again = planned(smallest_mib, forbids=NOT_THE_UPDATE)
    assert again.fits
    assert again.fallbacks[0].peak.high_bytes <= smallest_mib * MIB


@pytest.mark.parametrize("name", [LOSSY[0], *(pytest.param(name, marks=pytest.mark.long) for name in LOSSY[1:])])
def test_where_nothing_fits_what_changes_the_training_is_offered_and_does_what_it_says(name, impossible):
    assert len(impossible.lossy_alternatives) == len(LOSSY)
    (alternative,) = (one for one in impossible.lossy_alternatives if name in names(one.choices))
    assert name not in names(impossible.choices)
    limit_mib = -(-alternative.peak.high_bytes * 102 // 100 // MIB)
    assert limit_mib * MIB < impossible.smallest_budget_bytes
    opened = planned(limit_mib, forbids=NOT_THE_UPDATE, allow=[name])
    assert opened.fits
    assert name in names(opened.choices)


def test_what_none_of_its_parts_could_do_alone_is_found():
    """Neither all logits nor all states fit on the device: each technique alone leaves 320 MiB or more."""
    plan = planned(250)
    assert plan.fits
    assert plan.fallbacks[0].peak.high_bytes <= 250 * MIB
    assert {"optimizer_offload", "chunked_loss"} <= set(names(plan.choices))


def test_a_plan_that_does_not_fit_is_refused_with_the_budget_that_would(impossible):
    smallest_mib = -(-impossible.smallest_budget_bytes // MIB)
    with pytest.raises(BudgetError) as caught:
        require_that_fits(impossible)
    message = str(caught.value)
    assert message.startswith("a budget of 150.0 MiB cannot hold this training: the smallest combination, micro_batch=")
    assert f"give --budget {smallest_mib}MiB or more" in message
    for alternative in impossible.lossy_alternatives:
        opened_mib = -(-alternative.peak.high_bytes // MIB)
        combination, lossy = (
            " ".join(map(str, alternative.choices)),
            next(choice.technique for choice in alternative.choices if choice.technique in LOSSY),
        )
        assert f"; {combination} would fit a budget of {opened_mib}MiB if the job had `allow: [{lossy}]`" in message
        assert f"the only combination with {lossy} that was evaluated" in message
        assert opened_mib < smallest_mib
    assert message.count("allow: [") == len(LOSSY)


def test_what_is_pinned_is_in_every_fallback_and_what_is_forbidden_in_none():
    plan = planned(TIGHT_MIB, pins=["micro_batch=5", "optimizer_offload"], forbids=["chunked_loss", "optimizer_kernel"])
    assert plan.choices == (micro_batch_choice(5), *plan.pinned[1:])
    assert [str(choice) for choice in plan.pinned] == ["micro_batch=5", "optimizer_offload=host"]
    assert plan.forbidden == ("chunked_loss", "optimizer_kernel")
    for configuration in plan.fallbacks:
        assert "optimizer_offload" in names(configuration.choices)
        assert not {"chunked_loss", "optimizer_kernel"} & set(names(configuration.choices))
    forbidden = {names(one.choices)[0]: one.reason for one in plan.rejected if len(one.choices) == 1}
    assert forbidden["chunked_loss"] == "forbidden by the user"


def test_a_technique_that_is_pinned_by_its_name_is_used_with_the_best_options():
    plan = planned(AMPLE_MIB, pins=["chunked_loss"])
    assert "chunked_loss" in names(plan.choices)
    assert plan.pinned == ()  # the plan has chosen the option


def test_the_same_job_has_the_same_plan(tight):
    def without_clock(plan):
        def still(found):
            return found.model_copy(update={"prediction": found.prediction.model_copy(update={"predict_seconds": 0.0})})

        candidates = tuple(map(still, plan.candidates))
        return still(plan).model_copy(update={"plan_seconds": 0.0, "candidates": candidates})

    assert without_clock(planned(TIGHT_MIB)) == without_clock(tight)


@pytest.mark.long
def test_more_memory_is_never_slower(tight):
    ample = planned(AMPLE_MIB)
    assert ample.fallbacks[0].step_time.likely_seconds <= tight.fallbacks[0].step_time.likely_seconds


CONSTRAINTS = {
    "constraint-unknown": {"pins": ["chekpointing=all"]},
    "constraint-forbidden-unknown": {"forbids": ["optimiser_offload"]},
    "constraint-lossy": {"pins": ["adafactor"]},
    "constraint-more-than-the-batch": {"pins": ["micro_batch=17"]},
    "constraint-no-such-kernel": {"pins": ["optimizer_kernel=fast"]},
    "constraint-without-blocks": {"pins": ["checkpointing=all"]},
    "constraint-another-precision": {"pins": ["autocast=bf16"]},
    "constraint-another-place": {"pins": ["optimizer_offload=host"]},
    "constraint-lora-without-peft": {"pins": ["lora"]},
    "constraint-neither-together": {"pins": ["optimizer_in_backward", "micro_batch=1"]},
}


@pytest.mark.parametrize("allow", [["adafcator"], "lora", ["micro_batch"]])
def test_what_cannot_be_allowed_is_refused_and_not_taken_for_nothing(allow):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match=r"allow=.*: give a list of names, of recut_batch_norm, recut_loss"):
        plan_step(model, torch.optim.SGD(model.parameters()), {}, budget="1GiB", allow=allow)


@pytest.mark.parametrize("case", CONSTRAINTS)
def test_what_cannot_be_asked_for_is_refused_before_anything_is_done(case, golden, monkeypatch):
    if case == "constraint-lora-without-peft":
        monkeypatch.setitem(sys.modules, "peft", None)  # makes Python raise ImportError for the module

    def refuse(text):
        raise AssertionError(f"it did this first: {text}")

    pinned, forbids = (
        [parse_pin(pin) for pin in CONSTRAINTS[case].get("pins", ())],
        CONSTRAINTS[case].get("forbids", ()),
    )
    with pytest.raises(InputError) as caught:
        plan_job(job(), device="cpu", pins=pinned, forbids=forbids, progress=refuse)
    golden(f"errors/{case}.txt", f"error: {caught.value}\n")
    with pytest.raises(InputError, match=re.escape(str(caught.value))):
        require_possible(job(device="cpu"), pinned, forbids)


def test_more_than_the_device_has_is_refused_before_anything_is_traced():
    def refuse(text):
        raise AssertionError(f"it did this first: {text}")

    with pytest.raises(BudgetError, match="is more than RTX 3060 has, 11.8 GiB: give that or less"):
        plan_job(job(), device="rtx3060", limit_bytes=64 << 30, progress=refuse)
    with pytest.raises(BudgetError, match=r"a budget of 1\.0 PiB is more than .* has"):
        plan_job(job(), device="cpu", limit_bytes=1 << 50, progress=refuse)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_plan_of_this_job_gives_its_budget_to_a_run_without_one(on_cpu):
    assert require_same(on_cpu, job(), "plan.json").budget.device_bytes == 1 << 30
    assert require_same(on_cpu, job(budget={"device": "2GiB"}), "plan.json").budget.device_bytes == 2 << 30
    assert require_same(on_cpu, job(steps=7, seed=3), "plan.json").steps == 7  # these change nothing in a step


def code_of(name):
    return {"code of the model": name}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("changes", "made_for", "message"),
    [
        ({"batch_size": 8}, {}, "not match the job: batch_size was 16, is 8; make a new one with `plimsoll plan`"),
        ({"sequence_length": 32}, {}, "sequence_length was 64, is 32"),
        ({"tokenizer": {"vocab_size": 400}}, {}, "vocabulary was 8000, is 400"),
        ({"model": LSTM | {"hidden_size": 32}}, {}, 'model was .*is .*"hidden_size": 32'),
        ({}, {"torch": "1.0"}, "torch was 1.0, is "),
        ({}, code_of("sha256:0"), "code of the model was sha256:0, is not known"),
        ({}, {"target": "cuda 8.6"}, "target was cuda 8.6, is cpu"),
        ({"budget": {"device": "500MiB"}}, {}, "for a budget of 1.0 GiB, and this run has 500.0 MiB: give that"),
    ],
)
def test_a_plan_of_another_training_is_refused_with_what_differs(on_cpu, changes, made_for, message):
    plan = on_cpu.model_copy(update={"made_for": on_cpu.made_for | made_for})
    with pytest.raises(InputError, match=rf"the plan plan\.json (is|does) .*{message}"):
        require_same(plan, job(**changes), "plan.json")


@pytest.mark.long
def test_where_a_batch_cannot_be_cut_a_sequence_is_without_being_asked_for():
    model = {"architecture": "lstm", "embedding_size": 128, "hidden_size": 128}
    changes = {"model": model, "sequence_length": 4001, "batch_size": 1, "optimizer": {"name": "sgd"}}
    ample, tight = (planned(mib, forbids=["chunked_loss"], **changes) for mib in (AMPLE_MIB, 230))
    assert names(ample.choices) == ["micro_batch"]
    assert tight.fits
    assert "time_segments" in names(tight.choices)


@pytest.mark.slow
@pytest.mark.parametrize("technique", ["time_segments", "truncated_bptt"])
def test_a_training_too_long_for_cudnn_is_planned_where_segments_are_pinned(technique):
    model = {"architecture": "lstm", "embedding_size": 16, "hidden_size": 16}
    changes = {"model": model, "sequence_length": 66_000, "batch_size": 2, "allow": ["truncated_bptt"]}
    with pytest.raises(InputError, match=r"66,000 steps: .*--pin time_segments=1024"):
        planned(AMPLE_MIB, **changes)
    plan = planned(AMPLE_MIB, pins=[f"{technique}=33000"], **changes)
    assert plan.fits
    assert technique in names(plan.choices)


# 13 million parameters in four blocks. Each of four ranks needs 910 MiB, up to 1,196 with the assumed memory of NCCL.
# Sharded, each needs 604 MiB (up to 884) if blocks are gathered once, and 580 (859) if they are gathered twice.
FOUR_RANKS = {
    "model": {"architecture": "gpt2", "n_layer": 4, "n_embd": 512, "n_head": 2}, "tokenizer": {"vocab_size": 1000},
    "sequence_length": 16, "batch_size": 4, "ranks": 4,
}  # fmt: skip
OFF_THE_DEVICE = ["optimizer_offload", "optimizer_in_backward", "parameter_offload", "activation_offload"]


@pytest.mark.long
def test_ranks_shard_a_model_that_none_of_them_fits_whole_and_the_plan_says_why():
    plan = planned(950, forbids=OFF_THE_DEVICE, **FOUR_RANKS)
    assert plan.fits
    assert "fully_shard" in names(plan.choices)
    assert plan.prediction.exchange.num_ranks == 4
    assert plan.prediction.exchange.gathered_bytes > plan.prediction.exchange.largest_gathered_bytes > 0
    (plain,) = [one for one in plan.rejected if one.choices == (micro_batch_choice(1),)]
    assert plain.reason == "needs up to 1.2 GiB, more than 950.0 MiB"


@pytest.mark.long
def test_ranks_that_fit_a_whole_model_do_not_shard_it():
    plan = planned(2000, forbids=OFF_THE_DEVICE, **FOUR_RANKS)
    assert "fully_shard" not in names(plan.choices)
    assert plan.prediction.exchange.gathered_bytes == 0
    assert plan.prediction.exchange.added_up_bytes > 4 * 12 * 4 * 512**2  # the gradients of the blocks, 4 bytes each


def test_a_plan_for_this_process_counts_what_planning_leaves_in_it(monkeypatch):
    """Imports and a heap with holes take that much from the budget of the training that follows."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    read, real = [], inputs.own_baseline

    def growing(traced_bytes):
        read.append(real(traced_bytes).likely_bytes + len(read) * (40 << 20))
        return Estimate(likely_bytes=read[-1], low_bytes=read[-1], high_bytes=read[-1], measured_bytes=read[-1])

    monkeypatch.setattr(inputs, "own_baseline", growing)
    plan = plan_step(
        model, torch.optim.SGD(model.parameters()), {"x": torch.ones(4, 8)},
        lambda model, batch: model(batch["x"]).mean(), units="samples", budget="4GiB", device="cpu",
    )  # fmt: skip
    assert len(read) == 2
    assert plan.prediction.peak.likely_bytes >= read[-1]
    assert all(configuration.peak.likely_bytes >= read[-1] for configuration in plan.fallbacks)
