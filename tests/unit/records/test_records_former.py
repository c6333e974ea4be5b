"""Names of the previous release: files with them are read, and code with them works with a warning."""

import json

import pytest

import plimsoll.errors
from plan_records import impossible_plan, tried_plan
from plimsoll.errors import RecordError
from plimsoll.records.former import former_arguments
from plimsoll.records.plan import Plan
from plimsoll.records.run import DeathLine, GraphLine, OomEvent, StartLine, StepLine, parse_line
from plimsoll.records.strategies import Strategies
from plimsoll.report.render import load
from strategy_records import strategies

NEW_TO_OLD = {
    "fallbacks": "rungs", "lossy_alternatives": "openings", "configuration": "rung", "fallback": "rung",
    "next_fallback": "next_rung", "retained": "held", "strategies": "ways",
}  # fmt: skip


def as_before(value):
    """Return a record's fields with the names of the previous release."""
    if isinstance(value, dict):
        return {NEW_TO_OLD.get(name, name): as_before(one) for name, one in value.items()}
    return [as_before(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("plan", [tried_plan(), impossible_plan()], ids=["tried", "impossible"])
def test_a_plan_of_the_schema_before_is_the_same_plan(plan):
    before = as_before(json.loads(plan.to_json())) | {"schema": 2}
    assert "rungs" in before
    assert Plan.from_json(json.dumps(before)) == plan


def test_what_the_strategies_were_called_before_is_read(tmp_path):
    before = as_before(json.loads(strategies().to_json())) | {"record": "ways"}
    (tmp_path / "ways.json").write_text(json.dumps(before))
    assert Strategies.from_json(json.dumps(before)) == load(tmp_path / "ways.json") == strategies()


LINES = (
    OomEvent(family="cpu", fallback=0, next_fallback=1),
    StepLine(
        time_seconds=1.0, step=1, epoch=0, first_sample=0, num_samples=8, num_units=8, loss=1.0, learning_rate=0.1,
        step_seconds=0.5, micro_batch=4, fallback=2,
    ),
    GraphLine(step=2, retained=()),
    StartLine(time_seconds=0.0, step=0, micro_batch=8, fallback=1, baseline_bytes=1, wall_time="now"),
    DeathLine(time_seconds=1.0, signal="SIGKILL", evidence="killed", next_fallback=2),
)  # fmt: skip


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.event)
def test_lines_of_metrics_written_before_are_read(line):
    before = as_before(json.loads(line.model_dump_json()))
    assert before != json.loads(line.model_dump_json())
    assert parse_line(json.dumps(before).encode(), "line") == line


def test_former_arguments_and_attributes_work_and_warn():
    @former_arguments(rungs="fallbacks")
    def take(*, fallbacks):
        return fallbacks

    with pytest.warns(DeprecationWarning, match="the argument rungs was renamed to fallbacks"):
        assert take(rungs=3) == 3
    assert take(fallbacks=4) == 4
    plan = tried_plan()
    with pytest.warns(DeprecationWarning, match=r"Plan.rungs was renamed to Plan.fallbacks"):
        assert plan.rungs == plan.fallbacks
    with pytest.warns(DeprecationWarning, match="WornProcessError was renamed to FragmentedHeapError"):
        assert plimsoll.errors.WornProcessError is plimsoll.errors.FragmentedHeapError


def test_a_field_or_an_argument_by_both_of_its_names_is_refused():
    with pytest.raises(RecordError, match="rungs and fallbacks are the same field"):
        Plan.from_json(json.dumps({"record": "plan", "schema": 3, "budget": {}, "fallbacks": [], "rungs": []}))
    with pytest.raises(TypeError, match="rungs and fallbacks are the same argument"):
        former_arguments(rungs="fallbacks")(lambda *, fallbacks: fallbacks)(rungs=1, fallbacks=2)
