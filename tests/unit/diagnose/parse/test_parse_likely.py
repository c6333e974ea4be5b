"""The likely cause of an error message, derived from its numbers in GiB."""

import pytest

from plimsoll.diagnose.parse.likely import likely_causes
from plimsoll.records.oom_text import OomText

GIB = 1 << 30


def event(kind="cuda_allocator_new_format", **gib):
    return OomText(kind=kind, is_oom=True, **{name: round(number * GIB) for name, number in gib.items()})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (event(tried_to_allocate=40, capacity=24, free=20), ("absurd_request", None)),
        (event(tried_to_allocate=5, capacity=24, allowed_limit=4), ("absurd_request", None)),
        (event(tried_to_allocate=1, capacity=24, free=2), ("unknown", None)),
        (event(tried_to_allocate=1, capacity=24, free=2, derived_reserved_unallocated=1), ("unknown", "fragmentation")),
        (
            event(tried_to_allocate=1, capacity=24, free=0.5, this_process=23, derived_reserved_unallocated=2),
            ("fragmentation", "true_capacity"),
        ),
        # 0.1 of 12 is within rounding: another 20 MiB of anything would not have fitted either.
        (
            event(tried_to_allocate=0.02, capacity=12, free=0, this_process=11.7, derived_reserved_unallocated=0.1),
            ("true_capacity", "fragmentation"),
        ),
        (
            event(tried_to_allocate=1, capacity=24, free=0.5, this_process=3, other_process=20),
            ("other_process", "true_capacity"),
        ),
        # 24 - 0.5 - 10 of the allocator - 1.5 of a context: 12 belong to other processes.
        (event(tried_to_allocate=1, capacity=24, free=0.5, reserved_total=10), ("other_process", "true_capacity")),
        (event(tried_to_allocate=1, capacity=24, free=0.5, reserved_total=22), ("true_capacity", None)),
        (
            event(tried_to_allocate=1, capacity=24, free=0.5, reserved_total=22, derived_reserved_unallocated=0.75),
            ("true_capacity", "fragmentation"),
        ),
        (event(capacity=24), ("unknown", None)),
        (event("mps", tried_to_allocate=1, allocated_by_pytorch=40, allowed_limit=40), ("true_capacity", None)),
        (event("cublas_alloc"), ("unknown", None)),
        (event("python_memoryerror"), ("host_ram", None)),
        (event("cpu_allocator_linux", tried_to_allocate=2048), ("host_ram", "absurd_request")),
        (event("shm_bus_error"), ("tiny_shm", None)),
    ],
)
def test_by_hand(given, expected):
    assert likely_causes(given) == expected


def test_several_processes_that_are_named_are_others():
    crowded = event(tried_to_allocate=4, capacity=80, free=3)
    assert likely_causes(crowded, num_processes=2) == ("other_process", "true_capacity")
    assert likely_causes(crowded, num_processes=1) == ("true_capacity", None)
