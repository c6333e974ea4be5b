"""The smallest weights of each linear layer become zero. The search never tries this, since it saves nothing.

Zeros are stored and multiplied like any number. The weights are selected by torch's ``prune.l1_unstructured`` within
each layer, and zeroed permanently. Not handled: the head, embeddings, recurrent layers, and torch's sparse formats. On
the CPU, sparse formats are slower than dense tensors unless some 90 % of the weights are zeros.
"""

from __future__ import annotations

from typing import Any

from torch.nn.utils import prune

from plimsoll.compression.base import Bundle, Calibration, Shrinker
from plimsoll.compression.layers import dense_layers, why_no_zeros
from plimsoll.records.plan import Choice
from plimsoll.records.shrink import options_of


class Unstructured(Shrinker):
    """Zeros without a pattern."""

    name = "unstructured"
    saves = (
        "nothing: zeros are stored and multiplied like any number, 0 bytes of the file, 0 bytes of memory, 0 seconds; "
        "only a compressed archive (zip) of the file becomes smaller"
    )

    def worth_trying(self, bundle: Bundle) -> str:
        """Return why the search does not try this method: zeros alone save nothing."""
        return f"{self.name} saves {self.saves}: ask for {self.name}(share=0.5) by name if you want the zeros"

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why weights cannot be set to zero; ``None`` if they can."""
        return why_no_zeros(bundle, choice)

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Set the share ``share`` of each linear layer's weights to zero: the smallest by absolute value."""
        share: Any = options_of(choice)["share"]
        for layer in dense_layers(bundle.model).values():
            if not layer.weight.is_meta:
                prune.l1_unstructured(layer, "weight", share)  # type: ignore[no-untyped-call]
                prune.remove(layer, "weight")  # type: ignore[no-untyped-call]
