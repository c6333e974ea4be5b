"""Optimizers of other packages, whose updates run out of memory at one allocation after another.

    python benchmarks/foreign_optimizers.py [--failures 200] [--only NAME ...]

Each optimizer trains a small model in `plimsoll.TrainStep`. One run without failures is compared with the plain loop.
Every other run fails at one allocation of an update, with the allocator's own error, and must end with the same bits.
Compared are weights, the optimizer's complete state, and weight averages that a hook keeps. In further runs, every
allocation from one on fails until the step raises. Then all state must be as before that step.

Packages that are not installed are skipped and listed. "Caught" counts failures that the optimizer itself catches and
works around, as SOAP does with a decomposition: nobody else sees them, and the plain loop behaves alike. Does NOT cover
failures outside the update, and optimizer state that is unreachable through ``vars`` and containers.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from _results import table
from plimsoll import TrainStep
from plimsoll.errors import AfterUpdateError, OutOfMemoryError, TornStepError
from plimsoll.step.failpoints import exhaust_memory
from plimsoll.step.update.commit import StepCommit

STEPS = (4, 8, 16, 32)
"""Numbers of steps to try, until there are enough allocations to fail."""

Maker = Callable[[nn.Module], tuple[torch.optim.Optimizer, Any]]
"""Makes an optimizer of a model, and an object that must be equal at the end as well."""


def build_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(30, 8), nn.Flatten(), nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 3))


def seed_all() -> None:
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def batch_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randint(30, (8, 4), generator=generator), "y": torch.randint(3, (8,), generator=generator)}


# -- the optimizers ----------------------------------------------------------------------------------------------------


def by_class(path: str, matrices_only: bool = False, **arguments: Any) -> Maker:
    """Return a maker of an optimizer class; it raises `ImportError` if the package is not installed."""

    def make(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        if matrices_only:
            for parameter in model.parameters():
                parameter.requires_grad_(parameter.ndim == 2)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)(parameters, **arguments), None

    return make


def of_low_rank(path: str, **arguments: Any) -> Maker:
    """Return a maker of an optimizer that projects the gradients of matrices."""

    def make(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        module, _, name = path.rpartition(".")
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
        groups = [{"params": others}, {"params": matrices, "rank": 2, "update_proj_gap": 2, "scale": 0.25, **arguments}]
        return getattr(importlib.import_module(module), name)(groups, lr=0.01), None

    return make


def by_use_of_muon(path: str) -> Maker:
    """Return a maker of an optimizer that is told which groups are matrices."""

    def make(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        module, _, name = path.rpartition(".")
        of_kind = {
            is_matrix: [one for one in model.parameters() if (one.ndim == 2) == is_matrix]
            for is_matrix in (True, False)
        }
        groups = [{"params": parameters, "use_muon": is_matrix} for is_matrix, parameters in of_kind.items()]
        return getattr(importlib.import_module(module), name)(groups), None

    return make


def averaged(make_average: Callable[[nn.Module], tuple[Any, Callable[[nn.Module], None]]]) -> Maker:
    """Return a maker of AdamW with a hook that keeps an average of the weights."""

    def make(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        average, update = make_average(model)
        optimizer.register_step_post_hook(lambda *_: update(model))
        return optimizer, average

    return make


def timm_average(model: nn.Module) -> tuple[Any, Callable[[nn.Module], None]]:
    average = importlib.import_module("timm.utils").ModelEmaV3(model, decay=0.9)
    return average, average.update


def torch_average(model: nn.Module) -> tuple[Any, Callable[[nn.Module], None]]:
    average = torch.optim.swa_utils.AveragedModel(model)
    return average, average.update_parameters


def lookahead(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    kind = importlib.import_module("pytorch_optimizer").Lookahead
    return kind(torch.optim.AdamW(model.parameters(), lr=0.01), k=2), None


_PYTORCH_OPTIMIZER = [
    "Lion", "SOAP", "Shampoo", "ScalableShampoo", "Lamb", "LARS", "Kron", "AdaBelief", "Adan",
    "CAME", "StableAdamW", "DAdaptAdam", "Prodigy", "ScheduleFreeAdamW", "Tiger", "MADGRAD", "GaLore", "AdEMAMix",
]  # fmt: skip

KINDS: dict[str, Maker] = {
    "torch Muon": by_class("torch.optim.Muon", matrices_only=True, lr=0.01),
    "torch SGD, Nesterov, foreach": by_class("torch.optim.SGD", lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "torch Rprop, foreach": by_class("torch.optim.Rprop", lr=0.01, foreach=True),
    "torch AdamW + swa_utils.AveragedModel": averaged(torch_average),
    "torch AdamW + timm ModelEmaV3": averaged(timm_average),
    "prodigyopt Prodigy": by_class("prodigyopt.Prodigy"),
    "schedulefree AdamW": by_class("schedulefree.AdamWScheduleFree", lr=0.01, warmup_steps=2),
    "lion_pytorch Lion": by_class("lion_pytorch.Lion", lr=0.01),
    "dadaptation Adam": by_class("dadaptation.DAdaptAdam"),
    "galore_torch AdamW": of_low_rank("galore_torch.GaLoreAdamW", proj_type="std"),
    "apollo_torch AdamW": of_low_rank("apollo_torch.APOLLOAdamW", proj="random", scale_type="channel", proj_type="std"),
    "bitsandbytes AdamW8bit": by_class("bitsandbytes.optim.AdamW8bit", lr=0.01, min_8bit_size=16),
    "torchao AdamW8bit": by_class("torchao.optim.AdamW8bit", lr=0.01, block_size=8),
    "torchao AdamW4bit": by_class("torchao.optim.AdamW4bit", lr=0.01, block_size=8),
    "pytorch_optimizer Lookahead": lookahead,
    "pytorch_optimizer Ranger21": by_class("pytorch_optimizer.Ranger21", num_iterations=50),
    "pytorch_optimizer Muon": by_use_of_muon("pytorch_optimizer.Muon"),
    **{f"pytorch_optimizer {name}": by_class(f"pytorch_optimizer.{name}") for name in _PYTORCH_OPTIMIZER},
}


# -- runs --------------------------------------------------------------------------------------------------------------


class Failing(TorchDispatchMode):
    """Counts allocations, and makes some of them run out of memory."""

    def __init__(self, fails: Callable[[int], bool]) -> None:
        super().__init__()
        self._fails, self.count = fails, 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Ignore compiled updates: their allocations are neither counted nor made to fail."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_new = any(one.alias_info is None for one in func._schema.returns)
        if is_new and isinstance(result, Tensor) and result.numel():
            self.count += 1
            if self._fails(self.count):
                exhaust_memory()
        return result


class Run:
    """A training from the start."""

    def __init__(self, make: Maker, fails: Callable[[int], bool] = lambda count: False) -> None:
        seed_all()
        self.model = build_model()
        self.optimizer, self.average = make(self.model)
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()
        self.step = TrainStep(self.model, self.optimizer, loss_of, units="samples")
        # In chunks, as on a GPU: an update in one chunk has its memory reserved in advance and cannot run out of it.
        self.commit = StepCommit(self.optimizer, self.step.backend, self.step.position, chunk_bytes=1)
        self.step._commit = self.commit
        self.num_events = 0
        self.failing, self._update = Failing(fails), self.commit.step
        self.commit.step = self._failing_update  # type: ignore[method-assign]

    def _failing_update(self) -> None:
        with self.failing:
            self._update()

    def go(self, num_steps: int) -> Run:
        for seed in range(self.step.num_steps, num_steps):
            self.num_events += len(self.step(batch_of(seed)).oom_events)
        return self

    def state(self) -> list[Any]:
        return [*bits([self.model.state_dict(), self.optimizer, self.average])]


def bits(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yield everything inside a value in a fixed order, as comparable objects."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):
            yield from (one for name in value.__tensor_flatten__()[0] for one in bits(getattr(value, name), seen))
        else:
            yield value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, int | float | str | bool | type(None)):
        yield value
    elif (id(value) not in seen and not callable(value)) or isinstance(value, nn.Module):
        seen.add(id(value))
        if isinstance(value, dict):
            yield from (one for key, item in value.items() if "hook" not in str(key) for one in bits(item, seen))
        elif isinstance(value, list | tuple | set):
            yield from (one for item in value for one in bits(item, seen))
        else:
            yield from bits(getattr(value, "__dict__", None), seen)


def plain_weights(make: Maker, num_steps: int) -> dict[str, Tensor]:
    seed_all()
    model = build_model()
    optimizer, _ = make(model)
    if hasattr(optimizer, "train"):
        optimizer.train()
    for seed in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, batch_of(seed)).backward()
        optimizer.step()
    return model.state_dict()


def of_one_failure(make: Maker, num_steps: int, number: int, expected: list[Any]) -> str:
    run = Run(make, lambda count: count == number)
    try:
        run.go(num_steps)
    except TornStepError:
        return "torn"
    except OutOfMemoryError:
        return "refused"
    except Exception as error:  # noqa: BLE001 - a raw error is what is looked for
        return f"raw: {type(error).__name__}: {error}"
    if run.state() == expected:
        return "equal"
    return "different" if run.num_events else "caught"


def of_failures_from(make: Maker, num_steps: int, number: int) -> str:
    run = Run(make, lambda count: count >= number)
    before = run.state()
    try:
        for seed in range(num_steps):
            before = run.state()
            run.go(seed + 1)
    except AfterUpdateError:
        return "after"
    except TornStepError:
        return "torn"
    except OutOfMemoryError:
        return "as before" if run.state() == before else "changed"
    except Exception as error:  # noqa: BLE001 - a raw error is what is looked for
        return f"raw: {type(error).__name__}: {error}"
    return "none"


def spread(most: int, wanted: int) -> list[int]:
    """Return ``wanted`` of the numbers up to ``most``, evenly spaced."""
    return sorted(
        {1 + index * most // wanted for index in range(min(wanted, most))} if most > wanted else range(1, most + 1)
    )


def of_kind(make: Maker, num_failures: int) -> tuple[str, Counter[str], Counter[str]]:
    num_steps = next((steps for steps in STEPS if Run(make).go(steps).failing.count >= num_failures), STEPS[-1])
    clean = Run(make).go(num_steps)
    expected, weights = clean.state(), clean.model.state_dict()
    is_same = Run(make).go(num_steps).state() == expected
    plain = plain_weights(make, num_steps)
    is_plain = all(torch.equal(weights[name], value) for name, value in plain.items())
    numbers = spread(clean.failing.count, num_failures)
    once = Counter(of_one_failure(make, num_steps, number, expected) for number in numbers)
    on = Counter(
        of_failures_from(make, num_steps, number) for number in spread(clean.failing.count, max(num_failures // 10, 1))
    )
    return ("yes" if is_plain else "NO") if is_same else "not deterministic", once, on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=int, default=200, help="runs with one failure, for each optimizer")
    parser.add_argument("--only", nargs="*", help="only optimizers whose names contain one of these")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows, missing = [], []
    for name, make in KINDS.items():
        if arguments.only and not any(part in name for part in arguments.only):
            continue
        try:
            Run(make).go(1)
            gc.freeze()  # skip the imported objects when searching after each failure
            as_plain, once, on = of_kind(make, arguments.failures)
        except ImportError as error:
            missing.append(f"{name} ({error})")
            continue
        rows.append((name, as_plain, once, on))
        print(name, as_plain, dict(once), dict(on), flush=True)
    print("not installed:", ", ".join(missing) or "none")
    print(shown(rows))


def shown(rows: list[tuple[str, str, Counter[str], Counter[str]]]) -> str:
    heads = ["optimizer", "as the plain loop", "failures", "equal", "caught", "different", "named", "raw",
             "exhausted", "as before", "changed", "named", "raw"]  # fmt: skip
    lines = []
    for name, as_plain, once, on in rows:
        raw, raw_on = (sum(count for key, count in of.items() if key.startswith("raw")) for of in (once, on))
        lines.append(
            [name, as_plain, once.total(), once["equal"], once["caught"], once["different"],
             once["torn"] + once["refused"], raw,
             on.total(), on["as before"], on["changed"], on["torn"] + on["after"], raw_on]
        )  # fmt: skip
    return table(heads, lines)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
