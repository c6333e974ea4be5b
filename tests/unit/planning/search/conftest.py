"""Searches run in a made-up world: its techniques are the registry."""

import pytest

import plimsoll.techniques
from plimsoll.planning.search import choices, pins, search


@pytest.fixture
def inhabited(monkeypatch):
    """Let the techniques of a world be all there are."""

    def inhabit(world):
        for module in (plimsoll.techniques, choices):
            monkeypatch.setattr(module, "TECHNIQUES", world.registry)
        assert search.technique_of is pins.technique_of
        return world

    return inhabit
