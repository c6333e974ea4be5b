"""A memory limit of a cgroup below the memory of the machine."""

import pytest

from live_evidence import MIB, live
from plimsoll.diagnose.causes.cgroup import findings
from plimsoll.records.watch import Line


def lines(used_mib, limit_mib):
    return (
        Line(kind="cgroup", name="cgroup v2 memory.max of /", used_bytes=used_mib * MIB, limit_bytes=limit_mib * MIB),
    )


def test_a_limit_that_is_reached():
    (finding,) = findings(live(lines=lines(990, 1024), machine_bytes=8192 * MIB))
    assert finding.title == "the limit of a control group, 1.0 GiB, is reached; the machine has 8.0 GiB"


@pytest.mark.parametrize(
    "seen",
    [
        {"lines": lines(500, 1000), "machine_bytes": 8000 * MIB},
        {"lines": lines(990, 1000), "machine_bytes": 1000 * MIB},
        {"lines": (), "machine_bytes": 8000 * MIB},
        {"lines": lines(990, 1000)},
    ],
)
def test_what_is_none(seen):
    assert findings(live(**seen)) == ()
