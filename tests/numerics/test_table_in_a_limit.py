"""A table larger than the limit on private memory: trained inside the limit, with the result of training in memory."""

from __future__ import annotations

import json

import pytest

from processes import run_program

# Every two-thousandth row of a table of 820 MB is in use. The same training fits a table of 1,600 rows in memory.
PROGRAM = """
import json, resource, sys, warnings
import torch
from torch import nn
import plimsoll
from plimsoll.device import process
from plimsoll.device.base import backend_for
from plimsoll.embeddings.host import HostEmbedding
from plimsoll.embeddings.host_optimizer import optimizer_of
from plimsoll.step.failpoints import armed

warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
USED, EVERY, WIDTH = 1600, 2000, 64
path, kind = sys.argv[1], getattr(torch.optim, sys.argv[2])
with open(path, "wb") as file:
    file.truncate(USED * EVERY * WIDTH * 4)

class Model(nn.Module):
    def __init__(self, table, every):
        super().__init__()
        self.table, self.every = table, every
        self.register_buffer("target", torch.linspace(-1, 1, WIDTH))

    def forward(self, ids):
        return (self.table(ids * self.every).mean(1) - self.target).square().mean()

def losses(model, optimizer, *hits):
    generator = torch.Generator().manual_seed(1)
    step = plimsoll.TrainStep(model, optimizer, lambda model, batch: model(batch), units="samples", clip_norm=1.0)
    results = []
    with armed("optimizer", *hits):
        for _ in range(20):
            ids = torch.randint(0, USED, (256, 20), generator=generator)
            peak.reset()  # in every step, for pages of the table that come later would be taken off the peak
            results.append(step(ids))
            peaks_bytes.append(peak.read(process.private_bytes()))
    return [result.loss for result in results], sum(len(result.oom_events) for result in results)

peak, peaks_bytes = process.PeakCounter(), []
plain = nn.Embedding(USED, WIDTH, sparse=True)
first = plain.weight.detach().clone()
expected, _ = losses(Model(plain, 1), kind(plain.parameters(), lr=0.05))
limit_bytes = process.data_bytes() + (64 << 20)
with plimsoll.limited(limit_bytes):
    try:
        torch.zeros(USED * EVERY, WIDTH)
    except RuntimeError:
        refused = True
    table = HostEmbedding(USED * EVERY, WIDTH, path=path)
    with torch.no_grad():
        table.weight[::EVERY] = first
    found, num_events = losses(Model(table, EVERY), optimizer_of(table, kind, lr=0.05), 3)
difference = (table.weight.detach()[::EVERY] - plain.weight.detach()).abs().max().item()
sizes = max(peaks_bytes), limit_bytes, table.weight.nbytes
print(json.dumps([refused, expected, found, num_events, difference, *sizes]))
"""


@pytest.mark.parametrize("kind", [pytest.param("Adagrad", marks=pytest.mark.slow), "SparseAdam"])
def test_a_table_larger_than_the_limit_is_trained_inside_of_it(kind, tmp_path):
    done = run_program(PROGRAM, tmp_path / "table", kind)
    assert done.returncode == 0, done.stderr
    refused, expected, found, num_events, difference, peak_bytes, limit_bytes, table_bytes = json.loads(done.stdout)
    assert refused  # the table in memory
    assert peak_bytes < limit_bytes < table_bytes
    assert num_events == 1
    assert found[-1] < found[0]
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 1e-6
    assert difference < 1e-6
