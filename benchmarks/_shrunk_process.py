"""A process that loads a model folder and passes rows through it; `shrink_quantized.py` observes its memory.

    python benchmarks/_shrunk_process.py FOLDER ROWS LENGTH DTYPE

With ``-`` in place of a folder it imports the same modules and loads nothing. Before it loads and before it ends it
waits for a line of input, and it prints ``ready`` and ``done``.
"""

from __future__ import annotations

import sys

import torch

from plimsoll.models.loading import load_model


def main() -> None:
    folder, rows, length, dtype = sys.argv[1:]
    import transformers.models.bert.modeling_bert
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401 -- in the baseline too
    from torchao.prototype.quantization.int4 import Int4OpaqueTensor  # noqa: F401 -- as above

    say("ready")
    if folder != "-":
        model = load_model(folder, dtype=getattr(torch, dtype)).model
        with torch.inference_mode():
            model(torch.randint(0, 8000, (int(rows), int(length))))
    say("done")


def say(word: str) -> None:
    print(word, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
