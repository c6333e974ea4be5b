"""Former module names that the documentation had users import: they work, with a warning."""

from importlib import import_module

import pytest

from plimsoll.files.former_modules import FORMER_MODULES


@pytest.mark.parametrize(
    ("former", "name", "today", "name_today"),
    [
        ("plimsoll.workload", "Workload", "plimsoll.models.workload", "Workload"),
        ("plimsoll.data.loader", "Loader", "plimsoll.data.batches.loader", "Loader"),
        ("plimsoll.data.lanes", "Lanes", "plimsoll.data.samples.stream_slots", "StreamSlots"),
        ("plimsoll.run.placed", "placed_model", "plimsoll.inference.placement", "placed_model"),
        ("plimsoll.data.tokens", "open_tokens", "plimsoll.data.tokens.store", "open_tokens"),
    ],
)
def test_a_former_module_has_what_is_in_todays(former, name, today, name_today):
    with pytest.warns(DeprecationWarning, match=f"was renamed to {today}"):
        found = getattr(import_module(former), name)
    assert found is getattr(import_module(today), name_today)


def test_every_former_module_is_one_of_today():
    assert all(import_module(today) for today in FORMER_MODULES.values())


def test_what_is_no_former_module_is_not_found():
    with pytest.raises(ModuleNotFoundError):
        import_module("plimsoll.no_such_module")
