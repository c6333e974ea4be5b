"""Pins, expressed as choices of the techniques."""

from dataclasses import replace

import pytest

from plimsoll.errors import InputError
from plimsoll.models.workload import Reason
from plimsoll.planning.search.pins import decide
from plimsoll.records.plan import Choice, micro_batch_choice, parse_pin
from worlds import MadeUp, World


def decided(world, pins=(), forbids=(), allow=()):
    problem = world.problem(1000, allow=allow)
    return decide([parse_pin(pin) for pin in pins], forbids, problem.workload, problem.setting)


@pytest.fixture
def world(inhabited):
    lossy = MadeUp("lossy", numerics="lossy")
    nothing = MadeUp("nothing", reason="there is nothing to do")
    return inhabited(World([MadeUp("recompute", (4, 8), seconds=(0.1, 0.3)), lossy, nothing]))


def test_a_value_is_of_the_first_option(world):
    assert decided(world, ["recompute=1"]).pinned == (Choice(technique="recompute", options={"level": 1}),)
    assert decided(world, ["recompute(level=1)"]) == decided(world, ["recompute=1"])
    assert decided(world, ["micro_batch=5"]).pinned == (Choice(technique="micro_batch", options={"samples": 5}),)


def test_a_name_alone_leaves_the_options_to_the_plan_unless_there_is_one(world):
    assert decided(world, ["recompute"])[:2] == ((), frozenset({"recompute"}))
    assert decided(world, ["micro_batch"])[:2] == ((), frozenset())  # every plan has one
    assert decided(world, ["lossy"], allow=["lossy"]).pinned == (Choice(technique="lossy", options={"level": 0}),)


class ForSeveral(MadeUp):
    """A technique that needs several ranks."""

    def choices(self, workload, setting):
        return "the job has 1 rank" if setting.num_ranks == 1 else super().choices(workload, setting)


@pytest.mark.parametrize("pin", ["shards", "shards=0", "shards(level=0)"])
def test_a_pin_that_only_the_number_of_ranks_forbids_is_left_out_with_the_reason(inhabited, pin):
    world = inhabited(World([ForSeveral("shards")]))
    found = decided(world, [pin])
    assert (found.pinned, found.required) == ((), frozenset())
    assert dict(found.left_out) == {pin: "the job has 1 rank"}
    problem = world.problem(1000)
    several = replace(problem.setting, num_ranks=2)
    assert decide([parse_pin(pin)], [], problem.workload, several).pinned == (
        Choice(technique="shards", options={"level": 0}),
    )
    with pytest.raises(InputError, match="it cannot be used here: the job has 1 rank"):  # invalid on any number
        decided(world, ["shards(depth=3)"])


def test_a_micro_batch_of_a_whole_batch_is_left_out_where_a_rank_has_less(world):
    problem = world.problem(1000)
    of_half = replace(problem.setting, num_ranks=2, batch_size=problem.setting.batch_size // 2)
    found = decide([parse_pin(f"micro_batch={problem.setting.batch_size}")], [], problem.workload, of_half)
    assert (found.pinned, list(found.left_out)) == ((), [f"micro_batch={problem.setting.batch_size}"])


def test_a_batch_that_must_stay_whole_may_be_pinned_whole(world):
    problem = world.problem(1000)
    problem.workload.kept_whole = Reason("it compares samples", "do not cut it")
    size = problem.setting.batch_size
    for pin in (f"micro_batch={size}", f"micro_batch(samples={size})"):
        assert decide([parse_pin(pin)], [], problem.workload, problem.setting).pinned == (micro_batch_choice(size),)
    for pin in ("micro_batch", f"micro_batch={size - 1}"):
        with pytest.raises(InputError, match="cannot be used here: it compares samples: do not cut it"):
            decide([parse_pin(pin)], [], problem.workload, problem.setting)


def test_an_option_that_the_choices_leave_out_can_be_pinned(inhabited):
    world = inhabited(World([MadeUp("recompute", (4, 8), seconds=(0.1, 0.3), unoffered={"kept": 0})]))
    of_both = Choice(technique="recompute", options={"level": 1, "kept": 20})
    assert decided(world, ["recompute(level=1,kept=20)"]).pinned == (of_both,)
    assert decided(world, ["recompute(level=1,kept=0)"]) == decided(world, ["recompute=1"])


@pytest.mark.parametrize(
    ("pins", "forbids", "message"),
    [
        (["recomptue=1"], [], r"there is no technique `recomptue`; did you mean `recompute`\?"),
        ([], ["micro-batch"], r"there is no technique `micro-batch`; did you mean `micro_batch`\?"),
        (["nothing"], [], "--pin nothing: it cannot be used here: there is nothing to do; leave it out"),
        (["recompute(depth=1)"], [], "--pin recompute.depth=1.: recompute has no option `depth`: give one of level"),
        (["lossy"], [], r"--pin lossy: is lossy: allow it with `allow: \[lossy\]`; leave it out, or change the job"),
        (["micro_batch=two"], [], "samples is two: give a whole number, for example --pin micro_batch=16"),
        (["micro_batch=1.5"], [], "samples is 1.5: give a whole number, for example --pin micro_batch=16"),
        (["micro_batch=true"], [], "samples is true: give a whole number, for example --pin micro_batch=16"),
        (["micro_batch=17"], [], "a micro-batch of 17 is not a part of a batch of 16: give 1 to that many"),
        (["recompute=0", "recompute=1"], [], "cannot both be pinned: leave one of them out"),
        (["recompute=0"], ["recompute"], "is pinned and `recompute` is forbidden: leave one of the two out"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(world, pins, forbids, message):
    with pytest.raises(InputError, match=message):
        decided(world, pins, forbids)
