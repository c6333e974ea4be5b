"""The interface of a compression method (`Shrinker`) and its inputs.

A method changes a `Bundle` in place: the model, its configuration and, if needed, its tokenizer. The resulting model
has the same class with smaller tensors, or records the change in its configuration (`plimsoll.weights.structure`).
So it can be saved, loaded, trained and made smaller again.

Does NOT evaluate models: the caller measures the quality on the user's own data.
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
"""The kinds of user data that a method reads: some batches, the gradients of their loss, or the count of each token in
the whole corpus."""

_NEEDS: dict[tuple[str, Value | None], Need] = {
    ("importance", "taylor"): "gradients",
    ("importance", "activation"): "batches",
    ("aware", True): "batches",
}
"""The kind of user data that a method needs if an option (the first of each key) has a value (the second).

Other values of these options need only the weights.
"""


@dataclass(slots=True)
class Bundle:
    """A model to make smaller, and its tokenizer, which is ``None`` if the model's folder has no tokenizer.

    ``model`` is a transformers model or a recurrent model of Plimsoll. It is on the CPU, in evaluation mode, in
    float32.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerFast | None = None


@dataclass(frozen=True)
class Calibration:
    """The user's data that a method may read.

    Attributes:
        batches: yields the keyword arguments of ``model(**batch)``: ``input_ids`` and ``attention_mask``, both (B, T),
            ``labels`` and further fields of the task. Each call yields the same batches in the same order.
            ``model(**batch).loss`` is the mean loss of the batch.
        token_counts: the occurrences of each token id in the corpus, (V,); ``None`` if they were not counted.
    """

    batches: Callable[[], Iterator[Mapping[str, Tensor]]] = lambda: iter(())
    token_counts: NDArray[np.int64] | None = None


class Shrinker(ABC):
    """A method that makes a model smaller.

    Each method is a module of `plimsoll.compression.methods`, listed in ``__init__``. A choice is a method with values
    of its options, which `plimsoll.records.shrink` defines.

    Attributes:
        name: the key in the registry and on the command line, and the name of the page in ``docs/shrink``.
        saves: a sentence on the savings (file, memory, time of a pass, time of training) and their limits.
        tried: the option values that are worth trying, mildest first (the smallest change of the model).
        easiest: the index in ``tried`` of the choice that is most often possible. If no choice is possible, `choices`
            returns the reason for this one.
        reads_corpus: whether the method needs the count of each token in the corpus.
    """

    name: ClassVar[str]
    saves: ClassVar[str]
    tried: ClassVar[tuple[Options, ...]] = ({},)
    easiest: ClassVar[int] = -1
    reads_corpus: ClassVar[bool] = False

    def choices(self, bundle: Bundle) -> Choices | str:
        """Return the choices that are worth trying, mildest first, or a sentence on why there are no such choices.

        The sentence names the modules that were searched for. A user may still ask for other choices, which `refusal`
        checks.
        """
        options = self.worth_trying(bundle)
        if isinstance(options, str):
            return options
        choices = tuple(Choice(technique=self.name, options=dict(one)) for one in options)
        faults = [self.refusal(bundle, choice) for choice in choices]
        possible = tuple(choice for choice, fault in zip(choices, faults, strict=True) if fault is None)
        return possible or str(faults[self.easiest])

    def worth_trying(self, bundle: Bundle) -> tuple[Options, ...] | str:
        """Return the option values that are worth trying, mildest first, or a sentence on why there are no such values.

        The default is ``tried``. Methods override this if the values depend on the model.
        """
        return self.tried

    def needs(self, choice: Choice) -> frozenset[Need]:
        """Return the kinds of user data that a choice reads; empty if it reads only the weights."""
        needs = {_NEEDS[option] for option in options_of(choice).items() if option in _NEEDS}
        return frozenset(needs | {"corpus"} if self.reads_corpus else needs)

    def refusal(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return a sentence on why a choice is impossible, and a remedy; ``None`` if the choice is possible."""
        return options_fault(choice) or self.fault(bundle, choice)

    @abstractmethod
    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return a sentence on why this model does not support the choice; ``None`` if it does.

        The options of the choice are valid: `refusal` has checked them.
        """

    @abstractmethod
    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Make the bundle smaller, in place. Equal arguments give bitwise equal results.

        Call this only if `refusal` returns ``None``. The model may be on the meta device, if only sizes are needed.
        The method then reads no batches, and keeps arbitrary rows, but the right number of them.
        """
