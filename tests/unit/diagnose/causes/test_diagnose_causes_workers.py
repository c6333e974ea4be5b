"""Workers that use memory of their own."""

import pytest

from live_evidence import MIB, kept, live
from plimsoll.diagnose.causes.workers import findings
from plimsoll.records.watch import ProcessUse


def processes(*sizes_mib):
    return tuple(
        ProcessUse(
            pid=number, parent=1, name="python", private_bytes=size * MIB, file_bytes=0, shared_bytes=0, swap_bytes=0,
            data_bytes=size * MIB,
        )
        for number, size in enumerate(sizes_mib, start=1)
    )  # fmt: skip


def test_workers_that_hold_much():
    loader = kept("loader", place="train.py:12")
    (finding,) = findings(live(processes=processes(500, 300, 200), loader=loader, num_workers=2))
    assert finding.title == "2 workers of `loader` hold memory of their own"
    assert (finding.place, finding.effect_bytes, finding.code) == ("train.py:12", 500 * MIB, "num_workers=1")


def test_an_error_of_a_worker():
    (finding,) = findings(live(is_of_worker=True))
    assert (finding.place, finding.effect_bytes) == ("train.py:3", None)


@pytest.mark.parametrize(
    "seen",
    [
        {"processes": processes(900, 50, 50), "num_workers": 2},
        {"processes": processes(500, 300, 200)},  # no workers of a data loader
        {"processes": processes(500)},
        {},
    ],
)
def test_what_is_none(seen):
    assert findings(live(**seen)) == ()
