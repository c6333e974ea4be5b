"""Shared memory in an error message."""

from peak_evidence import FULL, SHM, of_text
from plimsoll.diagnose.causes.shm import findings


def test_the_command_that_gives_more():
    (finding,) = findings(of_text(SHM))
    assert finding.code == "docker run --shm-size=8g"
    assert findings(of_text(FULL)) == ()
