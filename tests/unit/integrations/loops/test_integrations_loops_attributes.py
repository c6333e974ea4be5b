"""Attributes set while a block runs."""

import pytest

from plimsoll.integrations.loops.attributes import attributes


class Thing:
    def call(self):
        return "of the class"


def test_attributes_of_the_object_come_back_and_those_of_its_class_show_again():
    thing = Thing()
    thing.own = 1
    with attributes(thing, {"own": 2, "call": lambda: "set"}):
        assert (thing.own, thing.call()) == (2, "set")
    with pytest.raises(ZeroDivisionError), attributes(thing, {"own": 3}):
        raise ZeroDivisionError
    assert (thing.own, thing.call(), vars(thing)) == (1, "of the class", {"own": 1})
