"""Fixtures for searches in a made-up world, in which the registry contains only its techniques."""

import pytest

import plimsoll.techniques
from plimsoll.planning.search import choices, pins, search


@pytest.fixture
def inhabited(monkeypatch):
    """Return a function that replaces the registry by the techniques of a world."""

    def inhabit(world):
        for module in (plimsoll.techniques, choices):
            monkeypatch.setattr(module, "TECHNIQUES", world.registry)
        assert search.technique_of is pins.technique_of
        return world

    return inhabit
