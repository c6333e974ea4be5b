"""The largest size that fits, compared with trying every size, and found with few tries."""

from collections.abc import Callable

import pytest

from plimsoll.memory.largest_size import Found, largest_that_fits

LIMIT_BYTES = 1000


def searched(memory: Callable[[int], int], start: int, most: int, precision: float = 0.0) -> tuple[Found[int], list]:
    tried: list[int] = []

    def try_size(size: int) -> tuple[int, bool, int]:
        assert 1 <= size <= most
        assert size not in tried, "a size was traced twice"
        tried.append(size)
        return memory(size) - LIMIT_BYTES, memory(size) <= LIMIT_BYTES, memory(size)

    found = largest_that_fits(try_size, start, most, precision)
    assert found.num_traces == len(tried)
    return found, tried


def by_trying_all(memory: Callable[[int], int], most: int) -> int | None:
    return max((size for size in range(1, most + 1) if memory(size) <= LIMIT_BYTES), default=None)


FUNCTIONS: dict[str, Callable[[int], int]] = {
    "linear": lambda size: 100 + 7 * size,
    "through zero": lambda size: 10 * size,
    "steps of 20": lambda size: 100 + 20 * (7 * size // 20),
    "wide steps": lambda size: 200 * (1 + size // 17),
    "a kernel that changes": lambda size: 100 + 5 * size + (300 if size > 64 else 0),
    "quadratic": lambda size: 100 + size * size // 9,
    "flat, then steep": lambda size: 500 if size < 90 else 500 + 400 * (size - 89),
    "noisy but rising": lambda size: 100 + 7 * size + (size * 31 % 5),
}


@pytest.mark.parametrize("start", [1, 8, 64, 500])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_answer_is_that_of_trying_all_sizes(name: str, start: int):
    memory = FUNCTIONS[name]
    found, tried = searched(memory, start, most=500)
    assert found.value == by_trying_all(memory, 500)
    assert found.said == memory(found.value)
    assert not found.is_bound
    assert len(tried) <= 16


@pytest.mark.parametrize("start", [1, 8, 64, 500])
def test_a_line_takes_five_traces_at_most(start: int):
    found, tried = searched(FUNCTIONS["linear"], start, most=100_000)
    assert (found.value, len(tried) <= 5) == (128, True)


@pytest.mark.parametrize("start", [8, 64, 500])
@pytest.mark.parametrize("slope", [3, 7, 90])
def test_where_it_is_known_what_grows_a_line_takes_three_traces(start: int, slope: int):
    def try_size(size: int) -> tuple[int, bool, int]:
        return 100 + slope * size - LIMIT_BYTES, 100 + slope * size <= LIMIT_BYTES, slope * size

    found = largest_that_fits(try_size, start, most=100_000, precision=0.0, growing_bytes=lambda grows: grows)
    assert (found.value, found.num_traces) == (900 // slope, 3)
    without = largest_that_fits(try_size, start, most=100_000, precision=0.0)
    assert (without.value, without.num_traces) >= (found.value, found.num_traces)


def test_what_is_said_to_grow_wrongly_costs_traces_and_no_answer():
    for grows in (-5, 1, 10**9):
        found = largest_that_fits(
            lambda size: (100 + 7 * size - LIMIT_BYTES, 100 + 7 * size <= LIMIT_BYTES, None),
            64, 500, 0.0, lambda _, grows=grows: grows,
        )  # fmt: skip
        assert found.value == 128


def test_a_precision_spares_traces_where_it_is_more_than_one_size():
    def memory(size: int) -> int:
        return 100 + size * size // 2_000_000

    exactly, tried_exactly = searched(memory, 30_000, most=100_000)
    nearly, tried_nearly = searched(memory, 30_000, most=100_000, precision=0.02)
    assert exactly.value == pytest.approx(by_trying_all(memory, 100_000), rel=0.001)
    assert 0.98 * exactly.value <= nearly.value <= exactly.value
    assert len(tried_nearly) < len(tried_exactly)


@pytest.mark.parametrize("start", [1, 7, 64])
def test_where_nothing_fits_there_is_no_answer(start: int):
    found, tried = searched(lambda size: 2000 + size, start, most=64)
    assert (found.value, found.said, found.is_bound) == (None, None, False)
    assert 1 in tried
    assert len(tried) <= 7


@pytest.mark.parametrize("start", [1, 7, 64, 1000])
def test_where_everything_fits_the_bound_is_said(start: int):
    found, tried = searched(lambda size: 100, start, most=64)
    assert (found.value, found.said, found.is_bound) == (64, 100, True)
    assert len(tried) <= 8


def test_a_single_size_is_tried_once():
    assert searched(lambda size: 1000, 5, most=1)[0] == Found(1, 1000, True, 1)
    assert searched(lambda size: 1001, 5, most=1)[0] == Found(None, None, False, 1)


def test_of_what_is_not_rising_the_answer_was_seen_to_fit():
    for start in range(1, 513, 7):
        found, tried = searched(lambda size: 600 + size + (size * 7919) % 300, start, most=512)
        assert found.value in tried
        assert found.said is not None
        assert found.said <= LIMIT_BYTES
        assert len(tried) <= 16


def test_the_allocator_may_find_no_free_block_below_the_limit():
    # Whether it fits is asked, not computed from the bytes: fragmentation may need more than is left.
    def try_size(size: int) -> tuple[int, bool, str]:
        return 10 * size - 1000, size <= 90, f"size {size}"

    found = largest_that_fits(try_size, 50, 500, precision=0.0)
    assert (found.value, found.said) == (90, "size 90")


def test_the_size_below_the_first_line_is_supposed_before_that_is_tried():
    told: list[tuple[str, int]] = []

    def try_size(size: int) -> tuple[int, bool, int]:
        told.append(("tried", size))
        return 10 * size + 4 * (size > 20) - 700, size < 66, 10 * size

    found = largest_that_fits(
        try_size, 100, 500, growing_bytes=lambda said: said, suppose=lambda size: told.append(("supposed", size))
    )
    first, supposed, second, *others = told
    assert (first, second) == (("tried", 100), ("tried", supposed[1] + 1))
    assert {name for name, _ in others} <= {"tried"}
    assert found.value == 65
