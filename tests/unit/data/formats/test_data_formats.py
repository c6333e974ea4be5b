"""Every module of the folder offers what `Format` asks for."""

import importlib
import inspect
import pkgutil

import pytest

from plimsoll.data import formats


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(formats.__path__)])
def test_a_module_has_the_functions_of_a_format(name: str):
    module = importlib.import_module(f"plimsoll.data.formats.{name}")
    for function in ("spans", "decode"):
        asked = list(inspect.signature(getattr(formats.Format, function)).parameters)[1:]
        assert list(inspect.signature(getattr(module, function)).parameters) == asked
