"""Models made by a user's function, named ``module:function``.

The function may declare parameters named ``vocab_size``, ``num_labels`` (``None`` for language modeling) and
``end_id``. It returns an ``nn.Module`` that is called like a Hugging Face model. The model itself is not checked.
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
    """Call a user's function, ``module:function``, with each of the ``facts`` that it declares as a parameter.

    Raises:
        JobError: if the module or function does not exist, needs other arguments, or returns something other than a
            model.
    """
    model = find_imported(name, **facts)()
    if not isinstance(model, nn.Module):
        raise JobError(f"model: `{name}` returned a {type(model).__name__}, not an nn.Module: return the model")
    return model


def find_imported(name: str, **facts: Any) -> Callable[[], Any]:
    """Return a user's function, ``module:function``, with the ``facts`` that it declares already bound to it.

    Raises:
        JobError: if the module or function does not exist, or needs other arguments.
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
