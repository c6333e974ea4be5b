"""Records of a corpus as `plimsoll data` shows them, small and with round numbers."""

from plimsoll.records.corpus import CorpusFacts, FeedRates, Filling, Inspection, LabelCount, Rate, TokenFacts


def corpus_facts(**changes) -> CorpusFacts:
    """Return two classes, and one row that was left out."""
    facts = {
        "sources": ("reviews.jsonl",),
        "num_files": 1,
        "num_texts": 1000,
        "num_bytes": 128_000,
        "num_skipped": 1,
        "skipped": ("reviews.jsonl, line 17: it is not JSON",),
        "labels": (LabelCount(name="bad", num_texts=250), LabelCount(name="good", num_texts=750)),
        "index_folder": "cache/index-0123456789abcdef",
        "index_bytes": 8192,
        "seconds": 0.25,
    }
    return CorpusFacts(**facts | changes)


def token_facts() -> TokenFacts:
    """Return facts with four bytes of text per token."""
    return TokenFacts(
        corpus=corpus_facts(labels=(), num_skipped=0, skipped=()), tokenizer_folder="cache/tokenizer-0123456789abcdef",
        vocab_size=8000, tokens_folder="cache/tokens-0123456789abcdef-0123456789abcdef", token_type="uint16",
        num_tokens=32_000, num_stored_bytes=72_000, seconds=2.0,
    )  # fmt: skip


def inspection() -> Inspection:
    """Return a classification whose longest texts are truncated."""
    fillings = (
        Filling(name="padded to 256", num_samples=1000, batch_samples=32, padding_share=0.75, useful_tokens=2048),
        Filling(
            name="by_length", num_samples=1010, batch_samples=32, padding_share=0.02, useful_tokens=2048,
            num_long_texts=8, num_dropped_tokens=0, is_this_job=True,
        ),
    )  # fmt: skip
    return Inspection(
        corpus=corpus_facts(), task="classification", sequence_length=256, special_tokens="[CLS] ... [SEP]",
        num_borders=2_000, num_seen_texts=1000, num_seen_tokens=64_000,
        bytes_per_token=2.0, num_tokens=64_000, mean_tokens=64.0,
        quantiles=((0.0, 1), (0.5, 50), (0.9, 120), (1.0, 512)),
        fillings=fillings, examples=("It was good [not bad]",), notes=("0.8 % of the texts are longer.",),
    )  # fmt: skip


def feed_rates() -> FeedRates:
    """Return one stage of each unit."""
    rates = (
        Rate(stage="read", detail="in order", per_second=5_000_000, unit="texts"),
        Rate(stage="tokenize", detail="all cores", per_second=4 * 2**20, unit="bytes"),
        Rate(stage="feed", detail="shuffle, workers 0", per_second=1e8, unit="tokens", private_bytes=200 << 20),
    )
    return FeedRates(corpus=corpus_facts(), rates=rates, notes=("Not fed in blocks: there is one.",))
