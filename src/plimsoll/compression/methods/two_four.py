"""2:4 sparsity: the two smallest of every four weights in a row become zero, a pattern that some GPUs multiply faster.

The saved weights stay dense. On a GPU of compute capability 8.0 or more, the user can call
``torch.sparse.to_sparse_semi_structured``, which converts such a 16-bit weight to about half the bytes. Not handled:
the head, embeddings and recurrent layers.
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
    """Zeros in the 2:4 pattern."""

    name = "two_four"
    saves = (
        "nothing by itself: zeros are stored and multiplied like any number, 0 bytes and 0 seconds; on a GPU of "
        "compute capability 8.0 or more torch.sparse.to_sparse_semi_structured then halves the linear weights"
    )

    def worth_trying(self, bundle: Bundle) -> str:
        """Return why the search does not try this method: the zeros alone save nothing."""
        return f"{self.name} saves {self.saves}: ask for {self.name} by name if you want the zeros"

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why weights cannot be set to zero; ``None`` if they can.

        At least one layer, for example, must have a multiple of four inputs.
        """
        fault = why_no_zeros(bundle, choice)
        if fault is None and not _of_fours(bundle.model):
            widths = sorted({sizes_of(one)[0] for one in dense_layers(bundle.model).values()})
            return f"{choice.in_full}: no linear layer has a multiple of {_GROUP} inputs ({widths}): use another method"
        return fault

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Set the two smallest of every four weights to zero, by absolute value."""
        with torch.no_grad():
            for layer in _of_fours(bundle.model).values():
                if not layer.weight.is_meta:
                    _thin_out(layer.weight if isinstance(layer, nn.Linear) else layer.weight.t())


def _of_fours(model: Any) -> dict[str, Any]:
    return {name: one for name, one in dense_layers(model).items() if sizes_of(one)[0] % _GROUP == 0}


def _thin_out(weight: Tensor) -> None:
    """Set the two smallest of every four weights of each row to zero, in place. Of equal weights, keep the first.

    ``weight`` is (out, in); a row has the weights of one output.
    """
    fours = weight.reshape(-1, _GROUP)
    smallest = fours.abs().sort(dim=1, stable=True, descending=True).indices[:, _GROUP // 2 :]
    weight.copy_(fours.scatter(1, smallest, 0).view(weight.shape))
