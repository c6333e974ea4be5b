"""The one place where an out-of-memory error is caught, with real ones."""

import gc
import sys
import weakref
from typing import get_args

import numpy as np
import pytest
import torch

from plimsoll.device.base import backend_for
from plimsoll.distributed.ranks import PeerOutOfMemory
from plimsoll.errors import OutOfMemoryError
from plimsoll.records.run import PHASES_OF_A_STEP, OomEvent, Phase
from plimsoll.step.failpoints import exhaust_memory
from plimsoll.step.oom_boundary import Position, attempt, fitting, without_fail

EXBIBYTE = 1 << 60


def attempted(work, position=None):
    return attempt(work, backend_for("cpu"), position or Position())


def test_the_result_of_work_that_succeeds_is_returned():
    assert attempted(lambda: "done") == "done"


def test_the_event_says_where_and_how_much():
    event = attempted(exhaust_memory, Position(step=6, phase="backward", micro_batch=4))
    assert (event.step, event.phase, event.micro_batch) == (7, "backward", 4)  # six are finished
    assert (event.family, event.requested_bytes, event.capacity_bytes) == ("cpu-allocator", EXBIBYTE, None)
    assert event.live_bytes > 1 << 20
    assert event.raw_text.startswith("RuntimeError: ")


@pytest.mark.parametrize("phase", get_args(Phase))
def test_between_steps_the_event_names_the_last_finished_step(phase):
    event = attempted(exhaust_memory, Position(step=6, phase=phase))
    assert event.step == (7 if phase in PHASES_OF_A_STEP else 6)


def test_numpy_and_python_run_out_of_memory_too():
    assert attempted(lambda: np.empty(EXBIBYTE, dtype=np.uint8)).requested_bytes == EXBIBYTE
    assert attempted(lambda: bytearray(EXBIBYTE)).family == "memory-error"


@pytest.fixture
def without_collector():
    """Disable the garbage collector, so that only the boundary can free the tensors of the failed frames."""
    gc.disable()
    yield
    gc.enable()


class Failing:
    """Work whose frame holds a tensor when memory runs out, two calls below the boundary."""

    def __init__(self, keeps_error=False):
        self.held = None
        self.error = None
        self._keeps_error = keeps_error

    def __call__(self):
        tensor = torch.ones(1 << 20)
        self.held = weakref.ref(tensor)
        try:
            exhaust_memory()
        except RuntimeError as error:
            self.error = error if self._keeps_error else None
            raise
        return tensor


@pytest.mark.usefixtures("without_collector")
def test_what_the_failed_frames_held_is_free_when_the_event_is_returned():
    work = Failing()
    assert isinstance(attempted(lambda: work()), OomEvent)
    assert work.held() is None
    assert sys.exc_info() == (None, None, None)


@pytest.mark.usefixtures("without_collector")
def test_it_is_free_even_if_somebody_keeps_the_error():
    work = Failing(keeps_error=True)
    assert isinstance(attempted(lambda: work()), OomEvent)
    assert work.error.__traceback__ is not None
    assert work.held() is None


@pytest.mark.parametrize(
    "error",
    [KeyError("x"), RuntimeError("shapes do not match"), KeyboardInterrupt(), SystemExit(3), StopIteration()],
    ids=lambda error: type(error).__name__,
)
def test_another_error_passes_unchanged(error):
    def work():
        raise error

    with pytest.raises(type(error)) as raised:
        attempted(work)
    assert raised.value is error


def test_our_own_error_is_not_caught_though_it_is_a_memory_error():
    def work():
        raise OutOfMemoryError("no fallback held")

    with pytest.raises(OutOfMemoryError, match="no fallback held"):
        attempted(work)


def test_a_long_text_is_cut():
    def work():
        raise MemoryError("x" * 5000)

    assert len(attempted(work).raw_text) == 2000


def test_memory_that_ran_out_on_another_rank_ran_out_here_too():
    def work():
        raise PeerOutOfMemory(3)

    event = attempted(work)
    assert (event.family, event.rank, event.live_bytes) == ("another rank", 3, None)
    assert event.shortage == "on rank 3"


def test_a_run_begins_before_its_first_step():
    assert (Position().step, Position().phase, Position().micro_batch, Position().samples) == (0, "fetch", None, ())
    assert attempted(exhaust_memory).step == 1


def test_work_that_must_fit_returns_its_result_or_says_what_did_not():
    assert fitting(lambda: "done", backend_for("cpu"), "a model was built") == "done"
    with pytest.raises(OutOfMemoryError, match=r"^memory ran out while a model was built \(.*\): give a larger budget"):
        fitting(exhaust_memory, backend_for("cpu"), "a model was built")


def test_what_explains_an_error_does_not_hide_it_by_one_of_its_own():
    def work():
        raise ValueError("x" * 5000)

    assert without_fail(lambda: 3) == 3
    with pytest.raises(ValueError, match="xxx"):
        without_fail(work, ValueError)
    assert without_fail(work) == "ValueError: " + "x" * (2000 - len("ValueError: "))


def test_being_stopped_is_no_explanation():
    def work():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        without_fail(work)
