"""The choices that a search considers."""

import pytest

from plimsoll.planning.search.choices import Compatibility, available_choices
from plimsoll.planning.search.pins import Decided
from plimsoll.records.plan import Choice, micro_batch_choice
from worlds import MadeUp, World


def choice(name, level=0):
    return Choice(technique=name, options={"level": level})


def test_every_technique_offers_says_why_not_or_is_closed(inhabited):
    techniques = [
        MadeUp("open", seconds=(0.1, 0.2)), MadeUp("closed", numerics="lossy"), MadeUp("nothing", reason="no use"),
        MadeUp("unwanted"),
    ]  # fmt: skip
    world = inhabited(World(techniques))
    available = available_choices(world.problem(100, Decided((), frozenset(), frozenset({"unwanted"}))))
    assert available.options == {"open": (choice("open", 0), choice("open", 1))}
    assert available.closed == (choice("closed"),)
    assert {rejected.choices[0].technique: rejected.reason for rejected in available.rejected} == {
        "closed": "changes the training (made up), and is not allowed: `allow: [closed]` in the job allows it",
        "nothing": "no use",
        "unwanted": "forbidden by the user",
    }
    assert available.sizes == (16, 8, 6, 4, 3, 2, 1)


@pytest.mark.parametrize("name", ["by_length", "packed_stretches"])
def test_what_only_leaves_work_out_is_in_every_combination_that_allows_it(name, inhabited):
    world = inhabited(World([MadeUp(name, leaves_out_work=True)]))
    assert available_choices(world.problem(100)).base == (choice(name),)
    assert available_choices(world.problem(100, Decided((), frozenset(), frozenset({name})))).base == ()


def test_what_micro_batches_do_in_less_time_is_offered_where_there_are_none(inhabited):
    """It is also offered if the job asks for it."""
    world = inhabited(World([MadeUp("gradient_cache", is_for_whole_batches=True)]))
    reasons = [one.reason for one in available_choices(world.problem(100)).rejected]
    assert reasons == ["this batch may be cut, and micro_batch takes less time"]
    for required, forbidden in ((frozenset(), {"micro_batch"}), ({"gradient_cache"}, frozenset())):
        available = available_choices(world.problem(100, Decided((), frozenset(required), frozenset(forbidden))))
        assert list(available.options) == ["gradient_cache"]


def test_a_pinned_or_forbidden_micro_batch_leaves_one_size(inhabited):
    world = inhabited(World([]))
    available = available_choices(world.problem(100, Decided((micro_batch_choice(4),), frozenset(), frozenset())))
    assert (available.sizes, available.base) == ((4,), ())
    assert available_choices(world.problem(100, Decided((), frozenset(), frozenset({"micro_batch"})))).sizes == (16,)


def test_what_excludes_each_other_is_not_allowed_together(inhabited):
    techniques = [MadeUp("a", refuses=frozenset({"b"})), MadeUp("b"), MadeUp("c", refuses={"small micro-batch"})]
    compatibility = Compatibility(inhabited(World(techniques)).problem(100))
    assert compatibility.allows((choice("a"), choice("c"), micro_batch_choice(16)))
    assert not compatibility.allows((choice("a"), choice("c"), choice("b")))
    assert not compatibility.allows((micro_batch_choice(8), choice("c")))
