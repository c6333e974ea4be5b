"""The folder of every method in a process without Plimsoll: transformers loads the same model, or prints a remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from plimsoll.compression.methods import SHRINKERS
from plimsoll.compression.saving import form_of, save_bundle
from shrink_models import bundle, calibration, ids_of, outputs

# A GPT-2 has layers that torchao does not know, and its own field for their number.
CASES = [
    *(("bert", name) for name in SHRINKERS),
    ("gpt2", "low_rank_embeddings"),
    ("gpt2", "int8"),
    ("lstm-lm", "units"),
]
TEXT = "the line on the hull"

LOAD = """
import sys
sys.modules["plimsoll"] = None  # as where it is not installed
import json
from pathlib import Path
import torch, transformers
transformers.logging.set_verbosity_error()

def loaded(folder, name, ids, wanted, **options):
    try:
        model = getattr(transformers, name).from_pretrained(folder, **options).eval()
        with torch.no_grad():
            made = model(input_ids=ids).logits.float()
        return "same" if torch.allclose(made, wanted, rtol=0, atol=5e-3) else "another model"
    except Exception as error:
        return f"{type(error).__name__}: {error}"

for folder in sorted(Path(sys.argv[1]).iterdir()):
    ids, wanted, name, auto = torch.load(folder / "wanted.pt")
    found = {one: loaded(folder, one, ids, wanted) for one in (name, auto)}
    found["trusted"] = found[auto]
    if "trust_remote_code" in found[auto]:
        found["trusted"] = loaded(folder, auto, ids, wanted, trust_remote_code=True)
    transformers.AutoTokenizer.from_pretrained(folder)
    print("\\n" + json.dumps([folder.name, found]))  # behind what transformers asked
"""


@pytest.fixture(scope="module")
def loadings(tmp_path_factory):
    """Return the results of each class of transformers for each folder, by its name, and the form of each folder."""
    root = tmp_path_factory.mktemp("shrunk")
    forms = {}
    for model, name in CASES:
        given, method = bundle(model), SHRINKERS[name]
        available = method.choices(given)
        if isinstance(available, str):
            continue
        method.shrink(given, available[-1], calibration(given))
        folder = root / "folders" / f"{model}-{name}"
        ids_BT = ids_of(given.tokenizer, TEXT)
        save_bundle(given, folder)
        wanted = outputs(given.model.eval(), ids_BT).float()
        auto = "AutoModelForSequenceClassification" if model == "bert" else "AutoModelForCausalLM"
        named = auto if model == "lstm-lm" else type(given.model).__name__
        torch.save((ids_BT, wanted, named, auto), folder / "wanted.pt")
        forms[folder.name] = form_of(given.model)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["HF_MODULES_CACHE"] = str(root / "modules")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, str(root / "folders")],
        env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return forms, dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.mark.long
def test_a_folder_is_the_same_model_or_says_what_to_type(loadings):
    forms, found = loadings
    assert set(forms) == set(found)
    for name, loaded in found.items():
        for made in loaded.values():
            assert made != "another model", (name, loaded)
            says_how = "trust_remote_code=True" in made or "plimsoll.load_model(folder)" in made
            assert made == "same" or says_how, (name, loaded)
        assert loaded["trusted"] == "same" or forms[name] == "recurrent" or name.endswith("int4"), (name, loaded)
