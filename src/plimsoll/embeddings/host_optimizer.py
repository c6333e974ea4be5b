"""The optimizers of ``torch.optim`` for tables on the host. Their states are stored where the table is.

    optimizer = optimizer_of(model, torch.optim.Adagrad, lr=0.1)

The result is an instance of torch's optimizer class. It is constructed with one row of each table, so that it allocates
nothing of the table's size. Then the row is replaced by the table, and its states by states of the table's size with
the same initial values. The states are in unnamed files next to the table's file, or in memory for a table in memory.
Loading a state dict writes into these states.

Covers the classes that take sparse gradients, for tables and other parameters at once (SparseAdam: for tables only).
Does NOT support momentum (torch keeps it in a sparse tensor that grows to the size of the table) or pickling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.device import mapped_memory
from plimsoll.embeddings.host import HostEmbedding
from plimsoll.embeddings.sparse_gradients import refuse_wrong_gradients
from plimsoll.errors import InputError

_KINDS = (torch.optim.Adagrad, torch.optim.SparseAdam, torch.optim.SGD)


def optimizer_of(
    module: nn.Module,
    kind: Callable[..., torch.optim.Optimizer],
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
    **arguments: Any,
) -> torch.optim.Optimizer:
    """Make an optimizer whose states for the tables in ``module`` are stored where the tables are.

    Args:
        module: a `HostEmbedding`, or a model that contains some.
        kind: ``torch.optim.Adagrad``, ``SparseAdam`` or ``SGD``.
        parameters: the parameters to update, or parameter groups; default: all parameters of ``module`` that require
            gradients.
        arguments: arguments of ``kind``, such as ``lr``.

    Raises:
        InputError: if ``kind`` does not take sparse gradients, or is SparseAdam and gets parameters that are not
            tables, or if momentum or weight decay is set for a table.
        OutputError: if the disk has too little space for the states.
    """
    if kind not in _KINDS:
        name = getattr(kind, "__name__", repr(kind))
        raise InputError(
            f"{name} cannot update a table by the rows of a batch: use Adagrad, SparseAdam or SGD of torch.optim"
        )
    tables = {one.weight: one for one in module.modules() if isinstance(one, HostEmbedding)}
    table_of = {nn.Parameter(weight.detach()[:1].clone()): table for weight, table in tables.items()}
    twin_of = {table.weight: twin for twin, table in table_of.items()}
    optimizer = kind(_with_twins(module, parameters, twin_of), **arguments)
    _refuse_momentum(optimizer, table_of)
    names = {module: name or "the table" for name, module in module.named_modules()}
    refuse_wrong_gradients(optimizer, {twin: names[table] for twin, table in table_of.items()})
    for group in optimizer.param_groups:
        group["params"] = [table_of[one].weight if one in table_of else one for one in group["params"]]
    kept = {
        table.weight: _states(optimizer, twin, table)
        for twin, table in table_of.items()
        if any(table.weight is one for group in optimizer.param_groups for one in group["params"])
    }
    for weight, states in kept.items():
        optimizer.state[weight] = states
    beginning = {weight: dict(states) for weight, states in kept.items()}
    optimizer.register_load_state_dict_post_hook(lambda loaded: _write_into(beginning, loaded))
    return optimizer


def _with_twins(
    module: nn.Module,
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None,
    twin_of: dict[nn.Parameter, nn.Parameter],
) -> list[dict[str, Any]]:
    """Return the parameter groups for the optimizer, with each table replaced by its twin, a parameter of one row."""
    if parameters is None:
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    given: list[Any] = list(parameters)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    return [{**group, "params": [twin_of.get(one, one) for one in group["params"]]} for group in groups]


def _refuse_momentum(optimizer: torch.optim.Optimizer, table_of: dict[nn.Parameter, HostEmbedding]) -> None:
    for group in optimizer.param_groups:
        if group.get("momentum") and any(one in table_of for one in group["params"]):
            raise InputError(
                f"momentum {group['momentum']} would keep the gradients of all rows a table has ever looked up in "
                "memory: use momentum=0, Adagrad or SparseAdam"
            )


def _states(optimizer: torch.optim.Optimizer, twin: nn.Parameter, table: HostEmbedding) -> dict[str, Any]:
    """Return the optimizer states of a table, with initial values from the states of its twin of one row.

    A state with one value per weight becomes as large as the table. Each of its rows has the values of the twin's row.
    """
    states = optimizer.state.pop(twin, {})
    if isinstance(optimizer, torch.optim.SparseAdam):  # SparseAdam creates its states in the first step
        states = {"step": 0, "exp_avg": torch.zeros_like(twin), "exp_avg_sq": torch.zeros_like(twin)}
    return {name: _as_large(value, table) if _is_like(value, twin) else value for name, value in states.items()}


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


@torch.no_grad()
def _as_large(state_1D: Tensor, table: HostEmbedding) -> Tensor:
    shape = (table.num_embeddings, table.embedding_dim)
    if table.path is None:
        state_ND = torch.zeros(shape, dtype=state_1D.dtype)
    else:
        state_ND = mapped_memory.unnamed(table.path.parent, shape, state_1D.dtype)
    return state_ND.copy_(state_1D.expand(shape)) if state_1D.any() else state_ND


@torch.no_grad()
def _write_into(kept: dict[nn.Parameter, dict[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Copy the states that ``optimizer`` has loaded into its original states ``kept``, and use these again.

    The states ``kept`` are stored where the tables are; the loaded states are other tensors.
    """
    for weight, states in kept.items():
        loaded = optimizer.state[weight]
        for name, state in states.items():
            if _is_like(state, weight):
                loaded[name] = state.copy_(loaded[name])
