"""Growth and noise: lines calculated by hand, and the rate of false alarms."""

import random

import pytest

from plimsoll.diagnose.growth import growth_of

MIB = 1 << 20


def points(used_mib):
    return [(step, round(used * MIB)) for step, used in enumerate(used_mib, start=1)]


def test_a_straight_line_is_its_slope():
    growth = growth_of(points(100 + 2 * step for step in range(20)))
    assert (growth.likely_bytes, growth.low_bytes, growth.high_bytes) == (2 * MIB,) * 3
    assert (growth.first_step, growth.last_step, growth.is_steady) == (5, 20, True)  # a fifth of 20 steps is warm-up


def test_steps_need_not_be_evenly_spaced():
    looks = [1, 2, 3, 4, 5, 7, 9, 12, 16, 21, 27, 35, 45]
    growth = growth_of([(step, 100 * MIB + step * MIB) for step in looks])
    assert (growth.likely_bytes, growth.is_steady) == (MIB, True)


def test_one_outlier_does_not_count():
    used = [100.0 + step for step in range(40)]
    used[20] = 4000.0
    assert growth_of(points(used)).likely_bytes == pytest.approx(MIB, rel=0.05)


@pytest.mark.parametrize("num_points", [0, 1, 10])
def test_too_few_points_say_nothing(num_points):
    assert growth_of(points([100.0] * num_points)) is None


@pytest.mark.parametrize(
    "used",
    [
        [100.0] * 40,
        [100.0] * 25 + [200.0] * 15,  # one jump
        [100.0 + min(step, 7) * 20 for step in range(40)],  # a warm-up
        [100.0 + step for step in range(40)][::-1],
        [10_000.0 + step / 40 for step in range(40)],  # 1 MiB of 10,000: less than 2 %
        [100.0 + step / 1024 for step in range(40)],  # 40 KiB in total
    ],
    ids=["flat", "jump", "warm-up", "falling", "little of much", "little"],
)
def test_what_is_not_steady_growth(used):
    assert not growth_of(points(used)).is_steady


@pytest.mark.long
def test_noise_is_seldom_taken_for_growth():
    """The noise is independent, 20 MiB around 300 MiB, in 2,000 runs of 100 steps."""
    draw = random.Random(0)
    num_false = sum(growth_of(points(draw.gauss(300, 20) for _ in range(100))).is_steady for _ in range(2000))
    assert num_false <= 20


def test_growth_is_found_in_noise():
    """The growth is 1 MiB per step and the noise 2 MiB."""
    draw = random.Random(1)
    grown = [growth_of(points(300 + step + draw.gauss(0, 2) for step in range(100))) for _ in range(200)]
    assert all(growth.is_steady for growth in grown)
    assert all(0.9 * MIB < growth.likely_bytes < 1.1 * MIB for growth in grown)
