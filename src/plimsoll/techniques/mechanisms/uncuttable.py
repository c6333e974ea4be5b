"""Reasons to keep a batch whole: modules whose results would change if a batch or a sequence were split.

BatchNorm computes statistics of all samples of a pass; a user may allow statistics of a micro-batch
(``recut_batch_norm``). An embedding with ``scale_grad_by_freq`` divides a row's gradient by the row's count in the
pass. In a micro-batch the count differs, as in ordinary gradient accumulation, and this cannot be corrected afterwards.
So it is refused.

A loss that does not add up over micro-batches keeps a batch whole, too. `plimsoll.step.losses.additive` tests this by
computing the loss, and records the reason in ``workload.kept_whole``.

Not detected: calls of ``functional.embedding`` with ``scale_grad_by_freq``.
"""

from __future__ import annotations

from torch import nn

from plimsoll.models.workload import Reason, Workload

_BATCH_NORM = Reason(
    "BatchNorm's statistics depend on the cut",
    "allow it with recut_batch_norm=True (job.yaml: allow: [recut_batch_norm])",
)
_COUNTED_ROWS = Reason(
    "an embedding with scale_grad_by_freq divides gradients by a row's count in a pass, which depends on the cut",
    "leave scale_grad_by_freq out of the model",
)


class WholeBatch:
    """The reasons why the batches of a training must not be split, if any.

    Args:
        workload: the training.
        recut_batch_norm: whether the user allows statistics of micro-batches.
    """

    def __init__(self, workload: Workload, recut_batch_norm: bool) -> None:
        self._workload, model = workload, workload.model
        modules = () if recut_batch_norm else model.modules()
        self._batch_norms = [module for module in modules if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        self._counting = _counting_embeddings(model)

    def reason(self, *, also_idle: bool = False) -> Reason | None:
        """Return the reason to keep a batch whole; ``None`` if it may be split.

        Args:
            also_idle: whether to include modules that are in evaluation mode now.
        """
        if any(module.training or also_idle for module in self._batch_norms):
            return _BATCH_NORM
        return _COUNTED_ROWS if _are_trained(self._counting) else self._workload.kept_whole


def counts_rows(model: nn.Module) -> Reason | None:
    """Return the reason why a model's gradients depend on the other samples in a pass; ``None`` if they do not."""
    return _COUNTED_ROWS if _are_trained(_counting_embeddings(model)) else None


def _counting_embeddings(model: nn.Module) -> list[nn.Embedding | nn.EmbeddingBag]:
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return [embedding for embedding in embeddings if embedding.scale_grad_by_freq]


def _are_trained(embeddings: list[nn.Embedding | nn.EmbeddingBag]) -> bool:
    return any(embedding.weight.requires_grad for embedding in embeddings)
