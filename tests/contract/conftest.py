"""What contract tests of techniques share."""

import pytest

from plimsoll.techniques import activation_offload


@pytest.fixture
def small_storages_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small storages are offloaded too: the models of these tests have no others."""
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 1 << 10)
