"""A comparison of fine-tuning strategies within a budget: all weights, all weights streamed, and adapters.

    strategies = compare_strategies(job, device="cpu", limit_bytes=2 << 30)

Each strategy is planned as by `plimsoll plan`, with its techniques pinned and allowed. The reported peak and step time
are from a dry run of the fastest combination found. The cost of a strategy in quality is not predicted: measure it on
the data.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from plimsoll.errors import InputError, PlimsollError
from plimsoll.planning.baseline import StartedBaseline
from plimsoll.planning.cached_baseline import Baseline, cached_baseline
from plimsoll.planning.plan import device_of_job, plan_job
from plimsoll.records.comparison import Calibration
from plimsoll.records.job import Job
from plimsoll.records.plan import Pin, Plan
from plimsoll.records.strategies import Strategies, Strategy

# The comparison names these techniques explicitly.
from plimsoll.techniques.layer_streaming import LayerStreaming
from plimsoll.techniques.lora import Lora
from plimsoll.techniques.parameter_offload import ParameterOffload

Progress = Callable[[str], None]

_STREAMED = {"cpu": ParameterOffload.name, "cuda": LayerStreaming.name}
_ADAPTERS = "other model: low-rank adapters on frozen weights"


class _Wanted(NamedTuple):
    name: str
    changes: str
    pins: tuple[Pin, ...] = ()
    forbids: tuple[str, ...] = ()
    is_lossy: bool = False


def _wanted(kind: str) -> tuple[_Wanted, ...]:
    streamed = _STREAMED[kind]

    def adapters(name: str, base: str, changes: str) -> _Wanted:
        return _Wanted(name, changes, (Pin(technique=Lora.name, options={"base": base}),), is_lossy=True)

    return (
        _Wanted("full", "nothing", forbids=(streamed,)),
        _Wanted("full, weights streamed", "nothing: the same numbers, more slowly", (Pin(technique=streamed),)),
        adapters("LoRA", "kept", _ADAPTERS),
        adapters("LoRA, base of 8 bits", "int8", f"{_ADAPTERS}, which are rounded to 8 bits"),
        adapters("LoRA, base of 4 bits", "nf4", f"{_ADAPTERS}, which are rounded to 4 bits"),
    )


def compare_strategies(
    job: Job,
    *,
    device: str | None = None,
    limit_bytes: int | None = None,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
    on_strategy: Callable[[Strategy], object] = lambda strategy: None,
    started: Baseline | None = None,
) -> Strategies:
    """Plan each strategy. For the arguments see `plan_job`; ``on_strategy`` is called with each planned strategy.

    Raises:
        JobError: if the model or the optimizer cannot be built.
        DeviceError: if there is no such device.
        BudgetError: if the device has less than the budget.
    """
    say = progress or (lambda text: None)
    kind = "cpu" if device_of_job(job, device) == "cpu" else "cuda"
    strategies, plans = list[Strategy](), list[Plan]()
    with ExitStack() as stack:
        # All strategies share the baseline. The speed of the device is cached in a file anyway.
        if kind == "cpu" and started is None:
            started = stack.enter_context(cached_baseline(job, lambda: StartedBaseline(job)))
        for wanted in _wanted(kind):
            try:
                plan = plan_job(
                    _allowing(job, wanted),
                    device=device,
                    limit_bytes=limit_bytes,
                    pins=wanted.pins,
                    forbids=wanted.forbids,
                    calibration=calibration,
                    progress=lambda text, name=wanted.name: say(f"{name}: {text}"),  # type: ignore[misc]
                    started=started,
                )
                plans.append(plan)
                strategy = _strategy(wanted, plan)
            except InputError as error:
                if type(error) is not InputError or not wanted.pins:  # an error in the job affects every strategy
                    raise
                strategy = _impossible(wanted, error)
            strategies.append(strategy)
            on_strategy(strategy)
    prediction = plans[0].prediction
    assert prediction is not None
    return Strategies(
        subject=prediction.subject,
        device=prediction.device,
        limit_bytes=prediction.limit_bytes,
        strategies=tuple(strategies),
    )


def _allowing(job: Job, wanted: _Wanted) -> Job:
    """Return the job with adapters allowed or disallowed."""
    others = tuple(name for name in job.allow if name != Lora.name)
    return job.model_copy(update={"allow": (*others, Lora.name) if wanted.is_lossy else others})


def _strategy(wanted: _Wanted, plan: Plan) -> Strategy:
    configuration = plan.fallbacks[0]
    return Strategy(
        name=wanted.name,
        changes=wanted.changes,
        how=_how(wanted),
        choices=configuration.choices,
        peak=configuration.peak,
        step_time=configuration.step_time,
        smallest_budget_bytes=plan.smallest_budget_bytes,
    )


def _impossible(wanted: _Wanted, error: PlimsollError) -> Strategy:
    reason = str(error).partition("it cannot be used here: ")[2] or str(error)
    return Strategy(
        name=wanted.name, changes=wanted.changes, how=_how(wanted), impossible=reason.removesuffix("; leave it out")
    )


def _how(wanted: _Wanted) -> str:
    words = ["--set 'allow=[lora]'"] if wanted.is_lossy else []
    words += [f"--pin '{pin}'" if pin.options else f"--pin {pin}" for pin in wanted.pins]
    return " ".join([*words, *(f"--forbid {name}" for name in wanted.forbids)])
