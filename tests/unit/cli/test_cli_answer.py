"""The code that `predict` and `plan` share, called as they call it."""

import pytest

from plimsoll.cli.answer import check_output, hand_over, limit_bytes_of
from plimsoll.errors import BudgetError, OutputError
from plimsoll.records.base import Record
from plimsoll.report.render import render
from prediction_records import fitting


def test_a_budget_is_read_in_bytes():
    assert (limit_bytes_of(None), limit_bytes_of("2KiB")) == (None, 2048)
    with pytest.raises(BudgetError, match="--budget: cannot read 'much' as a size"):
        limit_bytes_of("much")
    with pytest.raises(BudgetError, match="--budget: 2 means 2 bytes: write a unit, for example 2GiB"):
        limit_bytes_of("2")
    assert limit_bytes_of(str(1 << 30)) == 1 << 30


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.pdf", "its suffix is not .html or .json: give -o a name"),
        ("there.json", "exists already and is not overwritten: give another -o, or --force"),
        ("none/a.json", "create it, or give another -o"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused(tmp_path, name, message):
    (tmp_path / "there.json").write_text("mine")
    with pytest.raises(OutputError, match=message):
        check_output(tmp_path / name, force=False)


@pytest.mark.parametrize("name", ["new.json", "A.HTML", "there.json"])
def test_an_output_that_can_be_written_passes(tmp_path, name):
    (tmp_path / "there.json").write_text("mine")
    check_output(None, force=False)
    check_output(tmp_path / name, force=True)


def test_an_answer_goes_to_its_reader(tmp_path, capsys):
    record: Record = fitting()
    hand_over(record, "It fits.", None, as_json=False)
    assert capsys.readouterr() == (render(record) + "\n", "")
    hand_over(record, "It fits.", tmp_path / "a.json", as_json=False)
    assert capsys.readouterr() == (f"{tmp_path / 'a.json'}\n", "It fits.\n")
    hand_over(record, "It fits.", tmp_path / "b.json", as_json=True)
    assert capsys.readouterr() == (record.to_json() + "\n", "")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text() == record.to_json() + "\n"
