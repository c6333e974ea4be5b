"""The former module name of stored tokens: see `test_files_former_modules.py`."""

import pytest

import plimsoll.data.tokens


def test_what_is_in_no_module_is_not_found():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = plimsoll.data.tokens.no_such_name
