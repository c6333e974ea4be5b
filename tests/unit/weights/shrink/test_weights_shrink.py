"""The registry of ways to make a model smaller."""

from __future__ import annotations

from plimsoll.weights.shrink import SHRINKERS


def test_methods_are_listed_by_their_names_structure_before_values():
    assert all(name == method.name for name, method in SHRINKERS.items())
    stages = [method.stage for method in SHRINKERS.values()]
    assert stages == sorted(stages), "a chain ends with what only changes the bits of values"
