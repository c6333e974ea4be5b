"""Predictions of other tools for a training; `rivals_prediction.py` starts it in the environment ``predictors``.

    .rivals/predictors/bin/python benchmarks/rivals/predictors.py TOOL < questions.json

A question is the name of a case of `trainings.py`, or a row of measured GPU runs (a list: model, optimizer, batch size,
place of zero_grad, GPU). Each is answered in a fork of this process after its imports, as one JSON line. It has the
bytes, the part that is not tensors of the training (a CUDA context), and a range if the tool gives one. It also has
seconds, and the memory of the process. A missing answer has a reason.

The tools are set up as documented:

- ``accelerate``: the functions behind ``accelerate estimate-memory``. The command itself first asks the Hugging Face
  hub about the model, even for a folder, so it cannot be used for a local model. Its figure for training is used: for
  Adam, batch size 1 and float32.
- ``mem_tracker``: torch's ``MemTracker`` under ``FakeTensorMode``, two steps. For GPU runs, CPU tensors and the
  ``foreach`` optimizers of CUDA are used, because a CPU build of torch cannot train fake CUDA tensors. There is no
  padding mask: some models read its values, which fake tensors do not have.
- ``kitsune``: ``predict_hf_memory`` on a folder with the configuration, ``predict_memory`` for other models; with batch
  size, sequence length, dtype and optimizer.
- ``preflight``: known architectures by name, others by an entry point, a function that creates the model. Such a model
  is called with tokens only, so the function returns one with a loss. If the model cannot be called on the meta device,
  the formulas for a ``config.json`` of the hub are used. Inputs are batch size, sequence length, dtype, optimizer, and
  the use of torch's SDPA.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trainings
import transformers
from torch import nn

GPU_LENGTH = 128
Answer = dict[str, Any]
Question = str | list[Any]


# -- what is asked -----------------------------------------------------------------------------------------------------


class Asked:
    """A training in the terms of these tools."""

    def __init__(self, question: Question) -> None:
        if isinstance(question, str):
            case = trainings.case_named(question)
            self.model_name, self.kind = case.name, case.kind
            self.batch_size, self.length, self.optimizer = case.batch_size, case.length, case.optimizer
            self.zero_grad, self.is_gpu = 2, False
            self.make: Callable[[], nn.Module] = lambda: trainings.build(case)
            self.config: Callable[[], Any] = lambda: trainings.config_of(case)
            return
        sys.path.append(str(Path(__file__).parents[1]))
        from _measured_models import MODELS, build

        name, self.optimizer, self.batch_size, self.zero_grad, _ = question
        self.model_name, self.kind, self.length, self.is_gpu = name, "huggingface", GPU_LENGTH, True
        self.make = lambda: build(name)
        self.config = lambda: getattr(transformers, MODELS[name][1])(**MODELS[name][2])

    @property
    def uses_sdpa(self) -> bool:
        with torch.device("meta"):
            model = self.make()
        return getattr(getattr(model, "config", None), "_attn_implementation", "") == "sdpa"

    @property
    def is_recurrent(self) -> bool:
        return self.kind == "lstm"


# -- the tools ---------------------------------------------------------------------------------------------------------


def accelerate(asked: Asked) -> Answer:
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    with init_empty_weights():
        if asked.is_recurrent:
            model = asked.make()
        else:
            model = transformers.AutoModel.from_config(asked.config(), torch_dtype=torch.float32)
    total_bytes, _ = calculate_maximum_sizes(model)
    return {"bytes": max(estimate_training_usage(total_bytes, "float32").values())}


def mem_tracker(asked: Asked) -> Answer:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        model = asked.make()
        optimizer = make_optimizer(asked, model)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for number in range(2):
                outputs = one_step(asked, model, optimizer)
                if number == 0:  # otherwise a second call of the model is refused
                    tracker.reset_mod_stats()
        del outputs
    return {"bytes": tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]}


def make_optimizer(asked: Asked, model: nn.Module) -> torch.optim.Optimizer:
    if asked.optimizer == "Adafactor":
        return transformers.Adafactor(model.parameters(), lr=1e-3, relative_step=False)
    foreach = {"foreach": True} if asked.is_gpu else {}
    return getattr(torch.optim, asked.optimizer)(model.parameters(), lr=1e-3, **foreach)


def one_step(asked: Asked, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Perform a step of the measured loop; its outputs stay alive until the next step, as in the measurement."""
    tokens = torch.randint(1000, (asked.batch_size, asked.length))
    if not asked.is_gpu:
        return trainings.step(model, optimizer, {"input_ids": tokens, "labels": tokens.clone()})
    if asked.zero_grad == 0:
        optimizer.zero_grad()
    outputs = model(input_ids=tokens, labels=tokens.clone())
    if asked.zero_grad == 1:
        optimizer.zero_grad()
    outputs.loss.backward()
    optimizer.step()
    if asked.zero_grad == 2:
        optimizer.zero_grad()
    return outputs


def kitsune(asked: Asked) -> Answer:
    from kitsune.predict import predict_hf_memory, predict_memory

    wanted = {"batch_size": asked.batch_size, "dtype": "float32", "optimizer": asked.optimizer.lower()}
    if asked.is_recurrent:
        found = predict_memory(asked.make(), input_shape=(asked.length,), training=True, **wanted)
    else:
        with tempfile.TemporaryDirectory() as folder:
            asked.config().save_pretrained(folder)
            found = predict_hf_memory(folder, seq_len=asked.length, training=True, **wanted)
    return {"bytes": found.total_bytes}


def preflight(asked: Asked) -> Answer:
    from torch_preflight import vram

    name = asked.model_name.split("/")[-1].lower()
    known = vram.archdb.lookup(name) if asked.is_gpu else None
    config = vram.RunConfig(
        batch_size=asked.batch_size,
        seq_len=asked.length,
        precision=vram.PrecisionMode("fp32"),
        optimizer=vram.OptimizerKind(asked.optimizer.lower()),
        flash_attention=asked.uses_sdpa,
    )
    sys.modules["asked_for"] = module = type(sys)("asked_for")
    module.make = lambda: trainings.with_loss(asked.make())
    profile = vram.resolve_profile(name if known else "asked_for:make", config=config)
    report = vram.estimate_config(profile, config)
    if not report.breakdown.activations and not asked.is_recurrent:
        report = vram.estimate_config(by_formula(asked), config)
    if not report.breakdown.activations:
        raise RuntimeError("; ".join(report.notes))
    low_bytes, high_bytes = report.interval
    return {
        "bytes": report.total,
        "low_bytes": low_bytes,
        "high_bytes": high_bytes,
        "context_bytes": report.breakdown.cuda_context,
        "way": report.profile.source,
    }


def by_formula(asked: Asked) -> Any:
    """Compute the result of ``--online`` from the hub's ``config.json``, which is written out here."""
    from torch_preflight.vram import Confidence, ModelProfile
    from torch_preflight.vram.costmodel import params_from_transformer_shape
    from torch_preflight.vram.providers.hub import shape_from_config
    from torch_preflight.vram.types import ModelKind

    with torch.device("meta"):
        architecture = type(asked.make()).__name__
    shape = shape_from_config(asked.config().to_dict() | {"architectures": [architecture]})
    number = params_from_transformer_shape(shape)
    kind = {"kind": ModelKind.TRANSFORMER, "shape": shape, "confidence": Confidence.MEDIUM}
    return ModelProfile(asked.model_name, number, number, source="formula", **kind)


TOOLS: dict[str, Callable[[Asked], Answer]] = {
    "accelerate": accelerate, "mem_tracker": mem_tracker, "kitsune": kitsune, "preflight": preflight,
}  # fmt: skip
IMPORTS = {
    "accelerate": "import accelerate.commands.estimate, accelerate.utils",
    "mem_tracker": "import torch.distributed._tools.mem_tracker, torch._subclasses.fake_tensor",
    "kitsune": "import kitsune.predict",
    "preflight": "import torch_preflight.vram",
}


# -- the process -------------------------------------------------------------------------------------------------------


def answer(tool: str, question: Question) -> Answer:
    asked = Asked(question)
    started = time.perf_counter()
    try:
        found = TOOLS[tool](asked)
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
        found = {"bytes": None, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    found["seconds"] = time.perf_counter() - started
    found["memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def main() -> None:
    tool = sys.argv[1]
    transformers.utils.logging.set_verbosity_error()
    exec(IMPORTS[tool])
    for question in json.load(sys.stdin):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            print(json.dumps(answer(tool, question)), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            print(json.dumps({"bytes": None, "error": "the process died", "seconds": 0, "memory_bytes": 0}))


if __name__ == "__main__":
    main()
