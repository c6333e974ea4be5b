"""Functions that save, restore and join the effects of a pass of a LightningModule: logs, metrics and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from plimsoll.step.result import at_least_fp32


def remember(results: Any, metrics: Sequence[Metric]) -> Callable[[], None]:
    """Save Lightning's logged results and the states of metrics, and return a function that restores them.

    Args:
        results: Lightning's results, by key.
        metrics: torchmetrics objects whose states are restored.
    """
    # Only the states of metrics are changed in place, so only they are copied.
    logged = {key: (result, dict(result.__dict__)) for key, result in results.items()}
    return partial(_put_back, results, logged, [(metric, state_of(metric)) for metric in metrics])


def _put_back(
    results: Any,
    logged: dict[str, tuple[Metric, dict[str, Any]]],
    metrics: list[tuple[Metric, dict[str, Any]]],
) -> None:
    for key in [key for key in results if key not in logged]:
        del results[key]
    for result, attributes in logged.values():
        result.__dict__.clear()
        result.__dict__.update(attributes)
    for metric, state in metrics:
        metric.__dict__.update(_copied(state))


def state_of(metric: Metric) -> dict[str, Any]:
    """Return a copy of the state of a metric."""
    names = (*metric._defaults, "_update_count", "_computed", "_forward_cache")
    return _copied({name: getattr(metric, name) for name in names})


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    def copied(value: Any) -> Any:
        if isinstance(value, list):
            return [copied(one) for one in value]
        return value.detach().clone() if isinstance(value, Tensor) else value

    return {name: copied(value) for name, value in state.items()}


def mean(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Return the mean of values, weighted by their shares."""
    total = sum(shares)
    return torch.stack(
        [at_least_fp32(value) * (share / total) for value, share in zip(values, shares, strict=True)]
    ).sum(0)


def joined_values(values: Sequence[Any], shares: Sequence[float], sizes: Sequence[int]) -> Any:
    """Join the outputs of passes: concatenate tensors with one row per sample, and average scalars.

    Mappings are joined value by value. For any other type, the output of the last pass is returned.

    Args:
        values: the output of each pass.
        shares: the weight of each pass.
        sizes: the number of samples in each pass.
    """
    if len(values) == 1:
        return values[0]
    if all(isinstance(value, Mapping) for value in values):
        names = values[-1].keys()
        return {name: joined_values([one.get(name) for one in values], shares, sizes) for name in names}
    if not all(isinstance(value, Tensor) for value in values):
        return values[-1]
    if all(value.ndim == 0 for value in values):
        return mean(values, shares)
    if all(value.ndim and len(value) == size for value, size in zip(values, sizes, strict=True)):
        return torch.cat([*values])
    return values[-1]
