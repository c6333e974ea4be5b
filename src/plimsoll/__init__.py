"""Plimsoll: PyTorch NLP training that stays inside a memory budget.

    step = plimsoll.TrainStep(model, optimizer, units="next-tokens")
    for batch in loader:
        result = step(batch)  # if memory runs out, the step is undone and repeated in smaller micro-batches

Public names are imported on first use, so ``import plimsoll`` does not import torch.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from plimsoll.files import former_modules
from plimsoll.records import Shown

if TYPE_CHECKING:
    from plimsoll.device.base import limited as limited
    from plimsoll.device.probe import probe_machine as probe  # noqa: F401
    from plimsoll.diagnose.explain import explain as explain
    from plimsoll.diagnose.live import explained as explained
    from plimsoll.models.loading import Loaded as Loaded
    from plimsoll.models.loading import load_model as load_model
    from plimsoll.models.recurrent.cells import UnrolledCell as UnrolledCell
    from plimsoll.planning.measured_choice import try_plan as try_plan
    from plimsoll.planning.plan import plan_job as plan_job
    from plimsoll.planning.plan import plan_step as plan_step
    from plimsoll.planning.predict_job import predict_job as predict_job
    from plimsoll.planning.predict_step import predict as predict
    from plimsoll.planning.predict_step import predict_function as predict_function
    from plimsoll.planning.rows_by_length import rows_by_length as rows_by_length
    from plimsoll.records.diagnosis import Diagnosis as Diagnosis
    from plimsoll.records.job import Job as Job
    from plimsoll.records.plan import Plan as Plan
    from plimsoll.records.prediction import Prediction as Prediction
    from plimsoll.records.run import OomEvent as OomEvent
    from plimsoll.records.run import RunRecord as RunRecord
    from plimsoll.report.render import render as render
    from plimsoll.step.result import StepResult as StepResult
    from plimsoll.step.train_step import TrainStep as TrainStep

_HOMES = {
    "Diagnosis": ("plimsoll.records.diagnosis", "Diagnosis"),
    "Job": ("plimsoll.records.job", "Job"),
    "Loaded": ("plimsoll.models.loading", "Loaded"),
    "OomEvent": ("plimsoll.records.run", "OomEvent"),
    "RunRecord": ("plimsoll.records.run", "RunRecord"),
    "StepResult": ("plimsoll.step.result", "StepResult"),
    "Plan": ("plimsoll.records.plan", "Plan"),
    "Prediction": ("plimsoll.records.prediction", "Prediction"),
    "TrainStep": ("plimsoll.step.train_step", "TrainStep"),
    "UnrolledCell": ("plimsoll.models.recurrent.cells", "UnrolledCell"),
    "explain": ("plimsoll.diagnose.explain", "explain"),
    "explained": ("plimsoll.diagnose.live", "explained"),
    "limited": ("plimsoll.device.base", "limited"),
    "load_model": ("plimsoll.models.loading", "load_model"),
    "plan_job": ("plimsoll.planning.plan", "plan_job"),
    "plan_step": ("plimsoll.planning.plan", "plan_step"),
    "predict": ("plimsoll.planning.predict_step", "predict"),
    "predict_function": ("plimsoll.planning.predict_step", "predict_function"),
    "predict_job": ("plimsoll.planning.predict_job", "predict_job"),
    "rows_by_length": ("plimsoll.planning.rows_by_length", "rows_by_length"),
    "probe": ("plimsoll.device.probe", "probe_machine"),
    "try_plan": ("plimsoll.planning.measured_choice", "try_plan"),
    "render": ("plimsoll.report.render", "render"),
}
__all__ = list(_HOMES)

# transformers imports torchao if it is installed. These loggers then warn about kernels that are not used here.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


former_modules.install()


def _to_html(record: Any) -> str | None:
    html: str | None = import_module("plimsoll.report.notebook").notebook_html(record)
    return html


Shown.to_html = staticmethod(_to_html)


_ADAPTERS = {"accelerate", "lightning", "transformers"}


def __getattr__(name: str) -> Any:
    if name in _ADAPTERS:
        return import_module(f"plimsoll.integrations.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
