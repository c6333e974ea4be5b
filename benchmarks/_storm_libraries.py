"""Trainings of `storm.py` with state that libraries write or that is in rarely searched places: caches, weak dicts,
globals.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import SWALR, AveragedModel

from _storm_models import CLASSES, VOCABULARY, WIDTH, Net, Recurrent, adamw, classified, mlp, of_texts, trained
from _storm_run import Kind, Training

# -- where few look ----------------------------------------------------------------------------------------------------

TABLE = torch.zeros(CLASSES)
COUNTS: dict[str, int] = {}
LARGE_TABLE = torch.zeros(400_000)
LOCAL = threading.local()
CALLS: ContextVar[int] = ContextVar("CALLS")


@functools.lru_cache
def cached_table(size: int) -> Tensor:
    return torch.zeros(size)


@functools.cache
def cached_counts() -> dict[str, int]:
    return {"calls": 0}


@functools.cache
def cached_array() -> numpy.ndarray:
    return numpy.zeros(CLASSES, numpy.float32)


@functools.lru_cache
def drawn_once(size: int) -> Tensor:
    """Draw a tensor; the cached first result is returned from then on."""
    return torch.randn(size)


class Doing(Net):
    """A net that scales its output by the result of a function of the net and its features."""

    def __init__(self, change: Callable[[Any, Tensor], Any], kept: Any = None) -> None:
        super().__init__()
        self.change, self.kept = change, kept

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        return self.b(h) * (1 + 0.01 * self.change(self, h.detach()))


def in_global_tensor(_: Any, h: Tensor) -> Tensor:
    TABLE.add_(h.mean())
    return TABLE.clone()


def in_large_global_tensor(_: Any, h: Tensor) -> Tensor:
    LARGE_TABLE.add_(h.mean())
    return LARGE_TABLE[0].clone()


def in_global_dict(_: Any, __: Tensor) -> int:
    COUNTS["calls"] = COUNTS.get("calls", 0) + 1
    return COUNTS["calls"]


def by_global_name(_: Any, __: Tensor) -> int:
    """Count in a global that is looked up by a string."""
    counts = globals()["COUNTS"]
    counts["calls"] = counts.get("calls", 0) + 1
    return counts["calls"]


def in_cached_tensor(_: Any, h: Tensor) -> Tensor:
    cached_table(CLASSES).add_(h.mean())
    return cached_table(CLASSES).clone()


def in_cached_tensor_data(_: Any, h: Tensor) -> Tensor:
    cached_table(CLASSES).data.add_(h.mean())
    return cached_table(CLASSES).clone()


def in_cached_dict(_: Any, __: Tensor) -> int:
    cached_counts()["calls"] += 1
    return cached_counts()["calls"]


def in_cached_array(_: Any, h: Tensor) -> float:
    cached_array()[:] += float(h.mean())
    return float(cached_array().mean())


def drawn_in_cache(_: Any, __: Tensor) -> Tensor:
    return drawn_once(CLASSES)


def in_thread_local(_: Any, __: Tensor) -> int:
    LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
    return LOCAL.calls


def in_context(_: Any, __: Tensor) -> int:
    CALLS.set(CALLS.get(0) + 1)
    return CALLS.get()


def weakly(net: Any, h: Tensor) -> Tensor:
    held = net.kept.setdefault(net.b, torch.zeros(CLASSES))
    held.add_(h.mean())
    return held.clone()


def weakly_counted(net: Any, _: Tensor) -> int:
    net.kept[net.b] = net.kept.get(net.b, 0) + 1
    return net.kept[net.b]


def counted(net: Any, h: Tensor) -> int:
    net.kept.update([int(h.argmax())])
    return len(net.kept) + net.kept.total()


def in_chain(net: Any, _: Tensor) -> int:
    net.kept["calls"] = net.kept.get("calls", 0) + 1
    return net.kept["calls"]


def least_recent(net: Any, h: Tensor) -> float:
    """Count in a cache that evicts the least recently used key."""
    key = round(float(h.mean()), 1)
    net.kept[key] = net.kept.get(key, 0.0) + 1
    net.kept.move_to_end(key)
    if len(net.kept) > 2:
        net.kept.popitem(last=False)
    return sum(net.kept.values())


def of_objects(net: Any, h: Tensor) -> float:
    net.kept[0].append(float(h.mean()))
    return sum(net.kept[0])


def of_object_tensors(net: Any, h: Tensor) -> Tensor:
    net.kept[0].add_(h.mean())
    return net.kept[0].clone()


def fields(net: Any, h: Tensor) -> float:
    net.kept["sum"][0] += float(h.mean())
    net.kept["count"][0] += 1
    return float(net.kept["sum"][0] / net.kept["count"][0])


def by_bits(net: Any, _: Tensor) -> float:
    """Draw from a generator that is recreated around the same bit generator."""
    return float(numpy.random.Generator(net.kept).random())


def in_view(net: Any, h: Tensor) -> float:
    """Write to a view of an array; the base is referenced only by the view."""
    net.kept[1:3] += float(h.mean())
    return float(net.kept.base.mean())


def of_memory(net: Any, _: Tensor) -> int:
    net.kept[0] += 1
    return net.kept[0]


def never_taken(_: Any, __: Tensor) -> float:
    return 0.0


def taken(net: Any, _: Tensor) -> int:
    return next(net.kept)


def numbers() -> Iterator[int]:
    yield from range(1000)


class Looped:
    """A Python iterator with its position in an attribute."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Looped:
        return self

    def __next__(self) -> int:
        self.position += 1
        return self.position


class Delegating:
    """An object with its attributes in a dict that `vars` does not show."""

    __slots__ = ("_own",)

    def __init__(self) -> None:
        object.__setattr__(self, "_own", {"calls": 0})

    def __getattr__(self, name: str) -> Any:
        return object.__getattribute__(self, "_own")[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self._own[name] = value


def attribute(net: Any, _: Tensor) -> int:
    net.kept.calls += 1
    return net.kept.calls


class Settings:
    """A counter behind a property whose setter refuses smaller values."""

    def __init__(self) -> None:
        self._calls = 0

    @property
    def calls(self) -> int:
        return self._calls

    @calls.setter
    def calls(self, value: int) -> None:
        if value < self._calls:
            raise ValueError("calls only grow")
        self._calls = value


class Typed(dict):
    """A dict that refuses smaller values for existing keys."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if key in self and value < self[key]:
            raise ValueError("values only grow")
        super().__setitem__(key, value)


PLACES: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[], Any]]] = {
    "tensor in a global": (in_global_tensor, lambda: None),
    "large tensor in a global": (in_large_global_tensor, lambda: None),
    "dict in a global": (in_global_dict, lambda: None),
    "dict in a global, by a string": (by_global_name, lambda: None),
    "tensor in functools.lru_cache": (in_cached_tensor, lambda: None),
    "tensor in functools.lru_cache, through .data": (in_cached_tensor_data, lambda: None),
    "dict in functools.cache": (in_cached_dict, lambda: None),
    "array in functools.cache": (in_cached_array, lambda: None),
    "numbers drawn once, in functools.lru_cache": (drawn_in_cache, lambda: None),
    "threading.local": (in_thread_local, lambda: None),
    "ContextVar": (in_context, lambda: None),
    "tensor in a WeakKeyDictionary": (weakly, weakref.WeakKeyDictionary),
    "number in a WeakKeyDictionary": (weakly_counted, weakref.WeakKeyDictionary),
    "Counter": (counted, Counter),
    "ChainMap": (in_chain, lambda: ChainMap({}, {"calls": 0})),
    "UserDict": (in_chain, UserDict),
    "OrderedDict as a cache": (least_recent, OrderedDict),
    "array of objects": (of_objects, lambda: numpy.array([[], None], dtype=object)),
    "array of tensors": (of_object_tensors, lambda: _array_of(torch.zeros(CLASSES))),
    "array with fields": (fields, lambda: numpy.zeros(1, dtype=[("sum", "f4"), ("count", "i4")])),
    "view of an array": (in_view, lambda: numpy.zeros(6)[1:5]),
    "bytearray": (of_memory, lambda: bytearray(4)),
    "memoryview": (of_memory, lambda: memoryview(bytearray(4))),
    "bits of numpy's Generator": (by_bits, lambda: numpy.random.PCG64(1)),
    "object with a dict of its own": (attribute, Delegating),
    "property that only grows": (attribute, Settings),
    "dict that only grows": (in_chain, Typed),
    "iterator in Python": (taken, Looped),
    "itertools.count": (taken, itertools.count),
    "itertools.cycle": (taken, lambda: itertools.cycle([1, 2, 3])),
    "generator never advanced": (never_taken, numbers),
    "zip never advanced": (never_taken, lambda: zip([1, 2], [3, 4], strict=True)),
    "map never advanced": (never_taken, lambda: map(str, [1, 2])),
}


def _array_of(one: Tensor) -> numpy.ndarray:
    held = numpy.empty(1, dtype=object)
    held[0] = one
    return held


class Elsewhere:
    """A holder that makes globals and caches visible to the comparison, and resets them."""

    def __init__(self) -> None:
        TABLE.zero_(), LARGE_TABLE.zero_(), COUNTS.clear(), vars(LOCAL).clear(), CALLS.set(0)
        for one in (cached_table, cached_counts, cached_array, drawn_once):
            one.cache_clear()

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        caches = {"counts": dict(cached_counts()), "table": cached_table(CLASSES), "array": cached_array()}
        return {
            "TABLE": TABLE, "LARGE_TABLE": LARGE_TABLE, "COUNTS": COUNTS, "LOCAL": dict(vars(LOCAL)),
            "CALLS": CALLS.get(0), **caches,
        }  # fmt: skip


def kept_elsewhere(change: Callable[[Any, Tensor], Any], kept: Callable[[], Any]) -> Training:
    shown, held = Elsewhere(), kept()
    shows = {"shown": shown}
    if isinstance(held, weakref.WeakKeyDictionary):
        shows["weak"] = _Shown(lambda: list(held.values()))
    elif isinstance(held, numpy.random.PCG64):
        shows["bits"] = _Shown(lambda: repr(held.state))
    elif isinstance(held, memoryview):
        shows["memory"] = _Shown(held.tobytes)
    elif isinstance(held, numpy.ndarray) and held.dtype == object:
        shows["items"] = _Shown(lambda: list(held))
    return trained(Doing(change, held), kept=shows)


class _Shown:
    """A holder that shows a function's result."""

    __slots__ = ("_value",)

    def __init__(self, value: Callable[[], Any]) -> None:
        self._value = value

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return {"value": self._value()}


# -- libraries ---------------------------------------------------------------------------------------------------------


def with_layer(how: Callable[[nn.Module], Any]) -> Training:
    net = Net()
    how(net.b)
    return trained(net)


def quantized_in_training() -> Training:
    """Build a training with fake quantization and moving-average observers."""
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    observed = FakeQuantize.with_args(
        observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8
    )
    return trained(mlp(observed(), nn.ReLU()))


def sparsified() -> Training:
    """Build a training with magnitude pruning that continues in the forward pass."""
    net = Net()
    prune.l1_unstructured(net.b, "weight", amount=2)

    def further(module: nn.Module, _: Any) -> None:
        module.weight_mask = module.weight_mask * (module.weight_orig.detach().abs() > 0.02)

    net.b.register_forward_pre_hook(further)
    return trained(net)


class Symmetric(nn.Module):
    """A parametrization with a call counter."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight * (1 + 0.01 * self.calls)


def cached_parametrization() -> Training:
    """Build a training with a parametrized weight that is computed once per pass."""
    net = Net()
    parametrize.register_parametrization(net.b, "weight", Symmetric())

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with parametrize.cached():
            return classified(model, batch) + classified(model, batch)

    return trained(net, loss)


def averaged_with_rates() -> Training:
    """Build a training with stochastic weight averaging: its schedule, and averages that the loss updates."""
    model = mlp(nn.BatchNorm1d(WIDTH))
    averaged = AveragedModel(model, use_buffers=True)
    optimizer = adamw(model.parameters())

    def loss(model: nn.Module, batch: Any) -> Tensor:
        averaged.update_parameters(model)
        return classified(model, batch)

    options = {"schedule": SWALR(optimizer, swa_lr=0.05, anneal_epochs=2), "recut_batch_norm": True}
    return Training(model, optimizer, loss, options=options, kept={"averaged": averaged})


def measured() -> Training:
    """Build a training with torchmetrics metrics that the loss updates."""
    from torchmetrics.classification import MulticlassAccuracy

    accuracy = MulticlassAccuracy(CLASSES)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch["x"])
        accuracy.update(out, batch["y"])
        return functional.cross_entropy(out, batch["y"]) * (1 + 0.1 * accuracy.compute())

    return trained(Net(), loss, kept={"accuracy": accuracy})


def checkpointed() -> Training:
    """Build a training of a model that checkpoints parts of itself, with dropout and a counter in them."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def part(self, h: Tensor) -> Tensor:
            self.calls += 1
            return functional.dropout(h, 0.2) * (1 + 0.01 * self.calls)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(checkpoint(self.part, self.features(x), use_reentrant=False))

    return trained(Checkpointed())


def stateless_ensemble() -> Training:
    """Build a training with two heads of stacked weights, called through `torch.func.vmap`."""
    base = nn.Linear(WIDTH, CLASSES)
    net = Net()
    net.heads = nn.ParameterDict({name: torch.stack([one, 2 * one]) for name, one in base.named_parameters()})

    def loss(model: Any, batch: Any) -> Tensor:
        h = model.features(batch["x"])
        outs = torch.func.vmap(lambda own: torch.func.functional_call(base, own, (h,)))(dict(model.heads))
        return functional.cross_entropy(outs.mean(0), batch["y"])

    return trained(net, loss)


def transformer(name: str, config: dict[str, Any], loss: Any = of_texts, **options: Any) -> Training:
    """Build a training of a transformers text classifier from its config."""
    import transformers

    alike = {"vocab_size": VOCABULARY, "num_labels": CLASSES, "max_position_embeddings": 40, "pad_token_id": 0}
    made = getattr(transformers, f"{name}Config")(**{**alike, **config})
    return trained(getattr(transformers, f"{name}ForSequenceClassification")(made), loss, **options)


SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
LLAMA = {**SIZES, "num_key_value_heads": 1, "attention_dropout": 0.1}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LIBRARIES: dict[str, Callable[[], Training]] = {
    "orthogonal": lambda: with_layer(parametrizations.orthogonal),
    "spectral_norm of an embedding": lambda: trained(_normalised_table()),
    "weight_norm by a hook": lambda: with_layer(nn.utils.weight_norm),
    "spectral_norm of a recurrent layer": lambda: trained(_normalised_recurrent()),
    "parametrization that counts, cached": cached_parametrization,
    "pruning that goes on": sparsified,
    "fake quantization": quantized_in_training,
    "averaged weights with their schedule": averaged_with_rates,
    "torchmetrics": measured,
    "checkpointed part that counts": checkpointed,
    "vmap of stacked weights": stateless_ensemble,
    "Llama, rotary positions": lambda: transformer("Llama", LLAMA),
    "Llama, rotary positions that grow": lambda: transformer(
        "Llama", {**LLAMA, "max_position_embeddings": 4, "rope_parameters": DYNAMIC}
    ),
    "BigBird, changes its attention": lambda: transformer(
        "BigBird", {**SIZES, "attention_type": "block_sparse", "block_size": 2}
    ),
    "ESM, cache of positions": lambda: transformer(
        "Esm", {**SIZES, "position_embedding_type": "rotary", "mask_token_id": 1}
    ),
    "DeBERTa, cached buckets": lambda: transformer(
        "DebertaV2", {**SIZES, "relative_attention": True, "position_buckets": 4, "pos_att_type": ["p2c", "c2p"]}
    ),
    "Funnel": lambda: transformer(
        "Funnel",
        {"d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 16, "block_sizes": [1, 1], "num_decoder_layers": 1},
    ),
}


def _normalised_table() -> nn.Module:
    net = Net()
    parametrizations.spectral_norm(net.e)
    return net


def _normalised_recurrent() -> nn.Module:
    net = Recurrent(nn.GRU)
    nn.utils.spectral_norm(net.r, "weight_hh_l0")
    return net


def kinds() -> list[Kind]:
    """Return all kinds of this module, with AdamW."""
    found = [Kind("hidden places", name, functools.partial(kept_elsewhere, *made)) for name, made in PLACES.items()]
    return [*found, *(Kind("libraries", name, make) for name, make in LIBRARIES.items())]
