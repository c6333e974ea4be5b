"""The optimizers of torch that fail with sparse gradients, which are refused before the first step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plimsoll.embeddings.sparse_gradients import refuse_wrong_gradients
from plimsoll.errors import InputError
from plimsoll.step.train_step import TrainStep

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
KINDS = [
    (one, {}) for name, one in vars(torch.optim).items()
    if isinstance(one, type) and issubclass(one, torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS", "Muon")
]  # fmt: skip
SETTINGS = [
    *((torch.optim.SGD, {name: value}) for name, value in {"momentum": 0.9, "weight_decay": 0.1, "maximize": True,
                                                           "fused": True, "foreach": True}.items()),
    *((torch.optim.Adagrad, {name: value}) for name, value in {"lr_decay": 0.5, "weight_decay": 0.1, "maximize": True,
                                                               "fused": True, "foreach": True}.items()),
    (torch.optim.SparseAdam, {"maximize": True}),
]  # fmt: skip


def fails_in_torch(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether plain steps fail, as the reference."""
    try:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("is_alone", [True, False], ids=["table alone", "mixed"])
@pytest.mark.parametrize(("kind", "settings"), [*KINDS, *SETTINGS], ids=lambda one: getattr(one, "__name__", str(one)))
def test_what_is_refused_is_what_fails_in_torch(kind, settings, is_alone, is_sparse):
    table = nn.Embedding(4, 3, sparse=is_sparse)
    model = nn.Sequential(table) if is_alone else nn.Sequential(table, nn.Linear(3, 2))
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    tables = {table.weight: "0"} if is_sparse else {}
    if fails_in_torch(model, optimizer):
        with pytest.raises(InputError, match=r": (use|set) "):
            refuse_wrong_gradients(optimizer, tables)
        with pytest.raises(InputError, match=r": (use|set) "):
            TrainStep(model, optimizer, lambda model, batch: model(batch).sum(), units="samples")
    else:
        refuse_wrong_gradients(optimizer, tables)
