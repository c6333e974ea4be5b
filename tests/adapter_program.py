"""A program that trains 64 samples in 8 batches through an adapter; from the fifth batch on, memory really runs out.

    python adapter_program.py accelerate|lightning undisturbed|limited RESULT

The model's memory grows with the number of samples in a pass. From the fifth batch on, 8 samples do not fit under the
limit and 4 do. RESULT gets the samples of each pass that finished backward, the steps and the weights.
"""

import json
import logging
import sys
import warnings
from contextlib import nullcontext

import torch
from torch import nn

import plimsoll
from plimsoll.device.base import backend_for

MIB = 2**20
NUM_SAMPLES, BATCH_SIZE, FROM_BATCH = 64, 8, 5


class Hungry(nn.Module):
    """A linear model that keeps 40 MiB for each late sample until its backward pass, and records finished samples."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.passes = []

    def forward(self, batch):
        numbers = batch["number"].tolist()
        is_late = numbers[0] >= (FROM_BATCH - 1) * BATCH_SIZE
        held = [torch.zeros(40 * MIB // 4) for _ in numbers] if is_late else []
        output = self.layer(batch["x"])

        def came_back(_):
            held.clear()  # objects in a hook live as long as the graph
            self.passes.append(numbers)

        output.register_hook(came_back)
        return (output - batch["y"]).square().mean()


def data():
    torch.manual_seed(0)
    samples = [{"number": torch.tensor(n), "x": torch.randn(4), "y": torch.randn(1)} for n in range(NUM_SAMPLES)]
    return torch.utils.data.DataLoader(samples, batch_size=BATCH_SIZE)


def with_accelerate(model, limited):
    from accelerate import Accelerator

    from plimsoll.integrations import accelerate as oom_proof

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, data())
    step = oom_proof.step(accelerator, model, optimizer, lambda model, batch: model(batch), units="samples")
    with limited():
        num_updates = sum(step(batch).updated for batch in loader)
    return num_updates, step.transaction.num_ooms


def with_lightning(model, limited):
    import lightning

    from plimsoll.integrations.lightning import OomProof

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, batch_idx):
            return self.model(batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    callback = OomProof(units="samples")
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
    )  # fmt: skip
    with limited():
        trainer.fit(Module(), data())
    return trainer.global_step, callback.transaction.num_ooms


def main(adapter, kind, result):
    torch.manual_seed(1)
    model = Hungry()
    used_bytes = backend_for("cpu").baseline_bytes()

    def limited():
        # current memory, memory of libraries that may still be loaded, and 6 late samples
        return plimsoll.limited(used_bytes + 100 * MIB + 6 * 40 * MIB) if kind == "limited" else nullcontext()

    train = {"accelerate": with_accelerate, "lightning": with_lightning}[adapter]
    num_steps, num_ooms = train(model, limited)
    weights = [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]
    found = {"passes": model.passes, "num_steps": num_steps, "num_ooms": num_ooms, "weights": weights}
    with open(result, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
