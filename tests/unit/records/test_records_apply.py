"""The record of `plimsoll apply`: it counts all rows, and its measurements are of one process."""

from apply_records import apply_facts
from plimsoll.records.apply import ApplyFacts


def test_it_comes_back_from_its_text():
    facts = apply_facts()
    assert ApplyFacts.from_json(facts.to_json()) == facts
    assert facts.first_row + facts.num_new_rows == facts.num_rows
