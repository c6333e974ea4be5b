"""Accuracy and entity F1 of a tagger, counted while its loss is evaluated (`plimsoll.training.answers`).

Each word is counted once. If the windows of a long text overlap, a word counts in the window in which it is farther
from an edge; the labels mark it (`plimsoll.data.samples.texts`). Entities may cross windows, so a text is scored after
all of its windows. If windows arrive in order, at most the texts of a batch are kept in memory. Does NOT handle models
that return no ``logits``: both metrics are unknown.

Shapes: B samples of a batch, T tokens, L tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from plimsoll.data.samples.tags import OUTSIDE, are_of_entities
from plimsoll.data.samples.windows import IGNORED_LABEL
from plimsoll.distributed.ranks import Ranks
from plimsoll.step.oom_boundary import Position
from plimsoll.training.answers import Answered, Answers, Windows

Entity = tuple[str, int, int]
"""The type of an entity, the index of its first word, and the index after its last word."""

_BEGINS, _ENDS = {"B", "S"}, {"E", "S"}


class _Window(NamedTuple):
    """The tags of the words that are counted in one window.

    ``number`` is the number of the window in the data set. ``right`` and ``predicted`` are the numbers of the correct
    and the predicted tags, (words,) int64.
    """

    number: int
    right: NDArray[np.int64]
    predicted: NDArray[np.int64]


class TagScores(Answers):
    """The accuracy of words and F1 score of entities, counted inside a ``with`` block.

    Args:
        model: a model that returns ``logits``, (B, T, L).
        position: holds the indices, in the batch, of the samples that the model is evaluating.
        names: names of the tags, by number.
        windows: maps samples to texts; ``None`` if each sample is a text.
        ranks: processes that share each batch; each of them counts all samples.
    """

    def __init__(
        self,
        model: nn.Module,
        position: Position,
        names: Sequence[str],
        windows: Windows | None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(model, position, ranks)
        self._names, self._windows = names, windows
        self._has_entities = are_of_entities(names)
        self._open: dict[int, list[_Window]] = {}  # of texts whose windows have not all been seen
        self._num_words = self._num_right = 0
        self._num_entities = self._num_found = self._num_right_entities = 0

    def accuracy(self) -> float | None:
        """Return the share of words with the correct tag, from 0 to 1; ``None`` without words or logits."""
        return self._num_right / self._num_words if self._num_words else None

    def entity_f1(self) -> float | None:
        """Return the F1 score of entities, from 0 to 1; ``None`` if tags do not mark entities, or no entities exist."""
        num_both = self._num_entities + self._num_found
        return 2 * self._num_right_entities / num_both if num_both else None

    def _answers_of(self, logits_BTL: Tensor) -> Tensor:
        return logits_BTL.argmax(dim=-1)  # the predicted tags

    def _count(self, answered: Sequence[Answered]) -> None:
        ids = np.array([one.sample_id for one in answered])
        texts = ids if self._windows is None else self._windows.parents(ids)
        nums = np.ones(len(texts), np.int64) if self._windows is None else self._windows.num_of_parents(texts)
        for (sample_id, labels_T, predicted_T), text, num in zip(answered, texts.tolist(), nums.tolist(), strict=True):
            own_T = labels_T[: len(predicted_T)]  # longer than the predictions if padding was removed
            is_word_T = own_T != IGNORED_LABEL
            window = _Window(sample_id, own_T[is_word_T].numpy(), predicted_T[is_word_T].numpy())
            windows = self._open.setdefault(text, [])
            windows.append(window)
            if len(windows) == num:
                self._judge(sorted(self._open.pop(text), key=lambda one: one.number))

    def _judge(self, windows: list[_Window]) -> None:
        """Count the words and entities of a complete text."""
        right = np.concatenate([window.right for window in windows])
        predicted = np.concatenate([window.predicted for window in windows])
        self._num_words += len(right)
        self._num_right += int(np.count_nonzero(right == predicted))
        if self._has_entities:
            entities, found = (entities_of([self._names[tag] for tag in tags.tolist()]) for tags in (right, predicted))
            self._num_entities += len(entities)
            self._num_found += len(found)
            self._num_right_entities += len(entities & found)


def entities_of(tags: Sequence[str]) -> set[Entity]:
    """Return the entities in a sequence of tags, as the script conlleval of the CoNLL shared tasks reads them.

    An entity begins with B or S, or with I or E if no entity of that type is open. It ends with E or S, or before a tag
    that does not continue it.
    """
    entities: set[Entity] = set()
    kind, begin = "", 0
    for place, tag in enumerate([*tags, OUTSIDE]):
        prefix, _, own_kind = tag.partition("-")
        goes_on = prefix != OUTSIDE and prefix not in _BEGINS and own_kind == kind
        if kind and not goes_on:
            entities.add((kind, begin, place))
            kind = ""
        if prefix != OUTSIDE and not kind:
            kind, begin = own_kind, place
        if prefix in _ENDS:
            entities.add((kind, begin, place + 1))
            kind = ""
    return entities
