"""The smallest weights of each linear layer become zero: done when it is asked for by name, since it saves nothing.

Zeros are stored and multiplied like any number. Magnitude within each layer is torch's ``prune.l1_unstructured``, made
permanent. Does NOT cover the head, embeddings and recurrent layers, and makes no tensor of torch's sparse formats: on
the CPU these are slower than dense ones below some 90 % of zeros.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch.nn.utils import prune

from plimsoll.compression.base import Calibration, Choices, Need, Bundle
from plimsoll.compression.zeros import layers_of, why_no_zeros
from plimsoll.records.plan import Choice
from plimsoll.records.shrink import options_of


class Unstructured:
    """See the module."""

    name: ClassVar[str] = "unstructured"
    title: ClassVar[str] = "the smallest weights are zero"
    saves: ClassVar[str] = (
        "nothing: zeros are stored and multiplied like any number, 0 bytes of the file, 0 bytes of memory, 0 seconds; "
        "only what packs the file (zip) makes it smaller"
    )

    def menu(self, bundle: Bundle) -> Choices | str:
        """Offer nothing, and say why."""
        return f"{self.name} saves {self.saves}: ask for {self.name}(share=0.5) by name if you want the zeros"

    def needs(self, choice: Choice) -> frozenset[Need]:
        """Nothing: the smallest are known by themselves."""
        return frozenset()

    def refusal(self, bundle: Bundle, choice: Choice) -> str | None:
        """Refuse shares that leave all or nothing, and models without linear layers."""
        return why_no_zeros(bundle, choice)

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Set the share of each layer that is smallest to zero."""
        share: Any = options_of(choice)["share"]
        for layer in layers_of(bundle.model).values():
            if not layer.weight.is_meta:
                prune.l1_unstructured(layer, "weight", share)  # type: ignore[no-untyped-call]
                prune.remove(layer, "weight")  # type: ignore[no-untyped-call]
