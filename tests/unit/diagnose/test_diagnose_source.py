"""The input of `plimsoll explain`: a path or a pipe; a terminal is refused."""

from pathlib import Path

import pytest

from plimsoll.diagnose import source
from plimsoll.diagnose.source import STANDARD_INPUT, explain_source
from plimsoll.errors import InputError

LOG = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.\n"


@pytest.mark.parametrize("large_bytes", [1, 1 << 20])
def test_a_large_text_is_explained_as_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large_bytes: int
) -> None:
    monkeypatch.setattr(source, "_LARGE_BYTES", large_bytes)
    (tmp_path / "train.log").write_text(LOG)
    found = explain_source(tmp_path / "train.log", None, None, quiet=True)
    assert found.event is not None
    assert (found.subject, found.event.tried_to_allocate) == ("train.log", 4096)


def test_a_text_is_read_from_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.log").write_text(LOG)
    with (tmp_path / "train.log").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert explain_source(STANDARD_INPUT, None, None, quiet=True).subject == "standard input"


def test_a_terminal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    with pytest.raises(InputError, match="which is a terminal here: give a run directory or a file"):
        explain_source(STANDARD_INPUT, None, None, quiet=True)
