"""What every test may use: golden files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

# What runs teach and how fast the machine is are kept in a folder; that of tests begins empty, and goes with them.
_CACHE = tempfile.TemporaryDirectory(prefix="plimsoll-tests-")
os.environ["PLIMSOLL_CACHE"] = _CACHE.name

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the one option of this suite."""
    parser.addoption(
        "--update-golden", action="store_true", help="write the screens that tests see into tests/golden; read the diff"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return ``check(name, text)``: the text must be that of ``tests/golden/<name>``."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no golden file {path}: run pytest --update-golden and read the new file"
        assert text == path.read_text(encoding="utf-8")

    return check
