"""OpenMP threads spin briefly, unless the user sets how they wait."""

import os

import pytest

from plimsoll.device.cpu.threads import spin_briefly


@pytest.fixture
def environment(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # so that monkeypatch removes the value that the test sets
        monkeypatch.delenv(name)
    return os.environ


def test_threads_spin_as_briefly_as_where_they_outnumber_cores(environment):
    spin_briefly()
    assert environment["GOMP_SPINCOUNT"] == "1000"


@pytest.mark.parametrize(("name", "value"), [("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "7")])
def test_what_the_user_says_stays(environment, name, value):
    environment[name] = value
    spin_briefly()
    assert {key: environment.get(key) for key in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if key in environment} == {
        name: value
    }
