"""One way to load a checkpoint, in a separate process that ``weights_loading.py`` starts."""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

from plimsoll.device.process import PeakCounter, data_bytes, private_bytes
from plimsoll.models.loading import load_model
from plimsoll.weights.loading import open_checkpoint

BLOCK_BYTES = 8 << 20


def main() -> None:
    way, folder, state, dtype_name, limit_bytes = sys.argv[1:]
    dtype = None if dtype_name == "stored" else getattr(torch, dtype_name)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    warm_up()
    checkpoint = open_checkpoint(folder)
    files = sorted(checkpoint.files)
    for file in files:
        bring(file, state == "warm")
    begin_bytes = private_bytes()
    if int(limit_bytes):
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + int(limit_bytes), resource.RLIM_INFINITY))
    counter = PeakCounter()
    counter.reset()
    begin_seconds = time.perf_counter()
    kept = load(way, folder, files, dtype)
    seconds = time.perf_counter() - begin_seconds
    end_bytes = private_bytes()
    result = {
        "fits": kept is not None,
        "seconds": seconds,
        "peak_bytes": counter.read(end_bytes) - begin_bytes,
        "end_bytes": end_bytes - begin_bytes,
        "weights_bytes": checkpoint.num_bytes,
        "largest_bytes": checkpoint.largest_bytes,
    }
    print(json.dumps(result))


def load(way: str, folder: str, files: list[Path], dtype: torch.dtype | None) -> object:
    if way == "bare":
        return bare(files)
    if way == "plain":
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto")
    return load_model(folder, place="memory" if way == "memory" else "mapped", dtype=dtype)


def bare(files: list[Path]) -> torch.Tensor:
    """Read the files one after the other into one tensor."""
    made = torch.empty(sum(file.stat().st_size for file in files), dtype=torch.uint8)
    memory = memoryview(made.numpy())
    done_bytes = 0
    for file in files:
        with file.open("rb", buffering=0) as opened:
            offset = 0
            while read_bytes := os.preadv(opened.fileno(), [memory[done_bytes : done_bytes + BLOCK_BYTES]], offset):
                offset += read_bytes
                done_bytes += read_bytes
    return made


def bring(file: Path, is_wanted: bool) -> None:
    """Load a file into the page cache, or evict it."""
    with file.open("rb", buffering=0) as opened:
        if not is_wanted:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return
        block = bytearray(BLOCK_BYTES)
        while opened.readinto(block):
            pass


def warm_up() -> None:
    """Load a small model with both loaders, so that one-time work of the libraries is not counted."""
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
    )
    with tempfile.TemporaryDirectory() as folder:
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        load_model(folder)
        transformers.AutoModelForCausalLM.from_pretrained(folder)


if __name__ == "__main__":
    main()
