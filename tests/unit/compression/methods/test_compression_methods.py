"""The registry of compression methods."""

from __future__ import annotations

from plimsoll.compression.methods import SHRINKERS
from plimsoll.records.shrink import METHODS


def test_methods_are_listed_by_their_names_structure_before_values():
    assert all(name == method.name for name, method in SHRINKERS.items())
    assert [*SHRINKERS] == [*METHODS], "what may be asked of each is known before torch is"
    stages = [METHODS[name].stage for name in SHRINKERS]
    assert stages == sorted(stages), "a chain ends with what only changes the bits of values"
