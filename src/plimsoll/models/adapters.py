"""LoRA adapters of peft merged into the weights of a model, by peft itself: bitwise its ``merge_and_unload``.

A layer is merged after the other, so that beside the model there are the adapter and the change of one weight.

It does NOT check that an adapter was trained on this very checkpoint: nothing in it says so but a name. One whose
layers are not in the model, or are of other shapes, is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from plimsoll.errors import WeightsError

_MISSING = "Found missing adapter keys"  # peft only warns of it


def with_adapters(model: nn.Module, folders: Sequence[Path]) -> nn.Module:
    """Merge adapters into a model, one after the other, and return it; its weights are changed in place.

    Raises:
        WeightsError: if a folder holds no adapter, or one of another model.
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
        del merged.peft_config  # which would make the model save itself as an adapter
    return merged
