import pytest

from plimsoll.records.plan import LossCheck


@pytest.mark.parametrize(
    ("verdict", "may_cut"),
    [
        ("additive", True),
        ("known", True),
        ("allowed", True),
        ("not computed", True),
        ("not additive", False),
        ("not shown", False),
        ("never cut", False),
    ],
)
def test_a_batch_is_cut_unless_something_is_known_against_it(verdict, may_cut):
    assert LossCheck(verdict=verdict).may_cut is may_cut


def test_what_was_found_is_said():
    assert LossCheck(verdict="additive", num_samples=8).sentence == (
        "8 samples have the same loss at once and one by one"
    )
    both = LossCheck(verdict="additive", num_samples=8, gradient_difference=1e-7)
    assert both.sentence.endswith("one by one, and the same gradients")
    assert LossCheck(verdict="never cut", why="never_cut=True says so").sentence == "never_cut=True says so"
