"""The extension points of a training step. Techniques set them, and the step calls them.

The defaults are the plain behaviour. `plimsoll.models.workload.hooked` sets them and restores the previous ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from plimsoll.data.batch import count_elements, split_batch
from plimsoll.device.off_device import Copier


class Cut(Protocol):
    """The interface for splitting a batch into micro-batches."""

    depends_on_values: bool
    """Whether the number of micro-batches depends on the values of a batch, and not only on its size."""

    def elements_per_sample(self, batch: Any, batch_size: int) -> float:
        """Return the number of tensor elements per sample, from which the size of a micro-batch is chosen."""
        ...

    def micro_batches(
        self, batch: Any, batch_size: int, micro_batch: int, count: Callable[[Any], float]
    ) -> Iterator[tuple[Any, float, Sequence[int]]]:
        """Yield the micro-batches of a batch, except those without units of the loss, which have no mean loss.

        Args:
            batch: the batch.
            batch_size: number of samples in the batch.
            micro_batch: number of samples per micro-batch.
            count: returns the number of units of the loss in some samples, which must not be trimmed.

        Yields:
            The micro-batch, its number of units of the loss, and the indices of its samples in the batch.
        """
        ...


class BySamples:
    """A `Cut` into micro-batches of a fixed number of samples, in order. A smaller batch stays whole."""

    depends_on_values = False

    def elements_per_sample(self, batch: Any, batch_size: int) -> float:
        """Return the mean number of tensor elements per sample."""
        return count_elements(batch) / batch_size

    def micro_batches(
        self, batch: Any, batch_size: int, micro_batch: int, count: Callable[[Any], float]
    ) -> Iterator[tuple[Any, float, Sequence[int]]]:
        """Yield views of the batch, each with its number of units of the loss and the indices of its samples.

        Views without units of the loss are skipped.
        """
        if micro_batch >= batch_size:
            yield batch, count(batch), range(batch_size)
            return
        for start, part in zip(range(0, batch_size, micro_batch), split_batch(batch, micro_batch), strict=True):
            if num_units := count(part):
                yield part, num_units, range(start, min(start + micro_batch, batch_size))


class Sharding(Protocol):
    """The interface for distributing a model's parameters over the ranks.

    If parameters are sharded, ranks exchange them in each pass. All ranks must therefore run the same number of passes.
    """

    is_sharded: bool

    def hand_over(self) -> None:
        """Give the optimizer's parameters their gradients, summed over all passes."""
        ...

    def reset(self) -> None:
        """Prepare the model for another attempt, no matter at which point the last one failed."""
        ...

    def clip(self, parameters: Sequence[Tensor], clip_norm: float) -> Tensor:
        """Clip the gradients of ``parameters`` on this rank by the 2-norm of all gradients of the model.

        Returns:
            The norm before clipping.
        """
        ...

    def agree_on_infinities(self, scaler: torch.amp.GradScaler, optimizer: Any) -> None:
        """Make all ranks skip the update if the scaler of any rank found infinities in the gradients."""
        ...


class Unsharded:
    """A `Sharding` in which each rank has all parameters."""

    is_sharded = False

    def hand_over(self) -> None:
        """Do nothing, because backward gives the optimizer's parameters their gradients."""

    def reset(self) -> None:
        """Do nothing."""

    def clip(self, parameters: Sequence[Tensor], clip_norm: float) -> Tensor:
        """Clip with torch's function; gradients are already summed over the ranks."""
        return nn.utils.clip_grad_norm_(parameters, clip_norm)

    def agree_on_infinities(self, scaler: torch.amp.GradScaler, optimizer: Any) -> None:
        """Do nothing, because all ranks have the same gradients."""


class EarlyUpdates(NamedTuple):
    """The settings of parameter updates during backward.

    Attributes:
        copy_outside: copies a tensor to memory outside the device, so that a step can be undone.
        leave_out: the command-line option that messages suggest, with which parameters are updated after backward.
    """

    copy_outside: Copier
    leave_out: str


class CapturedPass(Protocol):
    """A forward and backward pass captured as a CUDA graph, which can be replayed."""

    def release(self) -> None:
        """Free the memory of the graph."""
        ...


BY_SAMPLES = BySamples()
UNSHARDED = Unsharded()


@dataclass(frozen=True, slots=True)
class StepHooks:
    """The parts of a step that techniques can change.

    Attributes:
        cut: splits a batch into micro-batches.
        evaluation_samples: the maximum number of samples per evaluation pass; ``None``: as many as fit.
        captured: the passes captured so far, which micro-batches replay; ``None``: all passes run eagerly.
        update_early: the settings of parameter updates during backward; ``None``: update after backward.
        sharding: the distribution of the parameters over the ranks.
        after_step: called after each step that was not undone.
    """

    cut: Cut = BY_SAMPLES
    evaluation_samples: int | None = None
    captured: list[CapturedPass] | None = None
    update_early: EarlyUpdates | None = None
    sharding: Sharding = UNSHARDED
    after_step: tuple[Callable[[], None], ...] = ()
