"""The fallback schedule of a plan, the notation of a choice, valid pins, and the batches that may be split."""

import pytest

from plimsoll.errors import InputError
from plimsoll.records.device import Budget
from plimsoll.records.plan import (
    Choice,
    Configuration,
    LossCheck,
    Pin,
    Plan,
    check_pins,
    micro_batch_choice,
    micro_batch_plan,
    parse_pin,
)

BUDGET = Budget(device_bytes=1)


RECOMPUTE = Choice(technique="recompute", options={"every": 2})


def test_the_first_size_is_in_force_and_the_others_follow():
    plan = micro_batch_plan(BUDGET, (64, 16, 4))
    assert plan.choices == (Choice(technique="micro_batch", options={"samples": 64}),)
    assert [configuration.micro_batch for configuration in plan.fallbacks] == [64, 16, 4]
    assert [configuration.others for configuration in plan.fallbacks] == [(), (), ()]
    assert plan.choices_by_fallback[1:] == ((micro_batch_choice(16),), (micro_batch_choice(4),))


def test_choices_of_other_techniques_are_not_micro_batches():
    configuration = Configuration(choices=(RECOMPUTE, micro_batch_choice(8)))
    assert (configuration.micro_batch, configuration.others) == (8, (RECOMPUTE,))


def test_a_plan_fits_unless_a_larger_budget_is_asked_for():
    assert Plan(budget=BUDGET, fallbacks=()).fits
    assert not Plan(budget=BUDGET, fallbacks=(), smallest_budget_bytes=2).fits


@pytest.mark.parametrize(
    ("options", "written", "pin"),
    [
        ({}, "offload", Pin(technique="offload")),
        ({"samples": 16}, "offload=16", Pin(technique="offload", value=16)),
        ({"share": 0.5}, "offload=0.5", Pin(technique="offload", value=0.5)),
        ({"blocks": "all"}, "offload=all", Pin(technique="offload", value="all")),
        ({"blocks": "0,3-5"}, "offload=0,3-5", Pin(technique="offload", value="0,3-5")),
        ({"blocks": "every 2"}, "offload=every 2", Pin(technique="offload", value="every 2")),
        (
            {"blocks": "0,3-5", "to": "disk"},
            "offload(blocks=0,3-5,to=disk)",
            Pin(technique="offload", options={"blocks": "0,3-5", "to": "disk"}),
        ),
        ({"is_pinned": True}, "offload=true", Pin(technique="offload", value=True)),
        (
            {"every": 2, "to": "disk", "is_pinned": False},
            "offload(every=2,to=disk,is_pinned=false)",
            Pin(technique="offload", options={"every": 2, "to": "disk", "is_pinned": False}),
        ),
    ],
)
def test_a_choice_is_pinned_as_it_is_written(options, written, pin):
    assert str(Choice(technique="offload", options=options)) == written
    assert parse_pin(written) == pin
    assert str(pin) == written


@pytest.mark.parametrize(
    ("text", "pin"),
    [
        (" micro_batch = 4 ", Pin(technique="micro_batch", value=4)),
        ("a( b = 1e-2 , c = x y )", Pin(technique="a", options={"b": 0.01, "c": "x y"})),
        ("a(b=1)", Pin(technique="a", options={"b": 1})),
        ('a="4"', Pin(technique="a", value="4")),
        ("a=null", Pin(technique="a", value="null")),
        ("a=0:4", Pin(technique="a", value="0:4")),
        ("a=b=c", Pin(technique="a", value="b=c")),
        (f"a=1{'0' * 400}", Pin(technique="a", value=10**400)),
        ("a=1e999", Pin(technique="a", value="1e999")),
        ("a=NaN", Pin(technique="a", value="NaN")),
    ],
)
def test_the_ways_to_write_a_pin(text, pin):
    assert parse_pin(text) == pin


@pytest.mark.parametrize("text", ["", "=4", "a=", "Micro Batch", "a()", "a(4)", "a(b=)", "a(b=1", "a(b=1)=2", "a,b"])
def test_what_is_no_pin_is_refused_with_how_it_is_written(text):
    with pytest.raises(InputError, match=r"as a choice: write a technique, as in activation_offload, micro_batch=4 or"):
        parse_pin(text)


def pins(*texts):
    return [parse_pin(text) for text in texts]


def test_pins_that_agree_pass():
    check_pins(pins("micro_batch=4", "offload", "offload", "micro_batch=4"), ["autocast"])


@pytest.mark.parametrize("texts", [("micro_batch=4", "micro_batch=8"), ("offload", "offload(every=2)")])
def test_pins_that_contradict_each_other_are_refused(texts):
    with pytest.raises(InputError) as caught:
        check_pins(pins(*texts), ())
    first, second = texts
    assert str(caught.value) == (f"`{first}` and `{second}` cannot both be pinned: leave one of them out")


def test_what_is_pinned_cannot_be_forbidden():
    with pytest.raises(InputError) as caught:
        check_pins(pins("micro_batch=4"), ["offload", "micro_batch"])
    assert str(caught.value) == "`micro_batch=4` is pinned and `micro_batch` is forbidden: leave one of the two out"


@pytest.mark.parametrize(
    ("verdict", "may_cut"),
    [
        ("additive", True),
        ("known", True),
        ("allowed", True),
        ("not computed", True),
        ("not additive", False),
        ("not shown", False),
        ("never cut", False),
    ],
)
def test_a_batch_is_cut_unless_something_is_known_against_it(verdict, may_cut):
    assert LossCheck(verdict=verdict).may_cut is may_cut


def test_what_was_found_is_said():
    assert LossCheck(verdict="additive", num_samples=8).sentence == (
        "8 samples have the same loss as one batch and one by one"
    )
    both = LossCheck(verdict="additive", num_samples=8, gradient_difference=1e-7)
    assert both.sentence.endswith("one by one, and the same gradients")
    assert LossCheck(verdict="never cut", why="never_cut=True says so").sentence == "never_cut=True says so"
