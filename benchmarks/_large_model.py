"""A large checkpoint with random weights for benchmarks, built from a configuration and saved in shards.

    PYTHONPATH=src python benchmarks/_large_model.py FOLDER [--layers 24] [--hidden 2048]

Names and shapes come from the model on the meta device. Each shard is drawn, written and freed, so that the process
needs memory for one shard. An existing folder with the same options is reused. The default is a Llama of 1.3 billion
parameters, 2.5 GiB in bfloat16.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

_OPTIONS = "options.json"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the model's size."""
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--shard", type=int, default=500, help="size of a file in MiB")


def large_model(folder: Path, options: argparse.Namespace) -> Path:
    """Return a checkpoint folder of the requested size below ``folder``, and write it first if it does not exist."""
    asked = {"layers": options.layers, "hidden": options.hidden, "vocabulary": options.vocabulary}
    asked["shard"] = options.shard
    place = folder / "-".join(f"{name}{value}" for name, value in asked.items())
    done = place / _OPTIONS
    if done.is_file() and json.loads(done.read_text()) == asked:
        return place
    place.mkdir(parents=True, exist_ok=True)
    config = transformers.LlamaConfig(
        num_hidden_layers=options.layers,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 43 // 16,
        num_attention_heads=options.hidden // 128 or 1,
        num_key_value_heads=options.hidden // 128 or 1,
        vocab_size=options.vocabulary,
        max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    with torch.device("meta"):
        state = transformers.LlamaForCausalLM(config).state_dict()
    config.save_pretrained(place)
    _write_shards(place, state, options.shard << 20)
    done.write_text(json.dumps(asked))
    return place


def _write_shards(place: Path, state: dict[str, torch.Tensor], shard_bytes: int) -> None:
    shards: list[list[str]] = [[]]
    filled_bytes = 0
    for name, tensor in state.items():
        if shards[-1] and filled_bytes + tensor.numel() * 2 > shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(name)
        filled_bytes += tensor.numel() * 2
    places: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        drawn = {name: _drawn(state[name].shape, generator) for name in names}
        save_file(drawn, place / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    index: dict[str, Any] = {"metadata": {"total_size": sum(tensor.numel() * 2 for tensor in state.values())}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index | {"weight_map": places}))


def _drawn(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Return ones for norms, and normally distributed weights, as in transformers, for other parameters."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    add_options(parser)
    options = parser.parse_args()
    print(large_model(options.folder, options))


if __name__ == "__main__":
    main()
