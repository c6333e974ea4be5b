"""A pytest plugin for upstream's tests: every `Trainer` trains, evaluates and predicts with the adapter.

python -m pytest -p upstream_plugin tests/trainer/test_trainer.py        # in a checkout of transformers
"""

from functools import wraps

import pytest
import transformers

import plimsoll

NAMES = ("train", "evaluate", "predict")


def protecting(original):
    """Return the same method, protected unless its caller already is."""

    @wraps(original)
    def method(self, *arguments, **options):
        if vars(self).get("_is_protected_by_plimsoll"):
            return original(self, *arguments, **options)
        self._is_protected_by_plimsoll = True
        try:
            with plimsoll.transformers.protected(self):
                return original(self, *arguments, **options)
        finally:
            del self._is_protected_by_plimsoll

    return method


@pytest.hookimpl
def pytest_configure():
    for name in NAMES:
        setattr(transformers.Trainer, name, protecting(vars(transformers.Trainer)[name]))
