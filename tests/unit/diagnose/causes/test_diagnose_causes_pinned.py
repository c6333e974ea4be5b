"""Pinned memory in an error message."""

import pytest

from peak_evidence import FULL, PINNED, of_text
from plimsoll.diagnose.causes.pinned import findings


@pytest.mark.parametrize("name", ["cudaHostAlloc", "cudaHostRegister", "pin memory thread"])
def test_what_locks_pages_is_named(name):
    (finding,) = findings(of_text(PINNED, text=f"{name}: out of memory"))
    assert finding.evidence[0].text == f"the error names `{name}`"


def test_the_line_that_failed_counts_too():
    (finding,) = findings(of_text(FULL, code="batch = batch.pin_memory()", place="train.py:3"))
    assert finding.place == "train.py:3"
    assert findings(of_text(FULL)) == ()


def test_a_traceback_names_the_thread_that_pins():
    text = "RuntimeError: CUDA error: out of memory"
    (finding,) = findings(of_text(text, above="RuntimeError: Caught RuntimeError in pin memory thread for device 0."))
    assert finding.title == "the host's pages could not be locked for copies to the GPU"
    assert findings(of_text(text, above="loader = DataLoader(data, pin_memory=True)")) == ()
