"""Folders of pruned models: a fresh process loads them without Plimsoll, with the same outputs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plimsoll.compression.methods import SHRINKERS, Bundle, Calibration
from plimsoll.records.plan import Choice
from pruned_models import ARCHITECTURES, batches_of, logits_of, num_weights, small_model

METHODS = {"layers": {"keep": 1}, "hidden": {"share": 0.25}, "heads": {"share": 0.5}, "channels": {"share": 0.25}}

LOAD = """
import sys
sys.modules["plimsoll"] = None  # as where it is not installed
from pathlib import Path
import torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification
AUTO = {"ForMaskedLM": AutoModelForMaskedLM, "ForSequenceClassification": AutoModelForSequenceClassification}
transformers.logging.set_verbosity_error()
for folder in sorted(Path(sys.argv[1]).iterdir()):
    is_noted = (folder / "modeling_shrunk.py").exists()
    config = AutoConfig.from_pretrained(folder, trust_remote_code=is_noted)
    assert is_noted == hasattr(config, "shrunk")
    name = config.architectures[0]
    auto = next((one for end, one in AUTO.items() if name.endswith(end)), AutoModelForCausalLM)
    model = auto.from_pretrained(folder, trust_remote_code=is_noted).eval()
    batch, wanted = torch.load(folder / "wanted.pt")
    with torch.no_grad():
        # Not bit for bit: the alignment of a tensor in the file decides how its sums are taken.
        torch.testing.assert_close(model(**batch).logits, wanted, rtol=0, atol=1e-6)
    print(folder.name)
"""


@pytest.mark.long
def test_every_architecture_and_method_loads_in_a_fresh_process(tmp_path: Path):
    """One process loads all: methods that every configuration can express, then the whole chain."""
    names = []
    for architecture in ARCHITECTURES:
        model = small_model(architecture)
        for method, options in METHODS.items():
            bundle, choice = Bundle(model), Choice(technique=method, options=options)
            assert SHRINKERS[method].refusal(bundle, choice) is None, (architecture, method)
            num_before = num_weights(model)
            SHRINKERS[method].shrink(bundle, choice, Calibration())
            model = bundle.model
            assert num_weights(model) < num_before
            if method not in {"hidden", "channels"}:
                continue
            names.append(f"{architecture}-{method}")
            folder = tmp_path / names[-1]
            model.save_pretrained(folder)
            torch.save((next(batches_of(model, seed=1)), logits_of(model)), folder / "wanted.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["HF_MODULES_CACHE"] = str(tmp_path.parent / "modules")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == sorted(names)
