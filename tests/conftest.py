"""Fixtures for all tests: golden files, a separate cache, fast garbage collection, property tests without deadlines."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from itertools import groupby
from pathlib import Path
from zlib import crc32

import pytest

import warm

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # as in an image for GPUs, whose tests do not need it
    settings = None
else:
    # No deadline: a test that failed because the machine was busy would be meaningless. No database of examples.
    _UNHURRIED = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("all", _UNHURRIED, max_examples=60)
    settings.register_profile("quick", _UNHURRIED, max_examples=20)

# One thread: for models this small, waiting for a second thread takes longer than working, and there is one test
# process per core. OMP_NUM_THREADS=2 in the environment tries two.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background makes them ignore Ctrl-C, and their children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The speed of this machine is measured once for all tests; calibrations from runs belong to each test.
_MEASURED = tempfile.TemporaryDirectory(prefix="plimsoll-tests-")

_MANY_BLOCKS = 300_000  # memory blocks left by a test file: collected before the next file

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of this test suite."""
    parser.addoption(
        "--update-golden", action="store_true", help="write the screens that tests see into tests/golden; read the diff"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Try a third of the examples of each property if long tests are left out, as in `make test`."""
    if settings is not None:
        settings.load_profile("quick" if "long" in config.getoption("markexpr") else "all")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all cases of a ``sampled`` test as long, except for the share that is drawn by their names."""
    for _, cases in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        drawn = sorted(cases, key=lambda item: crc32(item.nodeid.encode()))
        sampled = drawn[0].get_closest_marker("sampled")
        if sampled is not None:
            for item in drawn[-(-len(drawn) // sampled.args[0]) :]:
                item.add_marker("long")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Start the processes of a test and of its fixtures warm, unless it is marked ``cold``."""
    with warm.cold() if item.get_closest_marker("cold") else warm.warm():
        return (yield)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return ``check(name, text)``: the text must equal the content of ``tests/golden/<name>``."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no golden file {path}: run pytest --update-golden and read the new file"
        assert text == path.read_text(encoding="utf-8")

    return check


@pytest.fixture(autouse=True)
def _environment_stays() -> Iterator[None]:
    """Fail a test that leaves a variable of Plimsoll behind: later tests of the process would inherit it."""
    before = _own_variables()
    yield
    assert _own_variables() == before, "set variables with monkeypatch, also those that the code under test sets"


def _own_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("PLIMSOLL_")}


@pytest.fixture(autouse=True)
def _own_cache(_environment_stays: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test a cache folder that contains only the machine's speed."""
    measured, own = Path(_MEASURED.name), Path(tempfile.mkdtemp(dir=_MEASURED.name))
    for file in measured.glob("speed*"):
        shutil.copy(file, own)
    monkeypatch.setenv("PLIMSOLL_CACHE", str(own))
    yield
    for file in own.glob("speed*"):
        shutil.copy(file, measured)
    shutil.rmtree(own, ignore_errors=True)  # pytest scans its own temporary folders to find the next name


@pytest.fixture(scope="module", autouse=True)
def _garbage_goes() -> Iterator[None]:
    """Collect garbage after a test file that leaves many objects."""
    num_before = sys.getallocatedblocks()  # counting the objects themselves takes as long as collecting them
    yield
    if sys.getallocatedblocks() > num_before + _MANY_BLOCKS:
        gc.unfreeze()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _collecting_is_quick(_garbage_goes: None) -> None:
    """Exclude existing objects from garbage collection before a test.

    Garbage is collected each time that memory runs out. Traversing the objects of torch and transformers took most of
    the time of these tests.
    """
    gc.freeze()
