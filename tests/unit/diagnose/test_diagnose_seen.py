"""What is kept, and whether it has grown."""

import pytest

from plimsoll.diagnose.seen import Kept


@pytest.mark.parametrize(
    ("num_items", "before", "has_grown"),
    [(3, None, True), (2, None, False), (40, 0, True), (12, 8, False), (13, 8, True), (8, 8, False)],
)
def test_growth_is_three_items_and_half_as_many_again(num_items, before, has_grown):
    assert Kept(name="x", kind="list", num_items=num_items, num_items_before=before).has_grown is has_grown


def test_all_bytes():
    assert Kept(name="x", kind="list", tensor_bytes=1, graph_bytes=2, host_bytes=4).num_bytes == 7
