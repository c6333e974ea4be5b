"""Every program, job and command of README.md runs as printed, with a small training around it."""

import os
import re

import pytest

from pages import ROOT, blocks_of, faults_of, program_done

README = ROOT / "README.md"
PROGRAMS = [block for block in blocks_of(README) if block.language == "python"]
THEIRS = """
import plimsoll, torch, transformers

config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, bos_token_id=0, eos_token_id=0)
model = transformers.GPT2LMHeadModel(config)
ids = torch.randint(100, (32, 16))
dataset = [{"input_ids": row, "labels": row} for row in ids]
loader = torch.utils.data.DataLoader(dataset, batch_size=8)
optimizer = torch.optim.AdamW(model.parameters())
"""
TRAINER = """
args = transformers.TrainingArguments("out", max_steps=4, report_to=[], save_strategy="no", use_cpu=True)
trainer = transformers.Trainer(model, args, train_dataset=dataset)
"""
MODULE = """
import lightning

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

module = Module()
"""
ACCELERATOR = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""
# The code before each program, and the assertion after it.
AROUND = {
    "plimsoll.transformers": (TRAINER, "assert trainer.state.global_step == 4"),
    "plimsoll.lightning": (MODULE, "assert module.global_step == 4"),
    "plimsoll.accelerate": (ACCELERATOR, "assert result.updated"),
    "plimsoll.TrainStep": ("", "assert result.loss > 0 and not result.oom_events"),
}


def test_each_program_is_run_below():
    assert [next(name for name in AROUND if name in block.text) for block in PROGRAMS] == list(AROUND)
    assert all(len(block.text.strip().splitlines()) <= 5 for block in PROGRAMS)


@pytest.mark.long
@pytest.mark.parametrize("name", AROUND)
def test_a_program_runs_as_printed(name, tmp_path):
    if name != "plimsoll.TrainStep":
        pytest.importorskip(name.removeprefix("plimsoll."), reason="the extra of that name is not installed")
    budget_bytes = 4 << 30
    if os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") < budget_bytes:
        pytest.skip("README.md gives 4 GiB, and this machine has less")
    before, after = AROUND[name]
    (program,) = (block.text for block in PROGRAMS if name in block.text)
    done = program_done(f"{THEIRS}{before}\n{program}\n{after}\n", tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_job_and_the_commands_run_as_printed(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    (folder / "pages.txt").write_text("\n".join(pages), encoding="utf-8")
    error = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB"
    )
    (tmp_path / "train.log").write_text(error, encoding="utf-8")
    (tmp_path / "train.py").write_text("import torch\n", encoding="utf-8")
    assert list(faults_of(with_jobs_only(tmp_path), tmp_path)) == []
    assert (tmp_path / "report.html").is_file()


def with_jobs_only(folder):
    """Return the page without its programs, which need a training around them."""
    page = folder / "README.md"
    page.write_text(re.sub(r"^```python\n.*?^```", "", README.read_text("utf-8"), flags=re.M | re.S), encoding="utf-8")
    return page


def test_the_first_screen_is_short():
    text = README.read_text(encoding="utf-8")
    assert len(text.encode()) <= 8192
    assert "```" in "\n".join(text.splitlines()[:25])
