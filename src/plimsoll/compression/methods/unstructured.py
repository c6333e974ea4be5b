"""The smallest weights of each linear layer become zero: done when it is asked for by name, since it saves nothing.

Zeros are stored and multiplied like any number. Magnitude within each layer is torch's ``prune.l1_unstructured``, made
permanent. Does NOT cover the head, embeddings and recurrent layers, and makes no tensor of torch's sparse formats: on
the CPU these are slower than dense ones below some 90 % of zeros.
"""

from __future__ import annotations

from typing import Any

from torch.nn.utils import prune

from plimsoll.compression.base import Bundle, Calibration, Shrinker
from plimsoll.compression.layers import dense_layers, why_no_zeros
from plimsoll.records.plan import Choice
from plimsoll.records.shrink import options_of


class Unstructured(Shrinker):
    """See the module."""

    name = "unstructured"
    saves = (
        "nothing: zeros are stored and multiplied like any number, 0 bytes of the file, 0 bytes of memory, 0 seconds; "
        "only what packs the file (zip) makes it smaller"
    )

    def worth_trying(self, bundle: Bundle) -> str:
        """Return why it is not worth it."""
        return f"{self.name} saves {self.saves}: ask for {self.name}(share=0.5) by name if you want the zeros"

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Refuse shares that leave all or nothing, and models without linear layers."""
        return why_no_zeros(bundle, choice)

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Set the share of each layer that is smallest to zero."""
        share: Any = options_of(choice)["share"]
        for layer in dense_layers(bundle.model).values():
            if not layer.weight.is_meta:
                prune.l1_unstructured(layer, "weight", share)  # type: ignore[no-untyped-call]
                prune.remove(layer, "weight")  # type: ignore[no-untyped-call]
