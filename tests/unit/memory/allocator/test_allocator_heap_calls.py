"""The heap calls of a training: blocks are numbered by allocation, and freed in torch's order."""

import pytest

from plimsoll.memory.allocator.heap_calls import (
    FREE,
    MALLOC,
    MAP_FROM,
    MEMALIGN,
    NODE_OBJECTS_BYTES,
    ROW,
    TENSOR_OBJECTS_BYTES,
    TRIM,
    heap_calls,
)


def listed(*args, **asked):
    calls = heap_calls(*args, **asked)
    assert len(calls.kinds) == len(calls.values)
    return [(kind, value) for kind, value in zip(calls.kinds, calls.values, strict=True) if kind != ROW], calls


def test_a_tensor_is_its_data_and_what_lies_beside_them():
    found, calls = listed([(7, 1000), (8, 50), (7, -1000)], beside_bytes=TENSOR_OBJECTS_BYTES)
    tensors = [[(MALLOC, first), (MEMALIGN, first + 1), (MALLOC, first + 2), (MALLOC, first + 3)] for first in (0, 4)]
    assert found == [*tensors[0], *tensors[1], (FREE, 3), (FREE, 1), (FREE, 0), (FREE, 2)]
    assert list(calls.block_bytes) == [96, 1000, 176, 24, 96, 50, 176, 24]
    assert calls.kinds.count(ROW) == 3


def test_no_data_are_not_asked_for():
    found, _ = listed([(1, 0), (2, 8), (1, -1)], beside_bytes=(96,))
    assert found == [(MALLOC, 0), (MALLOC, 2), (MEMALIGN, 3), (FREE, 0)]
    assert listed([(1, 0), (1, -1)])[0] == []


def test_an_id_may_come_again_and_what_is_not_live_is_not_freed():
    found, _ = listed([(1, 8), (1, -8), (1, 16), (1, -16)])
    assert found == [(MEMALIGN, 0), (FREE, 0), (MEMALIGN, 1), (FREE, 1)]
    with pytest.raises(KeyError):
        heap_calls([(1, 8), (1, -8), (1, -8)])


def test_nodes_trims_and_thresholds_come_before_their_deltas_and_the_newest_node_goes_first():
    first, second = NODE_OBJECTS_BYTES[:2]
    found, calls = listed(
        [(1, 8), (2, 8), (3, 8)], nodes_before={1: 2, 2: -1}, trims_before=(1,), thresholds_before={1: 4096}
    )
    assert found[:3] == [(MEMALIGN, 0), (TRIM, 0), (MAP_FROM, 4096)]
    num_taken = len(first) + len(second)
    assert found[3 : 3 + num_taken] == [(MALLOC, 1 + number) for number in range(num_taken)]
    assert found[4 + num_taken :] == [
        *((FREE, 1 + len(first) + number) for number in range(len(second))),
        (MEMALIGN, 2 + num_taken),
    ]
    assert tuple(calls.block_bytes) == (8, *first, *second, 8, 8)
