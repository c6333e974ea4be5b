"""The ladder of micro-batches in a plan."""

from plimsoll.records.device import Budget
from plimsoll.records.plan import Choice, Plan, micro_batch_plan

BUDGET = Budget(device_bytes=1)


def test_the_first_size_is_the_plan_and_the_others_are_its_fallbacks():
    plan = micro_batch_plan(BUDGET, (64, 16, 4))
    assert plan.choices == (Choice(technique="micro_batch", options={"samples": 64}),)
    assert len(plan.fallbacks) == 2
    assert plan.micro_batches == (64, 16, 4)


def test_choices_of_other_techniques_are_not_micro_batches():
    recompute = Choice(technique="recompute", options={"every": 2})
    plan = Plan(
        budget=BUDGET,
        choices=(recompute, Choice(technique="micro_batch", options={"samples": 8})),
        fallbacks=((recompute,),),
    )
    assert plan.micro_batches == (8,)
