"""Which samples of a batch tell most about a loss: those that differ most, and for each of them one that is like it.

Samples differ in their labels, in how much of them is padding, mask or ignored label, and in what they are filled with.
A loss of pairs needs both: samples of one label, and of others.

Shapes: B samples, F features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plimsoll.workload import IGNORED_LABEL, batch_size_of, leaves_of, map_leaves

_LABEL_COUNTS = 4.0  # as much as so many other features: samples of one label are to be found next to each other
_MOST_INTEGER = 1 << 62
MOST_VALUES = 64  # distinct ones of a field that are told apart


def telling_rows(batch: Any, num_rows: int) -> list[int]:
    """Return the numbers of up to so many samples; parts of them in this order have samples that differ."""
    num_samples = batch_size_of(batch)
    if num_samples <= num_rows:
        return list(range(num_samples))
    features_BF = _features(batch)
    rows = [int((features_BF - features_BF.mean(0)).square().sum(1).argmax())]
    nearest = (features_BF - features_BF[rows[0]]).square().sum(1)
    while len(rows) < num_rows // 2:
        nearest[rows] = -1.0
        rows.append(int(nearest.argmax()))
        nearest = torch.minimum(nearest, (features_BF - features_BF[rows[-1]]).square().sum(1))
    for row in rows[: num_rows - len(rows)]:
        distances = (features_BF - features_BF[row]).square().sum(1)
        distances[rows] = torch.inf
        rows.append(int(distances.argmin()))
    return rows


def joined_samples(batches: Sequence[Any]) -> Any:
    """Return the samples of several batches as one batch; ``None`` where their fields are not alike."""
    fields = [list(leaves_of(batch)) for batch in batches]
    if any(not isinstance(leaf, Tensor) or not leaf.ndim for one in fields for _, leaf in one):
        return None
    shapes = [[(path, leaf.shape[1:]) for path, leaf in one] for one in fields]
    if any(one != shapes[0] for one in shapes):
        return None
    columns = iter([torch.cat([leaf for _, leaf in column]) for column in zip(*fields, strict=True)])
    return map_leaves(batches[0], lambda _: next(columns))


def kinds_of(batch: Any) -> frozenset[tuple[Any, ...]]:
    """Say what kind of a batch this is: its fields, which of them are filled unevenly, and which labels there are."""
    return frozenset(kind for path, leaf in leaves_of(batch) for kind in _kinds(path, leaf))


def _kinds(path: str, leaf: Any) -> Iterator[tuple[Any, ...]]:
    if isinstance(leaf, list | tuple) and all(isinstance(item, str) for item in leaf):
        yield (path, "names", "")
        yield from ((path, name) for name in set(leaf) if len(set(leaf)) <= MOST_VALUES)
        return
    values = _tensor_of(leaf)
    if values is None:
        yield (path, type(leaf).__name__, "")
        return
    yield (path, str(values.dtype), values.ndim)
    if values.ndim == 1 and not values.is_floating_point():
        distinct = set(values.tolist())
        yield from ((path, value) for value in distinct if len(distinct) <= MOST_VALUES)
    for what in (0, IGNORED_LABEL):
        counts = values.reshape(len(values), -1).eq(what).sum(1)
        if bool((counts != counts[0]).any()):
            yield (path, "uneven", what)


def _features(batch: Any) -> Tensor:
    """Numbers that tell samples apart, each with a mean of 0 and a variance of 1."""
    columns: list[Tensor] = []
    for _, leaf in leaves_of(batch):
        values = _tensor_of(leaf)
        if values is None or values.is_complex():
            continue
        flat = values.detach().reshape(len(values), -1).to("cpu", torch.float64)
        labels = _labels(flat)
        is_one_number = values.ndim == 1 and not values.is_floating_point() and not labels
        columns += [_standard(flat.mean(1)) * (_LABEL_COUNTS if is_one_number else 1.0), *labels]
        columns += [_standard(flat.eq(what).double().sum(1)) for what in (0, IGNORED_LABEL)]
    return torch.stack(columns, 1) if columns else torch.zeros(batch_size_of(batch), 1, dtype=torch.float64)


def _labels(flat: Tensor) -> list[Tensor]:
    """A column for each label of a sample, so that one that is rare is far from all others; none where none are."""
    if not 0 < flat.shape[1] <= MOST_VALUES:
        return []
    if flat.shape[1] == 1:
        values = set(flat[:, 0].tolist())
        columns = (
            [flat[:, 0] == value for value in sorted(values)] if len(values) <= min(MOST_VALUES, len(flat) // 2) else []
        )
    else:
        columns = list(flat.unbind(1)) if bool(((flat == 0) | (flat == 1)).all()) else []
    weight = _LABEL_COUNTS * (2 / len(columns)) ** 0.5 if columns else 0.0
    return [_standard(column.double()) * weight for column in columns]


def _tensor_of(leaf: Any) -> Tensor | None:
    """A field that has numbers for each sample, or names, each with a number of its own."""
    if isinstance(leaf, list | tuple) and all(isinstance(item, str) for item in leaf):
        numbers = {name: number for number, name in enumerate(sorted(set(leaf)))}
        return torch.tensor([numbers[name] for name in leaf])
    if isinstance(leaf, list | tuple) and all(isinstance(item, int | float) for item in leaf):
        is_small = all(abs(item) < _MOST_INTEGER for item in leaf)
        return torch.tensor(leaf) if is_small else None
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
        return torch.as_tensor(leaf)
    return leaf if isinstance(leaf, Tensor) and leaf.ndim else None


def _standard(column: Tensor) -> Tensor:
    column = torch.nan_to_num(column) - torch.nan_to_num(column).mean()
    spread = column.square().mean().sqrt()
    return column / spread if spread > 0 else torch.zeros_like(column)
