"""The contract of causes: found on planted evidence, silent on clean evidence, and documented on a page."""

from pathlib import Path

import pytest

from peak_evidence import CLEAN, PLANTED
from plimsoll.diagnose.causes import every_cause

PAGES = Path(__file__).parents[2] / "docs" / "causes"
PLANTED_IN_THEIR_OWN_TESTS = {
    "cgroup", "checkpoint_kept", "dataset_in_ram", "evaluation_keeps_graphs", "leak", "no_gradient", "workers",
}  # fmt: skip
CASES = [(name, number) for name, planted in PLANTED.items() for number in range(len(planted))]


def test_every_cause_has_planted_evidence():
    assert set(every_cause()) <= PLANTED.keys() | PLANTED_IN_THEIR_OWN_TESTS
    assert PLANTED.keys() <= every_cause().keys()


@pytest.mark.parametrize(("name", "number"), CASES)
def test_it_is_found_where_it_was_planted(name, number):
    (finding,) = every_cause()[name](PLANTED[name][number])
    assert finding.cause == name
    assert finding.title
    assert finding.evidence
    assert finding.remedy
    assert finding.peak_share is None or 0 < finding.peak_share <= 1
    assert (finding.effect_bytes is None) == (finding.effect_known is None)


@pytest.mark.parametrize("name", every_cause())
@pytest.mark.parametrize("number", range(len(CLEAN)))
def test_it_is_not_found_in_what_is_clean(name, number):
    assert every_cause()[name](CLEAN[number]) == ()


@pytest.mark.parametrize("name", every_cause())
def test_its_page_says_how_it_is_found_and_what_is_not(name):
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {name}: ")
    assert "How it is found" in page
    assert "Not found" in page
