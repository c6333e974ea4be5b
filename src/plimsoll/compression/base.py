"""What every way to make a model smaller offers, and what it is given.

A method changes a `Bundle` in place: the model, its configuration and, where it must, its tokenizer. Afterwards the
model is one of its class with smaller tensors, or says in its configuration what was changed
(`plimsoll.weights.structure`), so that it can be saved, loaded, trained and made smaller again.

Does NOT cover quality: what a method costs is measured by the caller, on the user's own data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from plimsoll.records.plan import Choice, Value
from plimsoll.records.shrink import options_fault, options_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Choices = tuple[Choice, ...]
Options = Mapping[str, Value]

Need = Literal["batches", "gradients", "corpus"]
"""What of the user's data a method looks at: some batches, the gradients of their loss, or how often each token is in
all of the corpus."""

_NEEDS: dict[tuple[str, Value | None], Need] = {
    ("importance", "taylor"): "gradients",
    ("importance", "activation"): "batches",
    ("aware", True): "batches",
}
"""What options must be given; other ways to judge importance look at the weights alone."""


@dataclass(slots=True)
class Bundle:
    """A model that is made smaller, and the tokenizer that belongs to it.

    ``model`` is of transformers or a recurrent one of ours, on the CPU, in evaluation mode, its parameters float32.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerFast | None = None


@dataclass(frozen=True)
class Calibration:
    """What a method may look at.

    Attributes:
        batches: yields what the model is called with (``input_ids``, ``attention_mask``, ``labels``: (B, T), (B, T) and
            what the task has), the same ones in the same order at each call. ``model(**batch).loss`` is the mean.
        token_counts: how often each token id is in the corpus, (V,); ``None`` where nobody counted.
    """

    batches: Callable[[], Iterator[Mapping[str, Tensor]]] = lambda: iter(())
    token_counts: NDArray[np.int64] | None = None


class Shrinker(ABC):
    """One way to make a model smaller: one module of `plimsoll.compression.methods`, listed in its ``__init__``.

    What a choice may have is in `plimsoll.records.shrink`.

    Attributes:
        name: the registry's key, the word on the command line, the page in ``docs/shrink`` and the test's id.
        saves: one sentence that says what becomes smaller (the file, the memory, the time of a pass, that of training)
            and what does not.
        tried: the options that are worth trying, mildest first.
        easiest: the place in ``tried`` of what a model refuses last: where all are refused, its reason is given.
        reads_corpus: whether it must know how often each token is in the corpus.
    """

    name: ClassVar[str]
    saves: ClassVar[str]
    tried: ClassVar[tuple[Options, ...]] = ({},)
    easiest: ClassVar[int] = -1
    reads_corpus: ClassVar[bool] = False

    def choices(self, bundle: Bundle) -> Choices | str:
        """Return what is worth trying, mildest first, or a sentence that says why nothing is.

        The sentence names the modules that were looked for. What is not offered may still be asked for by the user
        (``refusal`` judges it).
        """
        options = self.worth_trying(bundle)
        if isinstance(options, str):
            return options
        choices = tuple(Choice(technique=self.name, options=dict(one)) for one in options)
        faults = [self.refusal(bundle, choice) for choice in choices]
        possible = tuple(choice for choice, fault in zip(choices, faults, strict=True) if fault is None)
        return possible or str(faults[self.easiest])

    def worth_trying(self, bundle: Bundle) -> tuple[Options, ...] | str:
        """Return ``tried``; a method whose options depend on the model returns others, or why there are none."""
        return self.tried

    def needs(self, choice: Choice) -> frozenset[Need]:
        """Return what it must be given to do this."""
        needs = {_NEEDS[option] for option in options_of(choice).items() if option in _NEEDS}
        return frozenset(needs | {"corpus"} if self.reads_corpus else needs)

    def refusal(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return a sentence that says why this choice cannot be, with its values and what to give instead."""
        return options_fault(choice) or self.fault(bundle, choice)

    @abstractmethod
    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return what ``refusal`` does, of a choice whose options are right by themselves."""

    @abstractmethod
    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Make the bundle smaller, in place. The same arguments give the same result, bit for bit.

        Call it only with what is not refused. Bundles on the meta device are given too, for their sizes alone, with no
        calibration: what is kept is then any of the right number.
        """
