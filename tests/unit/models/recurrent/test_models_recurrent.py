"""Recurrent models under their names of the previous release."""

import pytest

import plimsoll.models.recurrent
from plimsoll.models.recurrent.model import load_recurrent


def test_a_former_name_works_with_a_warning():
    with pytest.warns(DeprecationWarning, match="models.recurrent.model.load_recurrent"):
        assert plimsoll.models.recurrent.load_recurrent is load_recurrent
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = plimsoll.models.recurrent.no_such_name
