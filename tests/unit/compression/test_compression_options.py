"""Contradictory options of compression, refused before anything is loaded."""

import pytest

from plimsoll.compression.options import require_consistent, target_bytes_of
from plimsoll.errors import InputError

GOOD = {
    "target": None, "methods": None, "forbids": None, "recover": 0, "budget": None, "tries": 4, "samples": None
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "5MiB", "methods": ["int8"]}, "--method int8 fixes the chain, --target 5MiB searches"),
        ({"methods": ["int8"], "forbids": ["heads"]}, "--method int8 fixes the chain: leave out --forbid heads"),
        ({"recover": -1}, "--recover -1 is not a number of steps"),
        ({"budget": "2GiB"}, "--budget 2GiB applies only to training: give --recover"),
        ({"tries": 0}, "--tries 0 leaves nothing to measure"),
        ({"samples": 0}, "--samples 0 leaves nothing to measure"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    require_consistent(**GOOD)
    with pytest.raises(InputError, match=message):
        require_consistent(**GOOD | options)


def test_a_target_is_a_size():
    assert (target_bytes_of(None), target_bytes_of("2KiB")) == (None, 2048)
    with pytest.raises(InputError, match="--target: cannot read 'small'"):
        target_bytes_of("small")
