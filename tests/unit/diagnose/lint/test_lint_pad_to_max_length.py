"""Padding to the maximum length."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.pad_to_max_length import hits

SNIPPETS = {
    "keyword": r"""
        enc = tokenizer(
            text,
            padding="max_length",  # <-
            truncation=True,
        )
    """,
    "old": r"""
        enc = tokenizer.encode_plus(text, max_length=128, pad_to_max_length=True)  # <-
    """,
    "in-a-map": r"""
        def tokenize(batch):
            return tokenizer(batch["text"], padding="max_length", truncation=True)  # <-
    """,
    "of-tokenizers": r"""
        tokenizer.enable_padding(pad_id=0, length=512)  # <-
        tokenizer.enable_padding(length=None)
        tokenizer.enable_padding(pad_id=0)
    """,
    "dynamic": r"""
        enc = tokenizer(text, padding=True)
        enc = tokenizer(text, padding="longest")
        enc = tokenizer.encode_plus(text, pad_to_max_length=False)
    """,
    "option": r"""
        padding = "max_length" if args.pad_to_max_length else False
        enc = tokenizer(text, padding=padding)
        parser.add_argument("--padding", default="max_length")
    """,
    "by-a-constant": r"""
        PADDING = "max_length"
        enc = tokenizer(text, padding=PADDING)  # <-
    """,
    "fixed-shapes": r"""
        if accelerator.distributed_type == DistributedType.XLA:
            enc = tokenizer.pad(examples, padding="max_length", max_length=128)
    """,
    "default": r"""
        def encode(text, padding="max_length"):
            return tokenizer(text, padding=padding)
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
