"""`plimsoll train --nproc N` of an offloaded, sharded model, with epochs whose last batch is one sample.

The reference is the same job in one process. `test_rank_jobs` tests everything that does not concern shards.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from end_to_end.commands import steps_of, trained, write_job
from plimsoll.records.plan import Plan

TOLERANCE = 1e-5
NUM_STEPS = 9
RATES = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
OFF_THE_DEVICE = "fully_shard(gathered=twice,offload=disk)"


@pytest.mark.slow
def test_an_epoch_whose_last_batch_has_one_sample_is_trained_in_shards_and_gone_on_with(tmp_path: Path):
    """7 texts in batches of 3 run on 2, 1 and 3 ranks: one or two ranks have no sample in every third step.

    A single process has no ranks to shard over: it ignores the pin, which is in force again on 3 ranks.
    """
    rows = "".join(f"text {'long ' * number}of {number},{'odd' if number % 2 else 'even'}\n" for number in range(7))
    (tmp_path / "texts.csv").write_text("text,label\n" + rows)
    job = write_job(
        tmp_path / "job.yaml", task="classification", model={"architecture": "bert", **SIZES, **RATES},
        data={"train": str(tmp_path / "texts.csv"), "text": "text", "label": "label"}, tokenizer={"vocab_size": 300},
        sequence_length=16, batch_size=3, steps=NUM_STEPS, checkpoint={"every": 2, "keep": 9},
        optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9},
    )  # fmt: skip
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    trained(job, "--out", alone)
    pinned = ("--pin", OFF_THE_DEVICE, "--budget", "2GiB")
    trained(job, "--out", shared, "--nproc", 2, "--set", "steps=4", *pinned)
    of_one_process = trained("--resume", "--out", shared, "--nproc", 1, "--set", "steps=6")
    assert f"what is pinned is left out: {OFF_THE_DEVICE}: it shards a model over" in of_one_process.stderr
    assert Plan.load(shared / "plan.json").left_out.keys() == {OFF_THE_DEVICE}
    trained("--resume", "--out", shared, "--nproc", 3, "--set", f"steps={NUM_STEPS}")
    assert OFF_THE_DEVICE in map(str, Plan.load(shared / "plan.json").pinned)
    steps, of_one = steps_of(shared), steps_of(alone)
    assert [step.num_samples for step in steps] == [step.num_samples for step in of_one] == [3, 3, 1] * 3
    np.testing.assert_allclose([one.loss for one in steps], [one.loss for one in of_one], atol=TOLERANCE, rtol=0)
    found, expected = (load_file(run / "model" / "model.safetensors") for run in (shared, alone))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, atol=TOLERANCE, rtol=0, err_msg=name)
