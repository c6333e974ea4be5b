"""LoRA adapters, merged into the weights of a model by peft's ``merge_and_unload``.

Layers are merged one by one. Memory holds the model, the adapter and the merged change of one weight at a time.

An adapter that was trained on another checkpoint is not detected, because it contains only the name of its base model.
An adapter whose layers are missing in the model, or have other shapes, raises an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from plimsoll.errors import WeightsError

_MISSING = "Found missing adapter keys"  # peft only warns about missing keys


def with_adapters(model: nn.Module, folders: Sequence[Path]) -> nn.Module:
    """Merge adapters into a model in the given order, and return the model. Its weights are changed in place.

    Raises:
        WeightsError: if a folder holds no adapter, or the adapter does not fit the model.
    """
    for folder in folders:
        model = _with_adapter(model, Path(folder))
    return model


def _with_adapter(model: Any, folder: Path) -> nn.Module:
    if not (folder / "adapter_config.json").is_file():
        raise WeightsError(f"{folder} has no adapter_config.json: give a folder that peft's `save_pretrained` wrote")
    try:
        from peft import PeftModel
    except ImportError as error:
        raise WeightsError(f"merging {folder} needs peft ({error}): install it with `pip install peft`") from None
    with warnings.catch_warnings():
        warnings.filterwarnings("error", _MISSING)
        try:
            wrapped: Any = PeftModel.from_pretrained(model, folder)
        except (ValueError, RuntimeError, KeyError, TypeError, OSError, UserWarning) as error:
            raise WeightsError(
                f"the adapter {folder} does not fit {type(model).__name__} ({' '.join(str(error).split())[:400]}): "
                "give the checkpoint that it was trained on"
            ) from None
    merged: nn.Module = wrapped.merge_and_unload()
    if hasattr(merged, "peft_config"):
        del merged.peft_config  # otherwise the model would be saved as an adapter
    return merged
