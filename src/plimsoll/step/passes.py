"""The forward and backward passes of micro-batches, which accumulate the gradients of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

from plimsoll.data.batch import move_batch
from plimsoll.device.base import Backend
from plimsoll.models.workload import Workload
from plimsoll.step.checks import refuse_non_finite
from plimsoll.step.cuda_graphs.capture import Scaler
from plimsoll.step.cuda_graphs.replays import Replays
from plimsoll.step.failpoints import failpoint
from plimsoll.step.folding.passes import Folded
from plimsoll.step.micro_batches import mean_loss
from plimsoll.step.oom_boundary import Position
from plimsoll.step.result import at_least_fp32
from plimsoll.step.retained.graphs import GraphWatch
from plimsoll.step.retry import Retry


class Passes:
    """The passes of one training run.

    Args:
        workload: the training run.
        retry: restores the state from before the step.
        backend: the backend of the device.
        position: the current position in the training run.
        parameters: returns an iterator over the parameters that have gradients.
        is_dry_run: whether the training run is a dry run.

    Attributes:
        graphs: watches for autograd graphs that stay in memory after a pass.
        replays: replays passes from a CUDA graph if the workload asks for it.
        folded: repeats recorded passes in a dry run whose passes are alike; otherwise ``None``.
    """

    def __init__(
        self,
        workload: Workload,
        retry: Retry,
        backend: Backend,
        position: Position,
        parameters: Callable[[], Iterable[nn.Parameter]],
        *,
        is_dry_run: bool,
    ) -> None:
        self.graphs = GraphWatch(workload, backend)
        self.replays = Replays(workload, retry, backend, position, parameters, is_dry_run=is_dry_run)
        self.folded: Folded | None = None
        self._workload, self._position = workload, position

    def add(self, micro_batch: Any, share: float, scaler: Scaler, *, releases_gradients: bool = False) -> Tensor:
        """Accumulate the gradients of one micro-batch. All its other allocations are freed when this returns.

        Args:
            micro_batch: the micro-batch, on any device.
            share: the weight of the micro-batch in the mean loss of the batch.
            scaler: the loss scaler, for fp16.
            releases_gradients: whether parameters are updated in backward. If so, the loss is checked before that.

        Returns:
            The micro-batch's part of the batch's mean loss.
        """
        self._position.phase = "copy"
        failpoint("copy")
        eager = partial(self._eagerly, share=share, scaler=scaler, releases_gradients=releases_gradients)
        if self.folded is None:
            return self.replays.run(micro_batch, share, scaler, eager)
        loss = self.folded.run(micro_batch, share != 1, lambda: eager(move_batch(micro_batch, self._workload.device)))
        self._position.phase = "backward"  # the phase in which a pass ends
        return loss

    def _eagerly(self, micro_batch: Any, *, share: float, scaler: Scaler, releases_gradients: bool) -> Tensor:
        step = self._position.step + 1
        self._position.phase = "forward"
        failpoint("forward")
        loss = mean_loss(self._workload, micro_batch)
        self.graphs.note_loss(loss, step)
        self._position.phase = "loss"
        failpoint("loss")
        if share != 1:
            loss = loss * share
        if releases_gradients:
            refuse_non_finite("loss", loss.item(), self._workload, self._position)
        self._position.phase = "backward"
        self.graphs.backward(loss if scaler is None else scaler.scale(loss), step)
        failpoint("backward")
        return at_least_fp32(loss)
