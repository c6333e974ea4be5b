"""A model made by the user's own function, named ``module:function``.

The function takes ``vocab_size``, ``num_labels`` (``None`` for language modeling) and ``end_id`` by name, as many of
them as it declares, and returns an ``nn.Module`` that is called as the Hugging Face models are. It does NOT cover a
check of the model itself: what it computes and whether it fits the text is the user's.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from plimsoll.errors import JobError


def build_imported(name: str, **facts: Any) -> nn.Module:
    """Call the function ``module:function`` with those of the ``facts`` that it takes.

    Raises:
        JobError: if there is no such module or function, it needs other arguments, or it returns something else.
    """
    model = find_imported(name, **facts)()
    if not isinstance(model, nn.Module):
        raise JobError(f"model: `{name}` returned a {type(model).__name__}, not an nn.Module: return the model")
    return model


def find_imported(name: str, **facts: Any) -> Callable[[], Any]:
    """Find the function ``module:function`` and return it with those of the ``facts`` that it takes, not called.

    Raises:
        JobError: if there is no such module or function, or it needs other arguments.
    """
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise JobError(
            f"model: `{name}` cannot be imported ({error}): put its folder on the path, e.g. PYTHONPATH=. plimsoll ..."
        ) from None
    signature = inspect.signature(function)
    taken = {key: value for key, value in facts.items() if key in signature.parameters}
    try:
        signature.bind(**taken)
    except TypeError as error:
        raise JobError(
            f"model: `{name}{signature}` cannot be called with {', '.join(facts)} ({error}): give the rest defaults"
        ) from None
    return partial(function, **taken)
