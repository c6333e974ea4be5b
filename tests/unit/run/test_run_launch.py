"""Which of the ranks' exit codes is the one of all; the launching itself is in tests/end_to_end/test_rank_jobs.py."""

import signal

import pytest

from plimsoll.run.launch import exit_code_of


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([77, -signal.SIGKILL, 77], 137),  # the others ended because one was killed
        ([-signal.SIGSEGV], 139),
        ([77, 3], 3),
        ([75, 77, 77], 75),
        ([2, -signal.SIGTERM], 2),  # who was asked to end, since another one had ended, is not why
        ([77, -signal.SIGTERM], 77),
        ([75, -signal.SIGTERM], 75),
        ([-signal.SIGTERM], 143),
        ([77, 77], 77),
        ([1], 1),
    ],
)
def test_the_rank_that_is_the_cause_counts(codes, expected):
    assert exit_code_of(codes) == expected
