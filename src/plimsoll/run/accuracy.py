"""The accuracy of a classifier, counted while its loss is evaluated: no second pass over the samples.

A batch that runs out of memory is evaluated once more in smaller pieces. So of a batch only the last passes count,
those that together saw each of its samples. Does NOT cover models that return no ``logits``: of these it is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from plimsoll.workload import batch_size_of


class Accuracy:
    """The share of samples whose largest logit is that of their label; counts while the block runs."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._num_samples = 0
        self._num_right = 0
        self._passes: list[tuple[int, Tensor]] = []

    def __enter__(self) -> Accuracy:
        self._hook = self._model.register_forward_hook(self._note, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def counted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches; by the time the next is asked for, what the model made of the last is counted."""
        for batch in batches:
            self._passes.clear()
            yield batch
            self._count(batch_size_of(batch))

    def share(self) -> float | None:
        """The accuracy over all batches; ``None`` if the model returned no logits."""
        return self._num_right / self._num_samples if self._num_samples else None

    def _note(self, _model: nn.Module, _positional: Any, named: dict[str, Any], output: Any) -> None:
        logits_BL, labels_B = getattr(output, "logits", None), named.get("labels")
        if logits_BL is not None and labels_B is not None:
            self._passes.append((len(labels_B), (logits_BL.argmax(dim=-1) == labels_B).sum()))

    def _count(self, num_left: int) -> None:
        while self._passes and num_left > 0:
            num_samples, num_right = self._passes.pop()
            num_left -= num_samples
            self._num_samples += num_samples
            self._num_right += int(num_right)
