"""Sheets and sentences of a corpus, shared by the terminal and the HTML page."""

from __future__ import annotations

from plimsoll.records.corpus import CorpusFacts, FeedRates, Filling, Inspection, TokenFacts
from plimsoll.records.units import format_bytes, format_seconds, format_share
from plimsoll.report.sheets import FACTS, Sheet, columns_of

_MOST_SKIPPED = 5
_MOST_LABELS = 20
_THIS_JOB = "*"

Found = CorpusFacts | TokenFacts | Inspection | FeedRates
"""A result of one of the commands of `plimsoll data`."""


def headline(found: Found) -> str:
    """Return a short summary of facts about a corpus, to print next to the path of their file."""
    match found:
        case CorpusFacts():
            return f"{found.num_texts:,} texts"
        case TokenFacts():
            return f"{found.num_tokens:,} tokens"
        case Inspection():
            return f"{found.corpus.num_texts:,} texts, {found.num_tokens:,} tokens"
        case FeedRates():
            return f"{len(found.rates)} rates"


def corpus_sheet(corpus: CorpusFacts) -> Sheet:
    """Return the number and size of the texts, and the folder of their index."""
    rows = (
        ("Files", f"{corpus.num_files:,}"),
        ("Texts", f"{corpus.num_texts:,}"),
        ("Size", f"{format_bytes(corpus.num_bytes)}, {format_bytes(corpus.num_bytes // corpus.num_texts)} per text"),
        ("Left out", _left_out(corpus)),
        ("Index", f"{format_bytes(corpus.index_bytes)} in {corpus.index_folder}"),
        ("Time", format_seconds(corpus.seconds)),
    )
    first, *others = corpus.sources
    more = f" and {len(others):,} more" if len(others) > 2 else "".join(f", {source}" for source in others)
    return Sheet(f"Corpus {first}{more}", FACTS, rows)


def _left_out(corpus: CorpusFacts) -> str:
    left_out = [f"{corpus.num_skipped:,}"] if corpus.num_skipped else []
    if corpus.num_hidden:
        are = "hidden file or folder" if corpus.num_hidden == 1 else "hidden files and folders"
        left_out.append(f"{corpus.num_hidden:,} {are}")
    return " and ".join(left_out) or "none"


def skipped_sheet(corpus: CorpusFacts) -> Sheet:
    """List the files and lines that were left out, with the reasons."""
    shown = corpus.skipped[:_MOST_SKIPPED]
    title = f"Left out, {len(shown)} of {corpus.num_skipped:,}"
    return Sheet(title, columns_of("Place and reason"), tuple((reason,) for reason in shown))


def label_sheet(corpus: CorpusFacts) -> Sheet:
    """List the number of texts of each class, most frequent first."""
    labels = sorted(corpus.labels, key=lambda label: -label.num_texts)[:_MOST_LABELS]
    rows = tuple(
        (label.name, f"{label.num_texts:,}", format_share(label.num_texts, corpus.num_texts)) for label in labels
    )
    columns = columns_of("Class", "#Texts", "#Share")
    return Sheet(f"Classes, {len(labels)} of {len(corpus.labels):,}", columns, rows)


def tag_sheet(corpus: CorpusFacts) -> Sheet:
    """List the number of words of each tag, most frequent first."""
    num_words = sum(tag.num_words for tag in corpus.tags)
    tags = sorted(corpus.tags, key=lambda tag: -tag.num_words)[:_MOST_LABELS]
    rows = tuple((tag.name, f"{tag.num_words:,}", format_share(tag.num_words, num_words)) for tag in tags)
    columns = columns_of("Tag", "#Words", "#Share")
    return Sheet(f"Tags, {len(tags)} of {len(corpus.tags):,}", columns, rows)


def token_sheet(tokens: TokenFacts) -> Sheet:
    """Return the number of tokens, their data type and their folder."""
    per_token = tokens.corpus.num_bytes / max(tokens.num_tokens, 1)
    rows = (
        ("Tokens", f"{tokens.num_tokens:,}, {per_token:.2f} file bytes per token"),
        ("Stored as", f"{tokens.token_type}, {format_bytes(tokens.num_stored_bytes)} in {tokens.tokens_folder}"),
        ("Vocabulary", f"{tokens.vocab_size:,} in {tokens.tokenizer_folder}"),
        ("Time", format_seconds(tokens.seconds)),
    )
    return Sheet("Tokens", FACTS, rows)


def length_sheet(inspection: Inspection) -> Sheet:
    """Return statistics of the text lengths, in tokens."""
    of = "all" if inspection.num_seen_texts == inspection.corpus.num_texts else f"{inspection.num_seen_texts:,} drawn"
    rows = (
        ("Mean", f"{inspection.mean_tokens:,.1f}"),
        *((_quantile_name(share), f"{length:,}") for share, length in inspection.quantiles),
        ("Total of all texts", f"{inspection.num_tokens:,}"),
        *((("Special tokens", inspection.special_tokens),) if inspection.special_tokens else ()),
        *(
            (("Sentence or paragraph ends", f"{inspection.num_borders:,}"),)
            if inspection.num_borders is not None
            else ()
        ),
        ("File bytes per token", f"{inspection.bytes_per_token:.2f}"),
    )
    return Sheet(f"Tokens per text ({of} texts)", columns_of("Statistic", "#Tokens"), rows)


def _quantile_name(share: float) -> str:
    return {0.0: "Shortest", 0.5: "Median", 1.0: "Longest"}.get(share, f"{share:.0%} quantile")


def filling_sheet(inspection: Inspection) -> Sheet:
    """Compare the batching methods for the texts."""
    columns = columns_of("Method", "#Samples", "#Padding", "#Tokens per batch", "#Lost tokens")
    rows = tuple(_filling_row(filling) for filling in inspection.fillings)
    return Sheet(
        f"Batching, samples of up to {inspection.sequence_length:,} tokens ({_THIS_JOB} this job)", columns, rows
    )


def _filling_row(filling: Filling) -> tuple[str, ...]:
    return (
        f"{filling.name} {_THIS_JOB}" if filling.is_this_job else filling.name,
        f"{filling.num_samples:,}",
        format_share(filling.padding_share, 1),
        f"{filling.useful_tokens:,.0f}",
        f"{filling.num_dropped_tokens:,}",
    )


def example_sheet(inspection: Inspection) -> Sheet:
    """List the beginnings of some texts."""
    return Sheet("Examples", columns_of("Beginning of the text"), tuple((example,) for example in inspection.examples))


def rate_sheet(feed: FeedRates) -> Sheet:
    """List the speed and private memory of each stage of data loading."""
    columns = columns_of("Stage", "Details", "#Speed", "#Private memory")
    rows = tuple(
        (
            rate.stage,
            rate.detail,
            f"{format_bytes(round(rate.per_second))}/s"
            if rate.unit == "bytes"
            else f"{rate.per_second:,.0f} {rate.unit}/s",
            "" if rate.private_bytes is None else format_bytes(rate.private_bytes),
        )
        for rate in feed.rates
    )
    return Sheet("Speed", columns, rows)
