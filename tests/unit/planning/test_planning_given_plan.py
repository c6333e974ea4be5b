"""The check whether a run can use an existing plan."""

import pytest
import torch

from plan_records import tried_plan, untried_plan
from plimsoll.data.quick_facts import TextSketch
from plimsoll.errors import BudgetError
from plimsoll.planning.given_plan import reasons_against, require_same, require_that_fits, without_trial
from plimsoll.planning.inputs import JobInput
from plimsoll.planning.plan import plan_job
from plimsoll.records.device import Budget
from plimsoll.records.job import Job
from plimsoll.records.plan import Trial

MIB = 1 << 20
SMALL = {"architecture": "lstm", "embedding_size": 32, "hidden_size": 32}


def job(**changes):
    fields = {"model": SMALL, "data": "nowhere.txt", "tokenizer": {"vocab_size": 1000}, "optimizer": {"name": "sgd"}}
    return Job.from_fields(fields | {"sequence_length": 64, "batch_size": 16} | changes)


@pytest.fixture(scope="module")
def made():
    """Return a plan of this job for 1 GiB, as if made for this CPU."""
    plan = plan_job(job(pin=["micro_batch=16"]), device="rtx3060", limit_bytes=1024 * MIB)
    facts = JobInput(job()).facts("cpu")
    return plan.model_copy(update={"made_for": facts})


def without_budget(plan):
    return plan.model_copy(update={"budget": Budget()})


on_this_processor = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


TEXTS = TextSketch(1000, None, 0)  # as they were prepared


@on_this_processor
def test_a_run_may_have_just_the_budget_of_its_plan_or_a_plan_without_one(made):
    assert require_same(made, job(budget={"device": "1GiB"}), "plan.json").budget.device_bytes == 1 << 30
    assert require_same(without_budget(made), job(budget={"device": "1MiB"}), "plan.json").budget.device_bytes == MIB
    assert require_same(without_budget(made), job(), "plan.json").budget == Budget()


@on_this_processor
@pytest.mark.parametrize("budget", [{}, {"device": "1GiB"}, {"device": "2GiB"}])
def test_a_run_goes_on_with_its_plan_where_the_budget_is_no_smaller(made, budget):
    assert reasons_against(made, job(budget=budget), TEXTS) == []
    assert reasons_against(without_budget(made), job(budget=budget), TEXTS) == []


@on_this_processor
def test_a_run_that_goes_on_has_what_is_otherwise_against_its_plan(made):
    assert reasons_against(made, job(budget={"device": "1023MiB"}), TEXTS) == ["the budget was 1.0 GiB, is 1023.0 MiB"]
    assert reasons_against(made, job(batch_size=8), TEXTS) == ["batch_size was 16, is 8"]
    assert reasons_against(made, job(), TEXTS._replace(vocab_size=261)) == ["vocabulary was 1000, is 261"]


def test_a_plan_that_fits_is_let_through_and_one_that_does_not_is_refused(made):
    require_that_fits(made)
    with pytest.raises(BudgetError, match="cannot hold this training"):
        require_that_fits(made.model_copy(update={"smallest_budget_bytes": 2 << 30}))


def test_what_another_run_measured_is_not_said_of_one_that_has_its_plan():
    told = "it is the plan of another run, used unchanged"
    plan = without_trial(tried_plan())
    assert (plan.trial, plan.candidates, plan.fallbacks) == (Trial(left_out=told), (), tried_plan().fallbacks)
    assert without_trial(plan) == plan
    assert without_trial(untried_plan()) == untried_plan()
