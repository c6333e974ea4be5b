"""What every way to make a model smaller offers, and what it is given.

A method changes a `Bundle` in place: the model, its configuration and, where it must, its tokenizer. Afterwards the
model is one of its class with smaller tensors, or says in its configuration what was changed (`_structure`), so that
it can be saved, loaded, trained and made smaller again.

Does NOT cover quality: what a method costs is measured by the caller, on the user's own data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from plimsoll.records.plan import Choice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Choices = tuple[Choice, ...]

Need = Literal["batches", "gradients", "corpus"]
"""What of the user's data a method looks at: some batches, the gradients of their loss, or how often each token is in
all of the corpus."""


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


class Shrinker(Protocol):
    """One way to make a model smaller: one module of this package, listed in its ``__init__``.

    ``name`` is the registry's key, the word on the command line, the page in ``docs/shrink`` and the test's id;
    ``title`` what it does, for a table; ``saves`` one sentence that says what becomes smaller (the file, the memory,
    the time of a pass, that of training) and what does not. What a choice may have is in
    `plimsoll.records.shrink`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    saves: ClassVar[str]

    def menu(self, bundle: Bundle) -> Choices | str:
        """Return what is worth trying, mildest first, or a sentence that says why nothing is.

        The sentence names the modules that were looked for. What is not in the menu may still be asked for by the user
        (``refusal`` judges it).
        """
        ...

    def needs(self, choice: Choice) -> frozenset[Need]:
        """Return what it must be given to do this."""
        ...

    def refusal(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return a sentence that says why this choice cannot be, with its values and what to give instead."""
        ...

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Make the bundle smaller, in place. The same arguments give the same result, bit for bit.

        Call it only with what is not refused. Bundles on the meta device are given too, for their sizes alone, with no
        calibration: what is kept is then any of the right number.
        """
        ...


def possible(method: Shrinker, bundle: Bundle, choices: Iterable[Choice]) -> Choices | str:
    """Return those of some choices that a method does not refuse, or why it refuses the last, the strongest."""
    faults = {choice: method.refusal(bundle, choice) for choice in choices}
    return tuple(choice for choice, fault in faults.items() if fault is None) or str([*faults.values()][-1])
