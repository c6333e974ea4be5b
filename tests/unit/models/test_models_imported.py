"""Models of a user's functions, from a real module on the path."""

import pytest

from plimsoll.errors import JobError
from plimsoll.models.imported import build_imported

SOURCE = """
from torch import nn

def plain():
    return nn.Linear(1, 1)

def sized(vocab_size, width=3):
    return nn.Embedding(vocab_size, width)

def demanding(vocab_size, depth):
    return nn.Linear(1, 1)

def wrong():
    return "a model"
"""


@pytest.fixture(autouse=True)
def _on_path(tmp_path, monkeypatch):
    (tmp_path / "users_own_models.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)


def build(function):
    return build_imported(f"users_own_models:{function}", vocab_size=7, num_labels=None, end_id=0)


def test_a_function_gets_what_it_declares():
    assert build("sized").weight.shape == (7, 3)
    assert build("plain").in_features == 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("missing", "cannot be imported .*has no attribute 'missing'.*PYTHONPATH"),
        (
            "demanding",
            r"demanding\(vocab_size, depth\)` cannot be called with vocab_size, num_labels, end_id .*'depth'",
        ),
        ("wrong", "returned a str, not an nn.Module"),
    ],
)
def test_faults_are_named(function, message):
    with pytest.raises(JobError, match=message):
        build(function)


def test_a_missing_module_is_named():
    with pytest.raises(JobError, match="No module named 'no_such_module'"):
        build_imported("no_such_module:build")
