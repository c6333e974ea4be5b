"""Steps are checked at growing intervals."""

from plimsoll.step.sampled_steps import SampledSteps


def due_among(num_steps, sampled):
    for step in range(1, num_steps + 1):
        is_due = sampled.is_due
        sampled.passed(looked=is_due)
        if is_due:
            yield step


def test_the_first_steps_are_checked_and_then_ever_fewer():
    due = [*due_among(2000, SampledSteps())]
    assert due[:12] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 18]
    assert [due[-1] - due[-2], due[-2] - due[-3]] == [200, 200]


def test_a_check_before_its_time_puts_the_next_one_off():
    sampled = SampledSteps(num_steps=8, next_look=10)
    sampled.passed(looked=True)
    assert (sampled.num_steps, sampled.next_look) == (9, 11)
