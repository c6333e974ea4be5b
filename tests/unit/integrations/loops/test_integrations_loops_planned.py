"""Plans for another library's loop: available techniques only, and unchanged random numbers."""

import pytest
import torch
from torch import nn

from plimsoll.errors import BudgetError, InputError
from plimsoll.integrations.loops.planned import planned, refuse_both
from plimsoll.integrations.loops.transaction import techniques_for_loops


def plan_for(budget, offered, model=None):
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    return planned(
        model,
        torch.optim.AdamW(model.parameters()),
        {"x": torch.ones(4, 4)},
        lambda model, batch: model(batch["x"]).mean(),
        budget=budget,
        units="samples",
        device=torch.device("cpu"),
        offered=offered,
    )


def test_only_what_is_offered_is_planned_and_random_numbers_are_as_before():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1))
    state = torch.get_rng_state()
    plan = plan_for("4GiB", {"micro_batch"}, model)
    assert torch.equal(torch.get_rng_state(), state)
    assert {choice.technique for fallback in plan.fallbacks for choice in fallback.choices} == {"micro_batch"}


def test_where_nothing_fits_the_error_says_what_would():
    with pytest.raises(BudgetError, match=r"needs .*iB: give --budget \d+MiB or more"):
        plan_for("20MiB", techniques_for_loops())


@pytest.mark.parametrize(
    ("budget", "batch", "options", "message"),
    [
        ("1GiB", None, {"micro_batch": 2}, "given with micro_batch, which the plan"),
        ("1GiB", None, {"fallbacks": []}, "given with fallbacks, which the plan"),
        (None, {}, {}, "without a budget: give budget="),
    ],
)
def test_what_contradicts_itself_is_refused(budget, batch, options, message):
    with pytest.raises(InputError, match=message):
        refuse_both(budget, batch, options)
