"""Inference plans of small models, on targets that need no process: placement, messages and refusals."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from plimsoll.device.cuda.gpus import find_gpu
from plimsoll.device.speed import speed_of
from plimsoll.errors import BudgetError, DeviceError, InputError
from plimsoll.planning.plan_inference import _host_free_bytes, plan_inference
from plimsoll.planning.targets import device_here
from plimsoll.records.units import format_bytes
from small_checkpoints import saved

MIB = 1 << 20
CARD = "rtx3060"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    wide = {"hidden_size": 512, "intermediate_size": 1024}
    return {"gpt2": saved(root / "gpt2", "gpt2"), "wide": saved(root / "wide", "llama", **wide)}


@pytest.fixture(scope="module")
def least(folders):
    """Return the smallest budget of the wide model on a card, from a plan that does not fit."""
    plan = plan_inference(folders["wide"], "score", longest_tokens=32, limit_bytes=1, device=CARD)
    assert not plan.fits
    return plan.smallest_budget_bytes


def planned(folder, limit_bytes=None, **options):
    fields = {"longest_tokens": 32, "limit_bytes": limit_bytes, "device": CARD} | options
    return plan_inference(folder, fields.pop("task", "score"), **fields)


def test_with_room_for_all_everything_stays(folders):
    plan = planned(folders["wide"])
    assert plan.fits
    assert plan.names_in("device") == {part.name for part in plan.parts}
    assert (plan.read_bytes, plan.read_seconds, plan.limited_by) == (0, 0.0, "compute")
    assert plan.limit_source == "the whole card"


def test_what_does_not_fit_says_what_would_and_that_does(folders, least):
    below, above = planned(folders["wide"], least - MIB), planned(folders["wide"], least)
    assert not below.fits
    assert below.smallest_budget_bytes == least
    assert above.fits
    assert above.peak.high_bytes <= least
    assert above.micro_batch == 1


@pytest.mark.long
def test_whatever_is_more_than_the_least_fits(folders, least):
    """This also holds if every plan that was guessed to fit turns out not to fit when traced."""
    assert all(planned(folders["wide"], least + more * MIB // 2).fits for more in range(1, 12, 2))


@pytest.mark.long
def test_more_budget_is_never_slower(folders, least):
    rates = [planned(folders["wide"], least + more * MIB).rows_per_second for more in (0, 5, 10, 20, 40, 200)]
    assert all(after >= before * 0.99 for before, after in pairwise(rates))


def test_what_streams_beside_a_card_are_blocks_on_the_host(folders, least):
    plan = planned(folders["wide"], least + 9 * MIB)
    away = [part for part in plan.parts if part.place != "device"]
    assert away
    assert {part.place for part in away} == {"host"}
    assert all(part.is_streamed and part.name.startswith("model.layers.") for part in away)
    assert plan.read_bytes == plan.bytes_in("host")
    assert plan.rate_source == "table"


def test_what_the_host_of_a_card_by_name_needs_is_said_as_not_checked(folders, least):
    plan = planned(folders["wide"], least + 9 * MIB)
    said = f"needs {format_bytes(plan.bytes_in('host'))} of the host's memory, which was not checked"
    assert plan.bytes_in("host")
    assert said in [one.text for one in plan.assumptions]
    assert plan.host_free_bytes is None
    assert not any("not checked" in one.text for one in planned(folders["wide"]).assumptions)


def test_a_host_that_is_too_small_does_not_fit_and_what_would_does(folders, least, monkeypatch):
    # No test machine has so little memory. Set the memory for weights to one block of four.
    block_bytes = next(part.num_bytes for part in planned(folders["wide"]).parts if part.name == "model.layers.0")
    monkeypatch.setattr("plimsoll.planning.plan_inference._host_free_bytes", lambda device: block_bytes)
    below = planned(folders["wide"], least)
    assert not below.fits
    assert below.host_free_bytes == below.bytes_in("host") == block_bytes
    assert below.smallest_budget_bytes > least
    above = planned(folders["wide"], below.smallest_budget_bytes)
    assert above.fits
    assert above.bytes_in("host") <= block_bytes
    assert above.assumptions == ()


def test_a_card_reads_nothing_from_the_disk(folders, least, monkeypatch):
    def never(files):
        raise AssertionError(files)

    monkeypatch.setattr("plimsoll.planning.plan_inference.cold_bytes_per_second", never)
    plan = planned(folders["wide"], least + 9 * MIB)
    assert plan.read_seconds == pytest.approx(plan.bytes_in("host") / plan.read_bytes_per_second)


def test_a_plan_is_within_its_limit_as_it_was_traced_whole(folders, least):
    for more in (3, 30):
        plan = planned(folders["wide"], least + more * MIB)
        assert plan.peak.high_bytes <= plan.limit_bytes
        assert plan.peak.traced_bytes > 0


def test_new_tokens_take_longer_and_more(folders):
    short, long = (planned(folders["gpt2"], task="generate", new_tokens=new, most_rows=4) for new in (1, 30))
    assert long.pass_time.likely_seconds > 5 * short.pass_time.likely_seconds
    assert long.new_tokens == 30


def test_fewer_rows_can_be_asked_for(folders):
    assert planned(folders["gpt2"], most_rows=3).micro_batch <= 3


def test_a_row_of_one_token_is_the_least_that_can_be_planned(folders):
    plan = planned(folders["gpt2"], longest_tokens=1, most_rows=1)
    assert (plan.longest_tokens, plan.micro_batch, plan.new_tokens, plan.rejected) == (1, 1, 0, ())


def test_each_placement_is_traced_once_and_told(folders, least):
    told = []
    plan = planned(folders["wide"], least + 5 * MIB, progress=told.append)
    traces = [text for text in told if text.startswith("tracing")]
    assert len(traces) == len(set(traces)) == plan.num_traces > 1


def test_how_sure_a_pass_time_is_follows_from_how_well_the_speed_is_known(folders):
    pass_time = planned(folders["wide"]).pass_time
    spread = 1 + speed_of(find_gpu(CARD)).spread
    assert pass_time.high_seconds == pytest.approx(pass_time.likely_seconds * spread)
    assert pass_time.low_seconds == pytest.approx(pass_time.likely_seconds / spread)


def test_weights_may_be_planned_in_another_type(folders):
    stored, halved = planned(folders["wide"]), planned(folders["wide"], dtype=torch.bfloat16)
    assert (stored.dtype, stored.is_converted, stored.device_kind) == ("float32", False, "cuda")
    assert (halved.dtype, halved.is_converted) == ("bfloat16", True)
    assert halved.num_bytes * 2 == stored.num_bytes


@pytest.mark.parametrize(
    ("device", "free_bytes"), [("cuda", 2131 * MIB), ("cuda:1", 2131 * MIB), ("rtx3060", None), ("cudapod", None)]
)
def test_the_host_of_a_gpu_that_is_here_has_what_the_process_leaves_of_it(device, free_bytes, monkeypatch):
    monkeypatch.setattr("plimsoll.planning.plan_inference._free_bytes", lambda: 4 << 30)
    assert _host_free_bytes(device) == free_bytes
    monkeypatch.setattr("plimsoll.planning.plan_inference._free_bytes", lambda: 1 << 30)
    assert _host_free_bytes(device) == (None if free_bytes is None else 0)


def test_on_the_processor_what_does_not_fit_is_on_disk_and_read_once_for_each_new_token(folders, monkeypatch):
    """The page cache of the machine can hold nothing."""
    monkeypatch.setattr("plimsoll.planning.plan_inference._free_bytes", lambda: 0)
    plan = planned(folders["gpt2"], 1, task="generate", new_tokens=3, device="cpu")
    assert (plan.fits, plan.device_kind, plan.rate_source) == (False, "cpu", "measured")
    assert plan.peak.measured_bytes > 50 * MIB  # the process without the model
    assert plan.read_bytes_per_second > 0
    assert plan.names_in("device") == {"the rest"}
    assert not plan.names_in("host")
    streamed = {part.name: part.num_bytes for part in plan.parts if part.is_streamed}
    assert set(streamed) == plan.names_in("disk") - {"embeddings"}
    assert (plan.read_bytes, plan.cached_bytes) == (3 * sum(streamed.values()), 0)
    assert plan.smallest_budget_bytes == plan.peak.high_bytes + plan.kept_back_bytes
    assert plan.kept_back_bytes > 0
    assert plan.assumptions == ()


def test_what_was_not_taken_is_told_with_numbers(folders, least):
    plan = planned(folders["wide"], least + 5 * MIB)
    assert plan.rejected
    assert all(found.peak.likely_bytes > 0 and found.rows_per_second > 0 for found in plan.rejected)
    assert any("exceed the limit" in found.reason for found in plan.rejected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"longest_tokens": 0}, "rows of 0 tokens"),
        ({"most_rows": 0}, "at most 0 at once"),
        ({"new_tokens": -1}, "-1 new ones"),
        ({"longest_tokens": 65}, "exceed the model's maximum of 64 tokens: give shorter ones"),
        ({"new_tokens": 4}, "the task `score` generates none"),
    ],
)
def test_what_cannot_be_planned_is_refused(folders, options, message):
    with pytest.raises(InputError, match=message):
        planned(folders["gpt2"], **options)


def test_devices_and_budgets_are_those_of_the_targets(folders):
    with pytest.raises(DeviceError):
        planned(folders["gpt2"], device="no such card")
    with pytest.raises(BudgetError, match="more than"):
        planned(folders["gpt2"], 1 << 50)


@pytest.mark.parametrize(
    ("given", "has_gpu", "expected"),
    [
        (None, False, "cpu"),
        (None, True, "cuda"),
        ("local", False, "cpu"),
        ("CPU", True, "cpu"),
        ("rtx3060", False, "rtx3060"),
    ],
)
def test_the_device_that_is_planned_for_is_the_one_here_where_none_is_named(given, has_gpu, expected, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    assert device_here(given) == expected
