"""The limit by itself, in a process of its own: the allocation that goes past it raises, and the next one does not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from end_to_end.commands import environment
from plimsoll import limited
from plimsoll.errors import BudgetError, DeviceError, InputError

_PROGRAM = """
import json, torch, plimsoll
from plimsoll.device import process

def holds(mib):
    try:
        torch.ones(mib << 20, dtype=torch.uint8)
    except RuntimeError as error:
        return "can't allocate memory" in str(error) and "refused"
    return "held"

room = process.private_bytes() + (128 << 20)
answers = []
for budget in (room, f"{room / 2**20:.1f}MiB"):
    answers.append(holds(256))
    with plimsoll.limited(budget):
        answers += [holds(64), holds(256), holds(64)]
    answers.append(holds(256))
print(json.dumps(answers))
"""


def test_bytes_and_text_limit_alike_and_only_inside_the_block():
    """128 MiB of room, 16 of which are kept back: 64 MiB fit and 256 do not."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment(), capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == 2 * ["held", "held", "refused", "held", "held"]


def test_what_is_in_use_already_cannot_be_the_limit():
    with pytest.raises(BudgetError, match=r"cannot limit this process to 1\.0 MiB"), limited("1MiB"):
        pass


@pytest.mark.parametrize("device", ["tpu", "cuda:x", ""])
def test_a_device_that_there_is_not_is_named(device):
    with pytest.raises(DeviceError, match=f"there is no device '{device}': give cpu, cuda"):
        limited("2GiB", device)


@pytest.mark.parametrize("budget", ["2 gibi", 0, "-1GiB"])
def test_what_is_no_size_is_refused(budget):
    with pytest.raises(InputError, match="for example 2GiB or 800MiB"):
        limited(budget)
