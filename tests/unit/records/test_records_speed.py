import pytest

from plimsoll.records.speed import Point, Speed, rate_at

CURVE = (Point(at=1, rate=10), Point(at=100, rate=1000))


@pytest.mark.parametrize(("at", "rate"), [(0.5, 10), (1, 10), (10, 100), (100, 1000), (5000, 1000)])
def test_a_curve_is_straight_in_logarithms_and_constant_beyond_its_ends(at, rate):
    assert rate_at(CURVE, at) == rate


def test_one_point_is_the_rate_for_all():
    assert rate_at((Point(at=8, rate=3),), 1) == 3


def test_a_speed_is_a_file(tmp_path):
    speed = Speed(
        device="a processor",
        source="measured",
        flops_per_second={"float32": CURVE},
        bytes_per_second={"plain": CURVE},
        op_seconds=1e-5,
        module_op_seconds=4e-5,
        backward_op_seconds=2e-5,
        host_bytes_per_second=1e10,
        link_bytes_per_second=1e9,
        spread=0.25,
    )
    speed.save(tmp_path / "speed.json")
    assert Speed.load(tmp_path / "speed.json") == speed
