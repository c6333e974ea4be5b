"""Adam with 8-bit or 4-bit moments, with the blocks and codes of torchao's ``AdamW8bit`` and ``AdamW4bit``.

A moment has a code per element (8 or 4 bits) and a scale per block of 256 or 128 elements. If a parameter consists of
whole blocks, the update is bitwise identical to torchao's. Torchao does not quantize other parameters; here their last
elements form a smaller block.

Unlike in torchao, states are plain tensors. They are counted, copied for an undo, saved and loaded like the states of
``torch.optim``. Large parameters are updated in chunks of elements.

Not handled: amsgrad, sparse gradients and complex numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from plimsoll.device.off_device import keeps_states_outside
from plimsoll.errors import CheckpointError
from plimsoll.models.optimizers import SeparableOptimizer

LEAST_ELEMENTS = 4096
"""Smaller parameters have the moments of plain Adam, as in torchao: biases and normalization weights are sensitive."""

_BLOCK_ELEMENTS = {8: 256, 4: 128}  # elements per block by bits, as in torchao
# Elements per chunk of an update, which takes about 60 ops. Torchao's temporaries are several times as large as the
# parameter unless they are compiled away, and compiling took more than a minute on a CPU. Smaller parts would keep the
# temporaries (8 floats per element) in a CPU cache. But a dry run takes a fraction of a millisecond for each op,
# regardless of its size.
_PART_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 22}
_MOST_TEMPORARIES = 12  # fp32 tensors as large as a chunk; a test counts them
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # True: has a sign


class Table(NamedTuple):
    """The value of each code (``numbers``), and a lookup of the code of a float32 by its upper 16 bits.

    ``code`` maps the upper 16 bits to the code of the smallest float with those bits. ``next_from`` maps them to a
    bound: a float with those bits that is at least the bound has the next code.
    """

    numbers: NDArray[np.float32]
    code: NDArray[np.uint8]
    next_from: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Packed:
    """Codes and scales of consecutive blocks, with the three arrays of their `Table` on the same device."""

    bits: int
    codes: Tensor
    scale: Tensor
    numbers: Tensor
    code: Tensor
    next_from: Tensor

    def unpacked(self) -> Tensor:
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack([codes >> 4, codes & 15], dim=-1).view(-1)
        blocks = self.numbers.index_select(0, codes.int()).view(len(self.scale), -1)
        return blocks.mul_(self.scale[:, None]).view(-1)

    def pack(self, moment: Tensor) -> None:
        blocks = moment.view(len(self.scale), -1)
        torch.clip(blocks.abs().amax(-1), 1e-12, out=self.scale)
        shares = (blocks / self.scale[:, None]).view(-1)
        # A lookup by the upper half of the bits; torchao uses a search.
        upper_bits = (shares.view(torch.int32) >> 16).bitwise_and_(0xFFFF)
        codes = self.code.index_select(0, upper_bits)
        codes += shares >= self.next_from.index_select(0, upper_bits)
        self.codes.copy_(codes if self.bits == 8 else (codes[::2] << 4) | codes[1::2])


class _Rule(NamedTuple):
    """The hyperparameters of one update.

    Learning rate and bias corrections are 0-dimensional tensors, so that results are rounded in the same way as in
    torchao.
    """

    rate: Tensor
    corrections: tuple[Tensor, Tensor]
    betas: tuple[float, float]
    epsilon: float
    decay: float
    is_decoupled: bool
    maximizes: bool


class LowBitAdam(SeparableOptimizer):
    """Adam or AdamW (``decoupled_weight_decay``) with 8-bit or 4-bit moments.

    Args:
        params: the parameters to update, or parameter groups, as in ``torch.optim.Adam``.
        bits: bits per element of a moment, 8 or 4.
        lr: the learning rate.
        betas: the decay rates of both moments.
        eps: the number added to the denominator.
        weight_decay: the factor of the weight decay.
        maximize: whether to maximize the loss.
        decoupled_weight_decay: whether weight decay is applied as in AdamW, rather than as an L2 penalty as in Adam.
    """

    def __init__(
        self,
        params: Any,
        *,
        bits: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
    ) -> None:
        self.bits = bits
        self._tables: dict[torch.device, dict[str, list[Tensor]]] = {}
        # The groups record the number of bits, so that checkpoints contain it.
        defaults = {
            "bits": bits,
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, {**defaults, "decoupled_weight_decay": decoupled_weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"bits": self.bits, "_tables": {}}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def state_bytes_of(self, parameter: Tensor) -> int:
        """Return the bytes of both moments and the step count of a parameter."""
        if not is_quantized(parameter):
            return 2 * parameter.nbytes + 4
        num_blocks = -(-parameter.numel() // _BLOCK_ELEMENTS[self.bits])
        return 2 * (parameter.numel() * self.bits // 8 + 4 * num_blocks) + 4

    def temporary_bytes_of(self, parameter: Tensor) -> int:
        """Return the maximum bytes of temporaries during an update; a large parameter is updated in chunks."""
        most = self._part_elements(parameter) if is_quantized(parameter) else parameter.numel()
        copies = 0 if parameter.grad is None or parameter.grad.is_contiguous() else parameter.nbytes
        return _MOST_TEMPORARIES * 4 * min(most, parameter.numel()) + copies

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states without casting codes and scales to the parameter's dtype, as torch would.

        Raises:
            CheckpointError: if the states were saved with another number of bits.
        """
        saved_bits = {group.get("bits") for group in state_dict["param_groups"]}
        if saved_bits != {self.bits}:
            raise CheckpointError(
                f"the checkpoint has optimizer states of {saved_bits.pop() or 32} bits, but this optimizer needs "
                f"{self.bits}: resume with the budget and choices of that training, or start a new training"
            )
        packed = {
            number: {key: value for key, value in state.items() if _is_packed(key)}
            for number, state in state_dict["state"].items()
        }
        others = {
            number: {key: value for key, value in state.items() if not _is_packed(key)}
            for number, state in state_dict["state"].items()
        }
        super().load_state_dict(state_dict | {"state": others})
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        is_file = keeps_states_outside(self)  # loaded tensors may be mapped files, which must not be modified
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, value in packed.get(number, {}).items():
                self.state[parameter][key] = value.to(parameter.device, copy=is_file)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if gradient.is_sparse:
            raise RuntimeError("LowBitAdam does not support sparse gradients: set sparse=False in the embedding")
        if not state:
            state.update(self._zeros(parameter))
        state["step"] += 1
        rule = _rule(group, state["step"])
        if "exp_avg" in state:
            moments = _adam(parameter, gradient, state["exp_avg"], state["exp_avg_sq"], rule)
            for key, moment in zip(_MOMENTS, moments, strict=True):
                state[key].copy_(moment)
            return
        numbers, gradients = parameter.detach().view(-1), gradient.reshape(-1)
        for begin, end in _parts(parameter.numel(), _BLOCK_ELEMENTS[self.bits], self._part_elements(parameter)):
            first, second = (self._packed(state, key, begin, end, parameter.device) for key in _MOMENTS)
            moments = _adam(numbers[begin:end], gradients[begin:end], first.unpacked(), second.unpacked(), rule)
            first.pack(moments[0])
            second.pack(moments[1])

    def _zeros(self, parameter: Tensor) -> dict[str, Tensor]:
        state = {"step": torch.tensor(0.0)}
        if not is_quantized(parameter):
            return state | {key: torch.zeros_like(parameter) for key in _MOMENTS}
        num_blocks = -(-parameter.numel() // _BLOCK_ELEMENTS[self.bits])
        for key in _MOMENTS:
            num_bytes = parameter.numel() * self.bits // 8
            state[f"{key}_codes"] = torch.zeros(num_bytes, dtype=torch.uint8, device=parameter.device)
            state[f"{key}_scale"] = torch.zeros(num_blocks, dtype=torch.float32, device=parameter.device)
        return state

    def _packed(self, state: dict[str, Tensor], key: str, begin: int, end: int, device: torch.device) -> _Packed:
        if device not in self._tables:
            self._tables[device] = {
                moment: [torch.tensor(column, device=device) for column in table_of(self.bits, has_sign)]
                for moment, has_sign in _MOMENTS.items()
            }
        block = _BLOCK_ELEMENTS[self.bits]
        codes = state[f"{key}_codes"][begin * self.bits // 8 : end * self.bits // 8]
        scale = state[f"{key}_scale"][begin // block : -(-end // block)]
        return _Packed(self.bits, codes, scale, *self._tables[device][key])

    def _part_elements(self, parameter: Tensor) -> int:
        return _PART_ELEMENTS["cpu" if parameter.device.type == "cpu" else "cuda"]


def is_quantized(parameter: Tensor) -> bool:
    """Return whether a parameter's moments are quantized.

    It must be contiguous, with at least `LEAST_ELEMENTS` elements. Their number must be even, because a byte holds two
    4-bit codes.
    """
    num_elements = parameter.numel()
    return num_elements >= LEAST_ELEMENTS and num_elements % 2 == 0 and parameter.is_contiguous()


@cache
def table_of(bits: int, has_sign: bool) -> Table:
    """Return the table of codes for moments with or without a sign, with the same values as in torchao."""
    with _disable_current_modes():  # constants are computed with real tensors, also in a dry run
        numbers = _numbers(bits, has_sign).numpy()
    least = np.append(_least(numbers), np.float32(np.inf))
    nearest_0 = np.arange(1 << 16, dtype=np.uint32) << 16
    smallest = np.fmin(nearest_0.view(np.float32), (nearest_0 | 0xFFFF).view(np.float32))
    code = np.searchsorted(least[:-1], smallest, side="right")
    return Table(numbers, code.astype(np.uint8), least[code])


def _numbers(bits: int, has_sign: bool) -> Tensor:
    """Return the values of all codes in ascending order; the largest value is 1."""
    if bits == 4 and not has_sign:  # evenly spaced, without 0: Li et al. 2023, section 3
        return torch.linspace(0, 1, 17)[1:]
    # Each power of ten has twice as many values as the next lower one: Dettmers et al. 2021, section 1.3.
    found, num_powers = [0.0, 1.0], bits - 1
    for power in range(num_powers):
        edges = torch.linspace(0.1, 1, 2 ** (power + (not has_sign)) + 1)
        middles = (edges[:-1] + edges[1:]) / 2
        for sign in (1, -1) if has_sign else (1,):
            found += (sign * 10 ** (power + 1 - num_powers) * middles).tolist()
    return torch.tensor(sorted(found))


def _least(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return, for each value but the first, the smallest float that torchao rounds up to it.

    Torchao compares the distance from the lower value with half of the gap between the values.
    """
    below, above = numbers[:-1], numbers[1:]
    half = (above - below) * np.float32(0.5)
    least = below + half

    def is_rounded_up(value: NDArray[np.float32]) -> NDArray[np.bool_]:
        return value - below >= half

    while not is_rounded_up(least).all():
        least = np.where(is_rounded_up(least), least, np.nextafter(least, np.float32(np.inf)))
    while True:
        before = np.nextafter(least, np.float32(-np.inf))
        if not is_rounded_up(before).any():
            return least
        least = np.where(is_rounded_up(before), before, least)


def _parts(num_elements: int, block: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each chunk of elements to update.

    Chunks are whole blocks with at most ``most`` elements. The smaller last block, if any, is a chunk of its own.
    """
    whole = num_elements - num_elements % block
    for begin in range(0, whole, most):
        yield begin, min(begin + most, whole)
    if whole < num_elements:
        yield whole, num_elements


def _rule(group: dict[str, Any], step: Tensor) -> _Rule:
    first, second = group["betas"]
    return _Rule(
        torch.as_tensor(group["lr"], dtype=torch.float32),
        (1 - first**step, 1 - second**step),
        (first, second),
        group["eps"],
        group["weight_decay"],
        group["decoupled_weight_decay"],
        group["maximize"],
    )


def _adam(numbers: Tensor, gradient: Tensor, first: Tensor, second: Tensor, rule: _Rule) -> tuple[Tensor, Tensor]:
    """Update weights (``numbers``) in place, and return their new moments.

    The order of operations is the same as in torchao.
    """
    weights, gradient = numbers.float(), gradient.float()
    if rule.maximizes:
        gradient = -gradient
    if rule.decay and rule.is_decoupled:
        weights = weights - rule.rate * rule.decay * weights
    elif rule.decay:
        gradient = gradient + rule.decay * weights
    first = first.float().lerp(gradient, 1 - rule.betas[0])
    second = second.float().lerp(gradient.square(), 1 - rule.betas[1])
    root = second.sqrt().div_(rule.corrections[1].sqrt()).add_(rule.epsilon)
    numbers.copy_(weights - (first / rule.corrections[0]).mul_(rule.rate).div_(root))
    return first, second


def _is_packed(key: str) -> bool:
    return key.endswith(("_codes", "_scale"))
