"""The ladder of micro-batches in a plan."""

import pytest

from plimsoll.records.device import Budget
from plimsoll.records.plan import Choice, Plan, Rung, micro_batch_choice, micro_batch_plan

BUDGET = Budget(device_bytes=1)


def test_the_first_size_is_the_plan_and_the_others_are_its_fallbacks():
    plan = micro_batch_plan(BUDGET, (64, 16, 4))
    assert plan.choices == (Choice(technique="micro_batch", options={"samples": 64}),)
    assert len(plan.rungs) == 3
    assert [rung.micro_batch for rung in plan.rungs] == [64, 16, 4]
    assert plan.choices_by_rung[1:] == ((micro_batch_choice(16),), (micro_batch_choice(4),))
    assert plan.fits


def test_choices_of_other_techniques_are_not_micro_batches():
    recompute = Choice(technique="recompute", options={"every": 2})
    rung = Rung(choices=(recompute, micro_batch_choice(8)))
    assert (rung.micro_batch, rung.others) == (8, (recompute,))
    plan = Plan(budget=BUDGET, rungs=(rung,), smallest_budget_bytes=7)
    assert plan.choices == rung.choices
    assert not plan.fits


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "recompute"),
        ({"every": 2}, "recompute=2"),
        ({"to_disk": True}, "recompute=true"),
        ({"every": 2, "to_disk": False, "where": "x"}, "recompute(every=2,to_disk=false,where=x)"),
    ],
)
def test_a_choice_reads_as_it_is_written_on_a_command_line(options, text):
    assert str(Choice(technique="recompute", options=options)) == text
