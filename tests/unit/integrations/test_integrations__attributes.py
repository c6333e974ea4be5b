from types import SimpleNamespace

from plimsoll.integrations._attributes import attributes


def test_attributes_are_set_while_a_block_runs_and_are_as_before_afterwards():
    thing = SimpleNamespace(own=1)
    with attributes(thing, {"own": 2, "new": 3}):
        assert vars(thing) == {"own": 2, "new": 3}
    assert vars(thing) == {"own": 1}
