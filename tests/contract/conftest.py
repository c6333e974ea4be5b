"""Fixtures of the contract tests of techniques."""

import pytest

from plimsoll.techniques import activation_offload


@pytest.fixture
def small_storages_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offload small storages, too: the models of these tests have no others."""
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 1 << 10)
