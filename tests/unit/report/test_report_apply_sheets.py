"""The sheets of a model applied to a file: counts, rates by hand, and omitted rows without a value."""

from apply_records import apply_facts, plain_apply_facts
from plimsoll.report.apply_sheets import apply_sheets


def facts_of(sheet):
    return dict(sheet.rows)


def test_rows_and_rates():
    rows, passes, faults, errors = apply_sheets(apply_facts())
    assert rows.title == "classify with models/reviews on reviews.jsonl"
    assert facts_of(rows) == {
        "Rows": "1,000",
        "Done earlier": "200 of them",
        "Without a result": "2",
        "Truncated": "5, to 128 tokens",
        "Tokens": "50,000",
        "Output": "labels.jsonl",
    }
    found = facts_of(passes)
    assert found["Time"] == "10.0 s, 80.0 rows/s, 4,000 tokens/s"  # 800 rows and 40,000 tokens
    assert found["Padding"] == "10.0% of the tokens computed"  # 4,444 of 44,444
    assert found["OOM events"] == "1, survived"
    assert faults.title == "Rows without a result, 2 of 2"
    assert len(errors.rows) == 1


def test_what_there_is_none_of_is_not_shown():
    sheets = apply_sheets(plain_apply_facts())
    assert len(sheets) == 2
    rows, passes = map(facts_of, sheets)
    assert (rows["Without a result"], rows["Truncated"], "Done earlier" in rows) == ("none", "none", False)
    assert (passes["Budget"], passes["Peak"], passes["OOM events"]) == ("none", "unknown", "none")


def test_no_rows_have_no_rates():
    passes = facts_of(apply_sheets(apply_facts(num_new_rows=0, num_padded_tokens=0))[1])
    assert (passes["Time"], passes["Padding"]) == ("10.0 s", "none")
