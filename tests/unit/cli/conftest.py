"""Fixtures that run the command line in this process and return its output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import yaml

from plimsoll.cli.main import main


class Called(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _nothing_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurement of the baseline, which would fork the test process."""
    for module in ("baseline", "cached_answers"):
        monkeypatch.setattr(f"plimsoll.planning.{module}.baseline_for", lambda *_: nullcontext())


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
    """Return ``refused(*arguments)``, which returns the error line of a command.

    The command must exit with code 2, and print this line on standard error and nothing else.
    """

    def run(*arguments: object) -> str:
        code, out, err = call(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1, err
        return err

    return run


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Create a job with an empty text, for commands whose work is replaced by a fixture."""
    path = tmp_path / "job.yaml"
    (tmp_path / "text.txt").touch()
    path.write_text(yaml.safe_dump({"model": "lstm", "data": {"train": "text.txt"}, "batch_size": 16}))
    return path


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Return ``standing_in(module, function, answer or error)``, which replaces a function.

    The replacement returns the answer or raises the error. The returned list receives the arguments of each call,
    except for facts about the texts.
    """

    def become(module_name: str, function_name: str, answer: Any) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def function(job: Any, *, progress: Callable[[str], None], **options: Any) -> Any:
            options.pop("texts", None)
            asked.append({"batch_size": job.batch_size, "precision": job.precision, **options})
            progress("tracing")
            if isinstance(answer, BaseException):
                raise answer
            return answer

        module = ModuleType(module_name)
        setattr(module, function_name, function)
        monkeypatch.setitem(sys.modules, module_name, module)
        return asked

    return become


@pytest.fixture
def failed_as_json(call: Callable[..., Called]) -> Callable[..., dict[str, Any]]:
    """Return ``failed_as_json(*arguments)``, which runs a command with ``--json`` and returns its failure.

    The JSON object must agree with standard error and the exit code.
    """

    def run(*arguments: object) -> dict[str, Any]:
        code, out, err = call(*arguments, "--json")
        said = json.loads(out)
        begin = "" if said["error"] == "Interrupted" else "error: "
        assert (code, err) == (said["exit_code"], f"{begin}{said['message']}\n")
        return dict(said)

    return run
