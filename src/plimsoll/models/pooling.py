"""Pooling of token vectors to one vector for each text, as in sentence-transformers.

The modes have the names and arithmetic of the ``Pooling`` module of that library. Sums of half-precision vectors are
float32. The vectors of several modes are concatenated in the same order. The modes are read from the ``config.json`` of
the pooling module, which ``modules.json`` names.

Not handled, each with an error: modules after pooling other than ``Normalize`` (``Dense``), prompts that are excluded
from pooling, and sparse or multi-vector models.

Shapes: B texts, T tokens, D features.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from plimsoll.errors import JobError

MODULES_FILE = "modules.json"

_FEWEST_TOKENS = 1e-9  # divisor of sentence_transformers.Pooling for a text without tokens


class Pooling(NamedTuple):
    """The pooling modes, whose vectors are concatenated, and whether the result is scaled to the norm 1."""

    modes: tuple[str, ...] = ("mean",)
    is_normalized: bool = False


def pool(hidden_BTD: Tensor, mask_BT: Tensor, pooling: Pooling) -> Tensor:
    """Return one float32 vector for each text: (B, D), or (B, D * number of modes)."""
    pooled = torch.cat([_MODES[mode](hidden_BTD, mask_BT).float() for mode in pooling.modes], dim=-1)
    return functional.normalize(pooled, p=2, dim=1) if pooling.is_normalized else pooled


def pooling_of(folder: Path) -> Pooling:
    """Read the pooling of a sentence-transformers folder. A folder without ``modules.json`` uses the mean.

    Raises:
        JobError: if a file cannot be read, or the folder needs an unsupported module.
    """
    if not (folder / MODULES_FILE).is_file():
        return Pooling()
    modules = [(str(module["type"]).rpartition(".")[2], folder / module["path"]) for module in _read_modules(folder)]
    names = [name for name, _ in modules]
    if names[:2] != ["Transformer", "Pooling"] or names[2:] not in ([], ["Normalize"]):
        raise JobError(
            f"model: {folder / MODULES_FILE} lists {', '.join(names)}, but only Transformer, Pooling and Normalize "
            "are supported: use sentence_transformers for this model"
        )
    return Pooling(_modes_of(modules[1][1] / "config.json"), "Normalize" in names)


def _read_modules(folder: Path) -> list[dict[str, Any]]:
    modules = _read_json(folder / MODULES_FILE)
    if not isinstance(modules, list) or not all(
        isinstance(one, dict) and {"type", "path"} <= set(one) for one in modules
    ):
        raise JobError(
            f"model: {folder / MODULES_FILE} is not a list of modules with a type and a path: download the model again"
        )
    return modules


def _modes_of(path: Path) -> tuple[str, ...]:
    config = _read_json(path)
    if not isinstance(config, dict):
        raise JobError(f"model: {path} is not a JSON object: download the model again")
    modes = config.get("pooling_mode") or tuple(mode for name, mode in _OLD_NAMES.items() if config.get(name)) or "mean"
    modes = (modes,) if isinstance(modes, str) else tuple(modes)
    if unknown := [mode for mode in modes if mode not in _MODES]:
        raise JobError(
            f"model: {path} pools by {unknown[0]!r}, but only {', '.join(_MODES)} are supported: use another model"
        )
    return modes


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JobError(f"model: {path} cannot be read ({error}): download or save the model again") from None


def _first(hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    return _at(hidden_BTD, mask_BT.to(torch.int).argmax(dim=1))


def _last(hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    places_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    return _at(hidden_BTD, (mask_BT.to(torch.int) * places_T).argmax(dim=1))


def _at(hidden_BTD: Tensor, places_B: Tensor) -> Tensor:
    return hidden_BTD.gather(1, places_B[:, None, None].expand(-1, 1, hidden_BTD.shape[2])).squeeze(1)


def _largest(hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    return hidden_BTD.masked_fill(mask_BT[:, :, None] == 0, float("-inf")).amax(dim=1)


def _sums(hidden_BTD: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    mask_BT1 = mask_BT[:, :, None].to(hidden_BTD.dtype)
    sums_BD = (hidden_BTD * mask_BT1).sum(dim=1, dtype=torch.float32)
    return sums_BD, mask_BT1.sum(dim=1, dtype=torch.float32).clamp(min=_FEWEST_TOKENS)


def _mean(hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    sums_BD, num_B1 = _sums(hidden_BTD, mask_BT)
    return sums_BD / num_B1


def _mean_by_root(hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    sums_BD, num_B1 = _sums(hidden_BTD, mask_BT)
    return sums_BD / num_B1.sqrt()


def _weighted_mean(hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    places_T = torch.arange(1, mask_BT.shape[1] + 1, device=mask_BT.device, dtype=torch.float32)
    weights_BT1 = (mask_BT * places_T)[:, :, None]
    return (hidden_BTD * weights_BT1).sum(dim=1) / weights_BT1.sum(dim=1).clamp(min=_FEWEST_TOKENS)


_MODES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": _first,
    "max": _largest,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_by_root,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}

_OLD_NAMES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The pooling mode of each setting in sentence-transformers before version 6, in the order of concatenation."""
