"""The choice of samples that show best whether a loss is additive: very different samples, each with a similar one.

Samples differ in their labels, and in the amount and the values of fillers: padding, masks and ignored labels. A loss
over pairs needs both samples with equal labels and samples with different labels.

Shapes: B samples, F features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plimsoll.data.batch import IGNORED_LABEL, batch_size_of, leaves_of, map_leaves

_LABEL_COUNTS = 4.0  # the weight of a label relative to other features, so that samples with equal labels are close
_MOST_INTEGER = 1 << 62
_MOST_COUNTED = 1 << 16
_MOST_TRIED = 4  # samples of a label, until one has a target
_SHARE_OF_EDGES = 4  # a value at the edge of one in four samples counts as common
MOST_VALUES = 64  # values of a field that are distinguished
MOST_FILLERS = 16


def telling_rows(batch: Any, num_rows: int, first: Sequence[int] = ()) -> list[int]:
    """Choose up to ``num_rows`` samples of a batch. Return their indices, ordered so that neighbours differ.

    ``first`` are indices of samples that must be chosen, at most half of ``num_rows``.
    """
    num_samples = batch_size_of(batch)
    if num_samples <= num_rows:
        return [*first, *(row for row in range(num_samples) if row not in first)]
    features_BF = _features(batch)
    rows = [*first] or [int((features_BF - features_BF.mean(0)).square().sum(1).argmax())]
    nearest = torch.stack([(features_BF - features_BF[row]).square().sum(1) for row in rows]).amin(0)
    while len(rows) < max(num_rows // 2, len(first) + num_rows // 4):
        nearest[rows] = -1.0
        rows.append(int(nearest.argmax()))
        nearest = torch.minimum(nearest, (features_BF - features_BF[rows[-1]]).square().sum(1))
    for row in rows[: num_rows - len(rows)]:
        distances = (features_BF - features_BF[row]).square().sum(1)
        distances[rows] = torch.inf
        rows.append(int(distances.argmin()))
    return rows


def joined_samples(batches: Sequence[Any]) -> Any:
    """Return the samples of several batches as one batch; ``None`` if their fields differ."""
    fields = [list(leaves_of(batch)) for batch in batches]
    if any(not isinstance(leaf, Tensor) or not leaf.ndim for one in fields for _, leaf in one):
        return None
    shapes = [[(path, leaf.shape[1:]) for path, leaf in one] for one in fields]
    if any(one != shapes[0] for one in shapes):
        return None
    columns = iter([torch.cat([leaf for _, leaf in column]) for column in zip(*fields, strict=True)])
    return map_leaves(batches[0], lambda _: next(columns))


class Kinds:
    """A record of the properties (kinds) of batches whose losses have been compared.

    A batch needs a new comparison if it has a kind that no earlier batch had. A kind is a tuple that begins with the
    path of a field. It names the field's dtype and dimensions, a filler, or a label that occurs in the field. Callers
    may add kinds without a field, such as the mode of the model.

    A field whose number of distinct values keeps growing holds no labels, but sample numbers or token ids, for example.
    So at most `MOST_VALUES` labels and `MOST_FILLERS` fillers are distinguished in a field.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[Any, ...]] = set()
        self._without_labels: set[str] = set()

    def new_in(self, batch: Any, *others: tuple[Any, ...]) -> frozenset[tuple[Any, ...]]:
        """Return the kinds in a batch and in ``others`` that have not been compared yet.

        A kind that is a label is a pair ``(field, label)``. Every other kind has three items.
        """
        found = set(others)
        for path, leaf in leaves_of(batch):
            filled = set(_kinds(path, leaf))
            is_told = sum(kind[:2] == (path, "uneven") for kind in self._seen | filled) <= MOST_FILLERS
            found |= {kind for kind in filled if is_told or kind[1] != "uneven"}
            if path in self._without_labels:
                continue
            labels = _labels_in(leaf)
            known = {kind for kind in self._seen if kind[0] == path and len(kind) == 2}
            if labels is None or len(known | {(path, label) for label in labels}) > MOST_VALUES:
                self._without_labels.add(path)
            else:
                found |= {(path, label) for label in labels}
        return frozenset(found - self._seen)

    def note(self, kinds: frozenset[tuple[Any, ...]], compared: Any = None, *, is_own: bool = True) -> None:
        """Mark kinds as seen after samples were compared. A label that no compared sample has stays new.

        All kinds are marked if ``compared`` is ``None``, because nothing could be compared. All are also marked if the
        samples are from this batch (``is_own``) and have no new label, so that the check is not repeated forever.
        """
        labels = [kind for kind in kinds if len(kind) == 2]
        absent = {kind for kind, rows in rows_with(compared, labels) if not rows} if compared is not None else set()
        self._seen |= kinds if is_own and len(absent) == len(labels) else kinds - absent

    def forget(self) -> None:
        """Mark every kind as new again."""
        self._seen.clear()


def rows_with(batch: Any, kinds: Iterable[tuple[Any, ...]]) -> Iterator[tuple[tuple[Any, ...], list[int]]]:
    """Yield each kind that is a label, and the indices of the samples that have this label."""
    fields = dict(leaves_of(batch))
    for kind in kinds:
        if len(kind) == 2:
            leaf, label = fields.get(kind[0]), kind[1]
            if isinstance(label, str):
                yield kind, [row for row, name in enumerate(leaf or ()) if name == label]
                continue
            values = _tensor_of(leaf)
            rows = [] if values is None else _rows_of(values).eq(label).any(1).nonzero().flatten().tolist()
            yield kind, rows


def first_rows(
    batch: Any, kinds: Iterable[tuple[Any, ...]], most: int, is_usable: Callable[[int], bool] = lambda row: True
) -> list[int]:
    """Return the indices of up to ``most`` samples that have labels in ``kinds``, with one sample for each label.

    Samples with the rarest labels are chosen first. ``is_usable`` returns whether a sample may be chosen.
    """
    chosen: list[int] = []
    for _, rows in sorted(rows_with(batch, kinds), key=lambda one: (len(one[1]), one[1])):
        if len(chosen) == most:
            break
        if not set(rows) & set(chosen):
            chosen += [row for row in rows[:_MOST_TRIED] if is_usable(row)][:1]
    return chosen


def _kinds(path: str, leaf: Any) -> Iterator[tuple[Any, ...]]:
    if _is_names(leaf):
        yield (path, "names", "")
        return
    values = _tensor_of(leaf)
    if values is None:
        yield (path, type(leaf).__name__, "")
        return
    yield (path, str(values.dtype), values.ndim)
    rows = _rows_of(values)
    for filler in _fillers(rows):
        counts = rows.eq(filler).sum(1)
        if bool((counts != counts[0]).any()):
            yield (path, "uneven", filler)


def _fillers(rows: Tensor) -> set[float]:
    """Return possible padding: 0, ignored labels, and values that are repeated, or common, at the ends of rows."""
    found: set[float] = {0, IGNORED_LABEL}
    if rows.shape[1] < 3:
        return found
    for edge in (rows[:, :3], rows[:, -3:].flip(1)):
        outer, is_twice = edge[:, 0], edge[:, 0] == edge[:, 1]
        is_thrice = is_twice & (edge[:, 0] == edge[:, 2])
        once, twice, thrice = (Counter(one.tolist()) for one in (outer, outer[is_twice], outer[is_thrice]))
        many = max(2, len(rows) // _SHARE_OF_EDGES)
        found |= {value for value, count in once.items() if thrice[value] or twice[value] > 1 or count >= many}
    return found


def _labels_in(leaf: Any) -> set[Any] | None:
    """Return the values of a field; ``None`` if there are too many, or if floating-point values rarely repeat."""
    if _is_names(leaf):
        names = set(leaf)
        return names if len(names) <= MOST_VALUES else None
    values = _tensor_of(leaf)
    if values is None or values.is_complex() or not values.numel():
        return set()
    if len(set(_rows_of(values)[0, : 4 * MOST_VALUES].tolist())) > MOST_VALUES:
        return None
    distinct = _distinct(values.detach().flatten().to("cpu"))
    most = min(MOST_VALUES, values.numel() // 2) if values.is_floating_point() else MOST_VALUES
    return set(distinct.tolist()) if len(distinct) <= most else None


def _distinct(values: Tensor) -> Tensor:
    is_counted = not values.is_floating_point() and values.dtype != torch.bool
    least, most = (int(one) for one in values.aminmax()) if is_counted else (0, _MOST_COUNTED)
    if most - least < _MOST_COUNTED:
        return torch.bincount((values - least).long()).nonzero().flatten() + least  # many times faster
    distinct: Tensor = torch.unique(values)
    return distinct


def _features(batch: Any) -> Tensor:
    """Return features that distinguish samples (B, F), each with mean 0 and variance 1."""
    columns: list[Tensor] = []
    for _, leaf in leaves_of(batch):
        values = _tensor_of(leaf)
        if values is None or values.is_complex():
            continue
        flat = _rows_of(values.detach()).to("cpu", torch.float64)
        labels = _labels(flat)
        is_one_number = values.ndim == 1 and not values.is_floating_point() and not labels
        columns += [_standard(flat.mean(1)) * (_LABEL_COUNTS if is_one_number else 1.0), *labels]
        columns += [_standard(flat.eq(what).double().sum(1)) for what in sorted(_fillers(flat))[:MOST_FILLERS]]
    return torch.stack(columns, 1) if columns else torch.zeros(batch_size_of(batch), 1, dtype=torch.float64)


def _labels(flat: Tensor) -> list[Tensor]:
    """Return a feature column for each label, weighted so that rare labels set samples apart; empty without labels."""
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
    """Return a field as a tensor with a number for each sample or name; ``None`` if that is impossible."""
    if _is_names(leaf):
        numbers = {name: number for number, name in enumerate(sorted(set(leaf)))}
        return torch.tensor([numbers[name] for name in leaf])
    if isinstance(leaf, list | tuple) and all(isinstance(item, int | float) for item in leaf):
        is_small = all(abs(item) < _MOST_INTEGER for item in leaf)
        return torch.tensor(leaf) if is_small else None
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
        return torch.as_tensor(leaf)
    return leaf if isinstance(leaf, Tensor) and leaf.ndim else None


def _is_names(leaf: Any) -> bool:
    return isinstance(leaf, list | tuple) and all(isinstance(item, str) for item in leaf)


def _rows_of(values: Tensor) -> Tensor:
    return values.flatten(1) if values.ndim > 1 else values[:, None]


def _standard(column: Tensor) -> Tensor:
    column = torch.nan_to_num(column) - torch.nan_to_num(column).mean()
    spread = column.square().mean().sqrt()
    return column / spread if spread > 0 else torch.zeros_like(column)
