"""Batches in other people's loops: a plain DataLoader, Lightning, Accelerate and the Hugging Face Trainer.

Each trains for two epochs and is asked what it was fed: every sample once an epoch, in the batches of that epoch.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader

from plimsoll.data.batching import Batches, Buckets, Cursor, batches_of
from plimsoll.data.loader import Loader

OF_SIZE = Buckets(batch_size=8, pool_samples=64)
OF_TOKENS = Buckets(max_tokens=120, pool_samples=64)  # epochs differ in their number of batches


class Texts(torch.utils.data.Dataset):
    """Samples that are their number, as often as they are long."""

    def __len__(self) -> int:
        return 150

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((int(self.lengths(np.array(number))),), number)}

    def lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return ids % 37 + 1

    def collate(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        rows = [sample["input_ids"] for sample in samples]
        return {"input_ids": nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=999)}


class Tiny(nn.Module):
    """A model that keeps what it was fed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 1)
        self.fed: list[list[int]] = []

    def forward(self, input_ids: torch.Tensor, **others: Any) -> dict[str, torch.Tensor]:
        if self.training:
            self.fed.append(input_ids[:, 0].tolist())
        return {"loss": self.embedding(input_ids).square().mean()}


def dataloader(buckets: Buckets) -> DataLoader:
    texts = Texts()
    return DataLoader(texts, batch_sampler=batches_of(texts, buckets, seed=4), collate_fn=texts.collate)


def own_loader(buckets: Buckets) -> Loader:
    return Loader(Texts(), buckets, seed=4)


def expected(buckets: Buckets) -> list[list[int]]:
    batches, cursor, got = batches_of(Texts(), buckets, seed=4), Cursor(), []
    while cursor.epoch < 2:
        got.append(batches.ids(cursor).tolist())
        cursor = batches.following(cursor)
    for epoch in range(2):
        batches.set_epoch(epoch)
        assert sorted(one for ids in batches for one in ids) == list(range(150))
        assert len(batches) == len(list(batches))
    return got


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_plain_dataloader(num_workers: int):
    texts, model = Texts(), Tiny()
    batches = batches_of(texts, OF_TOKENS, seed=4)
    loader = DataLoader(texts, batch_sampler=batches, collate_fn=texts.collate, num_workers=num_workers)
    assert isinstance(batches, Batches)
    for epoch in range(2):
        batches.set_epoch(epoch)
        assert len(loader) == len(batches)
        for fields in loader:
            model(**fields)["loss"].backward()
    assert model.fed == expected(OF_TOKENS)


@pytest.mark.parametrize(
    ("buckets", "loader", "reload_every"),
    [(OF_SIZE, dataloader, 0), (OF_SIZE, own_loader, 0), (OF_TOKENS, own_loader, 1)],
)
@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path, buckets: Buckets, loader: Callable[[Buckets], Any], reload_every: int):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.tiny = Tiny()

        def training_step(self, fields: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.tiny(**fields)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False, reload_dataloaders_every_n_epochs=reload_every,
    )  # fmt: skip
    trainer.fit(module, loader(buckets))
    assert module.tiny.fed == expected(buckets)


@pytest.mark.filterwarnings("ignore")
def test_accelerate():
    from accelerate import Accelerator, skip_first_batches

    accelerator = Accelerator(cpu=True)
    model = Tiny()
    prepared, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), dataloader(OF_TOKENS)
    )
    for epoch in range(2):
        loader.set_epoch(epoch)
        for fields in loader:
            accelerator.backward(prepared(**fields)["loss"])
            optimizer.step()
    assert model.fed == expected(OF_TOKENS)
    loader.set_epoch(1)
    rest = [fields["input_ids"][:, 0].tolist() for fields in skip_first_batches(loader, 3)]
    assert rest == expected(OF_TOKENS)[-len(loader) :][3:]


@pytest.mark.filterwarnings("ignore")
def test_the_hugging_face_trainer(tmp_path: Path):
    from transformers import Trainer, TrainingArguments

    class Bucketed(Trainer):
        def get_train_dataloader(self) -> DataLoader:
            return self.accelerator.prepare(dataloader(OF_SIZE))

    def trainer(model: Tiny, num_steps: int) -> Trainer:
        arguments = TrainingArguments(
            tmp_path / "out", max_steps=num_steps, report_to=[], save_steps=5, disable_tqdm=True, use_cpu=True,
            logging_strategy="no", remove_unused_columns=False, save_strategy="steps", dataloader_pin_memory=False,
        )  # fmt: skip
        return Bucketed(model, arguments, train_dataset=Texts())

    whole = expected(OF_SIZE)
    model = Tiny()
    trainer(model, 7).train()
    assert model.fed == whole[:7]
    resumed = Tiny()
    trainer(resumed, len(whole)).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-5"))
    assert resumed.fed == whole[5:]
    state = json.loads((tmp_path / "out" / f"checkpoint-{len(whole)}" / "trainer_state.json").read_text())
    assert state["epoch"] == 2.0
