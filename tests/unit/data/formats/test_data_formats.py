"""Every module of the folder has the functions of `Format`."""

import importlib
import inspect
import pkgutil

import pytest

from plimsoll.data import formats
from plimsoll.data.formats import Reading

NAMES = [module.name for module in pkgutil.iter_modules(formats.__path__) if not module.ispkg]


@pytest.mark.parametrize("name", NAMES)
def test_a_module_has_the_functions_of_a_format(name: str):
    module = importlib.import_module(f"plimsoll.data.formats.{name}")
    for function in ("look", "scan", "decode", "decode_run"):
        asked = list(inspect.signature(getattr(formats.Format, function)).parameters)[1:]
        assert list(inspect.signature(getattr(module, function)).parameters) == asked


def test_columns_are_one_name_or_several():
    assert Reading().columns is None
    assert Reading(text="a").columns == ("a",)
    assert Reading(text=("a", "b")).columns == ("a", "b")
