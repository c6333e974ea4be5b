"""The command line called in this process, with what it printed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from plimsoll.cli.main import main


class Called(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Called]:
    """Return ``call(*arguments)``, which runs the command in a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object) -> Called:
        monkeypatch.setattr(sys, "argv", ["plimsoll", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        return Called(end.value.code or 0, *capfd.readouterr())

    return run


@pytest.fixture
def refused(call: Callable[..., Called]) -> Callable[..., str]:
    """Return ``refused(*arguments)``: the one line on standard error of a command that ends with 2, and only that."""

    def run(*arguments: object) -> str:
        code, out, err = call(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1, err
        return err

    return run
