"""Of four weights in a row of a linear layer the two smallest become zero: the pattern that some GPUs multiply faster.

What is saved stays dense. On a GPU of compute capability 8.0 or more ``torch.sparse.to_sparse_semi_structured`` makes
of such a weight, in 16 bits, one of half the bytes: that is left to who runs it there. Does NOT cover the head,
embeddings and recurrent layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.compression.base import Bundle, Calibration, Shrinker
from plimsoll.compression.layers import dense_layers, why_no_zeros
from plimsoll.records.plan import Choice
from plimsoll.weights.structure import sizes_of

_GROUP = 4


class TwoFour(Shrinker):
    """See the module."""

    name = "two_four"
    saves = (
        "nothing by itself: zeros are stored and multiplied like any number, 0 bytes and 0 seconds; on a GPU of "
        "compute capability 8.0 or more torch.sparse.to_sparse_semi_structured then halves the linear weights"
    )

    def worth_trying(self, bundle: Bundle) -> str:
        """Return why it is not worth it."""
        return f"{self.name} saves {self.saves}: ask for {self.name} by name if you want the zeros"

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Refuse models none of whose layers has rows of fours."""
        fault = why_no_zeros(bundle, choice)
        if fault is None and not _of_fours(bundle.model):
            widths = sorted({sizes_of(one)[0] for one in dense_layers(bundle.model).values()})
            return (
                f"{choice.in_full}: no linear layer reads a multiple of {_GROUP} numbers ({widths}): use another method"
            )
        return fault

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Set the two smallest of each four to zero."""
        with torch.no_grad():
            for layer in _of_fours(bundle.model).values():
                if not layer.weight.is_meta:
                    _thin_out(layer.weight if isinstance(layer, nn.Linear) else layer.weight.t())


def _of_fours(model: Any) -> dict[str, Any]:
    return {name: one for name, one in dense_layers(model).items() if sizes_of(one)[0] % _GROUP == 0}


def _thin_out(weight: Tensor) -> None:
    """Write zeros into a weight, (out, in); of equals the first stay."""
    fours = weight.reshape(-1, _GROUP)
    smallest = fours.abs().sort(dim=1, stable=True, descending=True).indices[:, _GROUP // 2 :]
    weight.copy_(fours.scatter(1, smallest, 0).view(weight.shape))
