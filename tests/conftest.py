"""What every test may use: golden files, a cache of its own, a quick collector of garbage, properties without haste."""

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
except ImportError:  # as in an image for GPUs, whose tests need none
    settings = None
else:
    # No deadline: a test that failed because the machine was busy would say nothing. No database of examples.
    _UNHURRIED = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("all", _UNHURRIED, max_examples=60)
    settings.register_profile("quick", _UNHURRIED, max_examples=20)

# One thread: models this small wait for a second one longer than it works, and there are as many processes of tests as
# cores. OMP_NUM_THREADS=2 in the environment tries two.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background has them ignore Ctrl-C, and what they start inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How fast this machine is is measured once for all tests; what runs teach is each test's own.
_MEASURED = tempfile.TemporaryDirectory(prefix="plimsoll-tests-")

_MANY_BLOCKS = 300_000  # of memory that a file of tests leaves: collected before the next one

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the one option of this suite."""
    parser.addoption(
        "--update-golden", action="store_true", help="write the screens that tests see into tests/golden; read the diff"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Try a third of the examples of each property where `make test` leaves out long tests, too."""
    if settings is not None:
        settings.load_profile("quick" if "long" in config.getoption("markexpr") else "all")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as long all cases of a test but the part that it is ``sampled`` in, drawn by their names."""
    for _, cases in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        drawn = sorted(cases, key=lambda item: crc32(item.nodeid.encode()))
        sampled = drawn[0].get_closest_marker("sampled")
        if sampled is not None:
            for item in drawn[-(-len(drawn) // sampled.args[0]) :]:
                item.add_marker("long")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Start the processes of a test and of its fixtures warm, where it does not say ``cold``."""
    with warm.cold() if item.get_closest_marker("cold") else warm.warm():
        return (yield)


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


@pytest.fixture(autouse=True)
def _environment_stays() -> Iterator[None]:
    """Fail a test that leaves a variable of ours behind: later tests of the same process would inherit it."""
    before = _own_variables()
    yield
    assert _own_variables() == before, "set variables with monkeypatch, also those that the code under test sets"


def _own_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("PLIMSOLL_")}


@pytest.fixture(autouse=True)
def _own_cache(_environment_stays: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test a cache folder that knows the machine's speed and nothing else."""
    measured, own = Path(_MEASURED.name), Path(tempfile.mkdtemp(dir=_MEASURED.name))
    for file in measured.glob("speed*"):
        shutil.copy(file, own)
    monkeypatch.setenv("PLIMSOLL_CACHE", str(own))
    yield
    for file in own.glob("speed*"):
        shutil.copy(file, measured)
    shutil.rmtree(own, ignore_errors=True)  # pytest looks through all of its own folders for the next one's name


@pytest.fixture(scope="module", autouse=True)
def _garbage_goes() -> Iterator[None]:
    """What was not looked at while tests ran is collected where they leave much."""
    num_before = sys.getallocatedblocks()  # to count the objects themselves takes as long as collecting them
    yield
    if sys.getallocatedblocks() > num_before + _MANY_BLOCKS:
        gc.unfreeze()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _collecting_is_quick(_garbage_goes: None) -> None:
    """What was there before a test is no garbage of its own.

    Garbage is collected each time that memory runs out, and to walk through the objects of torch and transformers took
    most of the time of these tests.
    """
    gc.freeze()
