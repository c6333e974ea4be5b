"""The extension points of a training step: techniques set them, and the step calls them without knowing who did.

Each has a default, the plain behaviour. `plimsoll.models.workload.hooked` sets them, and puts those before back.
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
    """How a batch is cut into micro-batches."""

    depends_on_values: bool
    """Whether their number follows from what is in a batch, and not from its size alone."""

    def elements_per_sample(self, batch: Any, batch_size: int) -> float:
        """Return as how many elements each sample of a batch counts, where a micro-batch is chosen by its size."""
        ...

    def micro_batches(
        self, batch: Any, batch_size: int, micro_batch: int, count: Callable[[Any], float]
    ) -> Iterator[tuple[Any, float, Sequence[int]]]:
        """Make one micro-batch after the other; those without units, which have no mean loss, are left out.

        Args:
            batch: the batch.
            batch_size: its samples.
            micro_batch: samples of a micro-batch.
            count: counts the units of some samples, which have all of their columns.

        Yields:
            The micro-batch, its units, and the numbers that its samples have in the batch.
        """
        ...


class BySamples:
    """`Cut`: so many samples in each micro-batch, in their order; a batch that is not larger stays as it is."""

    depends_on_values = False

    def elements_per_sample(self, batch: Any, batch_size: int) -> float:
        """Return the mean."""
        return count_elements(batch) / batch_size

    def micro_batches(
        self, batch: Any, batch_size: int, micro_batch: int, count: Callable[[Any], float]
    ) -> Iterator[tuple[Any, float, Sequence[int]]]:
        """Cut into views of the batch."""
        if micro_batch >= batch_size:
            yield batch, count(batch), range(batch_size)
            return
        for start, part in zip(range(0, batch_size, micro_batch), split_batch(batch, micro_batch), strict=True):
            if num_units := count(part):
                yield part, num_units, range(start, min(start + micro_batch, batch_size))


class Sharding(Protocol):
    """How the parameters of a model are shared out over the ranks.

    Where they are, ranks exchange them in each pass: all must make equally many passes.
    """

    is_sharded: bool

    def hand_over(self) -> None:
        """Give the gradients of all passes to the optimizer's parameters."""
        ...

    def reset(self) -> None:
        """Make the model ready for another try, wherever the last one ended."""
        ...

    def clip(self, parameters: Sequence[Tensor], clip_norm: float) -> Tensor:
        """Clip the gradients of the whole model by its norm, on this rank those of ``parameters``.

        Returns:
            Their norm before.
        """
        ...

    def agree_on_infinities(self, scaler: torch.amp.GradScaler, optimizer: Any) -> None:
        """Let the update of what a scaler knows as its optimizer be skipped by all ranks, or by none."""
        ...


class Unsharded:
    """`Sharding`: each rank has all parameters."""

    is_sharded = False

    def hand_over(self) -> None:
        """Do nothing: the optimizer has them."""

    def reset(self) -> None:
        """Do nothing."""

    def clip(self, parameters: Sequence[Tensor], clip_norm: float) -> Tensor:
        """Clip as torch does; gradients are added up over the ranks."""
        return nn.utils.clip_grad_norm_(parameters, clip_norm)

    def agree_on_infinities(self, scaler: torch.amp.GradScaler, optimizer: Any) -> None:
        """Do nothing: all ranks have the same gradients."""


class EarlyUpdates(NamedTuple):
    """What an update in backward needs.

    Attributes:
        copy_outside: copies a tensor to where it takes no memory of the device, for the undo.
        leave_out: what to type so that parameters are updated when backward has ended.
    """

    copy_outside: Copier
    leave_out: str


class CapturedPass(Protocol):
    """A pass that can be replayed."""

    def release(self) -> None:
        """Give its memory back."""
        ...


BY_SAMPLES = BySamples()
UNSHARDED = Unsharded()


@dataclass(frozen=True, slots=True)
class StepHooks:
    """What techniques change of a step.

    Attributes:
        cut: how a batch is cut into micro-batches.
        evaluation_samples: the most samples of an evaluation pass; ``None``: as many as fit.
        captured: the pass that micro-batches are replayed from, once there is one; ``None``: all run eagerly.
        update_early: for parameters that are updated in backward; ``None``: when it has ended.
        sharding: how the parameters are shared out over the ranks.
        after_step: what is called after each step that happened.
    """

    cut: Cut = BY_SAMPLES
    evaluation_samples: int | None = None
    captured: list[CapturedPass] | None = None
    update_early: EarlyUpdates | None = None
    sharding: Sharding = UNSHARDED
    after_step: tuple[Callable[[], None], ...] = ()
