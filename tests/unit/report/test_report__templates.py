"""The templates' environment."""

import pytest
from jinja2 import UndefinedError

from plimsoll.report._templates import environment


def test_what_a_record_says_is_escaped():
    assert environment().from_string("{{ name }}").render(name="<script>") == "&lt;script&gt;"


def test_a_name_that_is_not_given_is_an_error():
    with pytest.raises(UndefinedError):
        environment().from_string("{{ name }}").render()
