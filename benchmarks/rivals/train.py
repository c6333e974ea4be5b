"""One training of the headline experiment with a tool other than Plimsoll, inside a limit on private memory.

    .rivals/huggingface/bin/python benchmarks/rivals/train.py TASK --tool trainer --micro-batch 4 --checkpointing
        [--limit-mib 2000] [--steps 5] --out result.json

Tools:

- ``plain``: the whole batch, or ``--micro-batch`` with manual accumulation;
- ``trainer``: Hugging Face Trainer;
- ``trainer-auto``: the same with ``auto_find_batch_size``;
- ``accelerate``: ``find_executable_batch_size`` around its loop, with accumulation to the whole batch;
- ``lightning``: the batch size of ``Tuner.scale_batch_size``, with accumulation to the whole batch;
- ``torchtune``: its optimizer in the backward pass and its chunked loss, which work only with whole batches.

``--checkpointing`` enables gradient checkpointing, if the model supports it.

All train the same weights on the same samples in the same order with AdamW and without dropout, so that the final
weights are equal. There is no clipping, which is impossible for an optimizer in the backward pass. A sample of the
weights is written, with the loss and the seconds of each step. The limit begins after the imports and counts private
memory from zero: ``RLIMIT_DATA`` is the requested limit plus the memory that is mapped but was never touched.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from models import Fields, batches, build
from torch import nn
from torch.utils.data import DataLoader

LEARNING_RATE = 1e-4
EVERY_WEIGHT = 997


class Steps:
    """The loss and the seconds of each optimizer step."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []
        self.begin()

    def begin(self) -> None:
        """Start the clock; the earlier search for a batch size does not count."""
        self.lines.clear()
        self.started = time.perf_counter()

    def end(self, loss: float) -> None:
        now = time.perf_counter()
        self.lines.append({"loss": loss, "seconds": now - self.started})
        self.started = now
        print(json.dumps(self.lines[-1]), flush=True)


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)


def micro_batches_of(batch: Fields, size: int) -> Iterator[tuple[Fields, float]]:
    """Yield the batch in micro-batches, each with its share of the samples."""
    num_samples = len(batch["input_ids"])
    for first in range(0, num_samples, size):
        micro_batch = {name: tensor[first : first + size] for name, tensor in batch.items()}
        yield micro_batch, len(micro_batch["input_ids"]) / num_samples


def checkpointed(model: nn.Module, is_wanted: bool) -> nn.Module:
    if is_wanted:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


# -- the tools ---------------------------------------------------------------------------------------------------------


def train_plainly(arguments: argparse.Namespace, steps: Steps) -> nn.Module:
    """Train in the usual tutorial loop, with accumulation that weights each micro-batch by its samples."""
    model = checkpointed(build(arguments.task), arguments.checkpointing)
    optimizer = adamw(model.parameters())
    steps.begin()
    for batch in batches(arguments.task)[: arguments.steps]:
        total = 0.0
        for micro_batch, share in micro_batches_of(batch, arguments.micro_batch):
            loss = model(**micro_batch).loss * share
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        steps.end(total)
    return model


def samples_of(arguments: argparse.Namespace) -> list[Fields]:
    """Return all samples in order, for tools that make batches themselves."""
    taken = batches(arguments.task)[: arguments.steps]
    return [
        {name: tensor[row] for name, tensor in batch.items()}
        for batch in taken
        for row in range(len(batch["input_ids"]))
    ]


def train_with_trainer(arguments: argparse.Namespace, steps: Steps) -> nn.Module:
    import tempfile

    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ends(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            steps.begin()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if "loss" in logs:
                steps.end(float(logs["loss"]))

    is_auto = arguments.tool == "trainer-auto"
    samples = samples_of(arguments)
    batch_size = len(samples) // arguments.steps
    size = batch_size if is_auto else arguments.micro_batch
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=size, gradient_accumulation_steps=batch_size // size,
            gradient_checkpointing=arguments.checkpointing, auto_find_batch_size=is_auto, learning_rate=LEARNING_RATE,
            weight_decay=0.0, max_grad_norm=0.0, lr_scheduler_type="constant", max_steps=arguments.steps,
            logging_steps=1, train_sampling_strategy="sequential", save_strategy="no", report_to=[], use_cpu=True,
            disable_tqdm=True, seed=0,
        )  # fmt: skip
        model = build(arguments.task)
        if samples[0]["labels"].dim() == 0:
            # Classifiers accept the label count and ignore it: with accumulation their gradients are too large.
            model.accepts_loss_kwargs = False
        trainer = Trainer(model, settings, train_dataset=samples, callbacks=[Ends()])
        trainer.train()
        return trainer.model


def train_with_accelerate(arguments: argparse.Namespace, steps: Steps) -> nn.Module:
    """Train with the decorator of its guide, and accumulate to the same whole batch."""
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    accelerator = Accelerator(cpu=True)

    @find_executable_batch_size(starting_batch_size=arguments.micro_batch)
    def inner_training_loop(batch_size: int) -> nn.Module:
        accelerator.free_memory()
        model = checkpointed(build(arguments.task), arguments.checkpointing)
        model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
        steps.begin()
        for batch in batches(arguments.task)[: arguments.steps]:
            total = 0.0
            for micro_batch, share in micro_batches_of(batch, batch_size):
                loss = model(**micro_batch).loss * share
                accelerator.backward(loss)
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            steps.end(total)
        return accelerator.unwrap_model(model)

    return inner_training_loop()


def train_with_lightning(arguments: argparse.Namespace, steps: Steps) -> nn.Module:
    import tempfile

    import lightning
    from lightning.pytorch.tuner import Tuner

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = checkpointed(build(arguments.task), arguments.checkpointing)
            self.batch_size = 1
            self.losses: list[float] = []

        def training_step(self, batch: Fields, _: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def train_dataloader(self) -> DataLoader[Fields]:
            return DataLoader(samples, batch_size=self.batch_size)  # type: ignore[arg-type]

        def configure_optimizers(self) -> torch.optim.AdamW:
            return adamw(self.parameters())

    class Ends(lightning.Callback):
        def on_train_start(self, *args: Any) -> None:
            steps.begin()

        def on_train_batch_end(self, trainer: Any, module: Module, *args: Any) -> None:
            if trainer.global_step > len(steps.lines):
                steps.end(sum(module.losses) / len(module.losses))
                module.losses.clear()

    samples = samples_of(arguments)
    whole = len(samples) // arguments.steps
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=arguments.steps, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, callbacks=[Ends()],
        )  # fmt: skip
        module = Module()
        num_trials = 1 + int(math.log2(arguments.micro_batch))
        Tuner(trainer).scale_batch_size(module, mode="power", init_val=1, max_trials=num_trials)
        module.batch_size = min(module.batch_size, arguments.micro_batch)
        trainer.accumulate_grad_batches = whole // module.batch_size
        module.losses.clear()
        trainer.fit(module)
        return module.model


def train_with_torchtune(arguments: argparse.Namespace, steps: Steps) -> nn.Module:
    """Train with its single-device recipe: updates in the backward pass, logits and loss in chunks."""
    from torchtune.modules.loss import CEWithChunkedOutputLoss
    from torchtune.training.memory import create_optim_in_bwd_wrapper, register_optim_in_bwd_hooks

    model = checkpointed(build(arguments.task), arguments.checkpointing)
    optimizers = {parameter: adamw([parameter]) for parameter in model.parameters()}
    register_optim_in_bwd_hooks(model=model, optim_dict=optimizers)
    create_optim_in_bwd_wrapper(model=model, optim_dict=optimizers)
    loss_of = chunked(model, CEWithChunkedOutputLoss()) or (lambda batch: model(**batch).loss)
    steps.begin()
    for batch in batches(arguments.task)[: arguments.steps]:
        loss = loss_of(batch)
        loss.backward()
        steps.end(loss.item())
    return model


def chunked(model: nn.Module, cross_entropy: Any) -> Callable[[Fields], torch.Tensor] | None:
    """Return a language model's loss from chunks of its logits, or None for a classifier, which has few logits."""
    name = type(model).__name__
    if name == "BertForSequenceClassification":
        return None

    def loss_of(batch: Fields) -> torch.Tensor:
        ids = batch["input_ids"]
        if name == "GPT2LMHeadModel":
            hidden, labels, head = model.transformer(input_ids=ids).last_hidden_state[:, :-1], ids[:, 1:], model.lm_head
        elif name == "LSTMLanguageModel":
            hidden, labels, head = model.recurrent(model.embedding(ids[:, :-1]))[0], ids[:, 1:], model.head
        else:
            (hidden, labels), head = model.hidden(ids), model.lm_head
        num_chunks = cross_entropy.num_output_chunks
        return cross_entropy([head(chunk) for chunk in hidden.chunk(num_chunks, dim=1)], labels)

    return loss_of


TOOLS = {
    "plain": train_plainly,
    "trainer": train_with_trainer,
    "trainer-auto": train_with_trainer,
    "accelerate": train_with_accelerate,
    "lightning": train_with_lightning,
    "torchtune": train_with_torchtune,
}


# -- the limit and the result ------------------------------------------------------------------------------------------


def limit_private_memory(limit_bytes: int) -> None:
    """Make the kernel refuse private memory beyond the limit, counted from zero."""
    torch.randn(256, 256, requires_grad=True).mm(torch.randn(256, 256)).sum().backward()  # starts the threads
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mapped, touched = (int(status[name].split()[0]) << 10 for name in ("VmData", "RssAnon"))
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes + max(0, mapped - touched), resource.RLIM_INFINITY))


def sampled(model: nn.Module) -> dict[str, list[float]]:
    """Return every `EVERY_WEIGHT`-th weight of each parameter."""
    return {name: tensor.detach().flatten()[::EVERY_WEIGHT].tolist() for name, tensor in model.named_parameters()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", type=Path)
    parser.add_argument("--tool", choices=TOOLS, required=True)
    parser.add_argument("--micro-batch", type=int, required=True, help="samples; the maximum for tools that search")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--limit-mib", type=int)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.tool == "lightning":
        import lightning  # noqa: F401  -- all imports come before the limit
        from lightning.pytorch.tuner import Tuner  # noqa: F401
    elif arguments.tool == "torchtune":
        import torchtune.modules.loss
        import torchtune.training.memory  # noqa: F401
    elif arguments.tool != "plain":
        import accelerate  # noqa: F401
        from transformers import Trainer  # noqa: F401
    if arguments.limit_mib:
        limit_private_memory(arguments.limit_mib << 20)
    steps = Steps()
    model = TOOLS[arguments.tool](arguments, steps)
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    arguments.out.write_text(json.dumps({"steps": steps.lines, "weights": sampled(model)}))


if __name__ == "__main__":
    main()
