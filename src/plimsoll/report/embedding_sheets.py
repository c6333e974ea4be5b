"""Sheets of word vectors, shared by the terminal and the HTML page."""

from __future__ import annotations

from plimsoll.records.embeddings import CompressionFacts, Conversion, FaultCount, SubsetFacts, VectorFile
from plimsoll.records.units import format_bytes, format_seconds, format_share
from plimsoll.report.sheets import FACTS, Sheet, columns_of

_FOUND_AS = {
    "num_exact": "as written",
    "num_lower": "in lower case",
    "num_capitalised": "capitalised",
    "num_built": "built from subwords",
}
_MISSING = {
    "zeros": "zeros",
    "mean": "the mean of the vectors found",
    "normal": "random, with the mean and standard deviation of the vectors found",
}


def subset_sheets(subset: SubsetFacts) -> tuple[Sheet, ...]:
    """Return the sheets of the words found and their rows, of the missing words, and of faults in the source file."""
    full_bytes = 4 * subset.num_entries * subset.dimension
    rows = [
        ("Vectors", f"{subset.source_format}, {subset.num_entries:,} entries, dimension {subset.dimension}"),
        ("Words", f"{subset.num_words:,}, from {subset.vocabulary}"),
        ("Found", f"{_share(subset.num_found, subset.num_words)} of the words: {_found_as(subset)}"),
    ]
    if subset.num_tokens is not None and subset.num_hit_tokens is not None:
        rows.append(("In the text", f"{_share(subset.num_hit_tokens, subset.num_tokens)} of all word occurrences"))
    rows += [
        ("Other rows", f"{_MISSING[subset.missing]}; padding is zeros"),
        ("Values", f"mean {subset.mean:.4f}, standard deviation {subset.deviation:.4f}"),
        ("Rows", f"{subset.num_rows:,} in {subset.precision}, {format_bytes(subset.num_bytes)} in {subset.folder}"),
        ("Whole file", f"would need {format_bytes(full_bytes)} in memory"),
        ("Time", _time(subset)),
    ]
    return (
        Sheet(f"Word vectors {subset.source}", FACTS, tuple(rows)),
        _miss_sheet(subset),
        _fault_sheet(subset.num_duplicates, subset.faults, "duplicates of words found: the first was used"),
    )


def vector_file_sheets(file: VectorFile) -> tuple[Sheet, ...]:
    """Return the sheets of the format, size, contents and faults of a file of word vectors."""
    promised = "" if file.num_promised is None else f"; its header states {file.num_promised:,}"
    rows = [
        ("Format", file.format),
        ("Words", f"{_words(file)}{promised}"),
        ("Dimension", f"{file.dimension:,}"),
        ("File", format_bytes(file.num_file_bytes)),
        ("In memory", f"{format_bytes(file.num_full_bytes)} in single precision"),
        ("First words", ", ".join(map(repr, file.first_words))),
    ]
    if file.norms:
        rows.append(("Vector norms", "{:.3g} to {:.3g}, median {:.3g}".format(*_spread(file.norms))))
    rows.append(("Time", format_seconds(file.seconds)))
    faults = _fault_sheet(file.num_duplicates, file.faults, "duplicate words: the first is used")
    return Sheet(f"Word vectors {file.path}", FACTS, tuple(rows)), faults


def conversion_sheets(conversion: Conversion) -> tuple[Sheet, ...]:
    """Return the sheets of the source and size of a converted file, and the faults of its source."""
    rows = (
        ("From", conversion.source),
        ("Words", f"{_words(conversion)}, dimension {conversion.dimension}"),
        ("Size", f"{format_bytes(conversion.num_bytes)} in {conversion.precision}"),
        ("Time", format_seconds(conversion.seconds)),
    )
    faults = _fault_sheet(conversion.num_duplicates, conversion.faults, "duplicate words: the first was used")
    return Sheet(f"Word vectors {conversion.output}", FACTS, rows), faults


def compression_sheets(compression: CompressionFacts) -> tuple[Sheet, ...]:
    """Return the sheets of the sizes before and after compression, and the cosines to the original vectors."""
    before, after = compression.num_bytes_before, compression.num_bytes_after
    rows = (
        ("Vectors", f"{compression.num_rows:,}, dimension {compression.dimension}"),
        ("Size", f"{format_bytes(before)} before, {format_bytes(after)} after, {after / before:.1%}"),
        ("Mean cosine", f"{compression.mean_cosine:.4f}"),
        ("1 % quantile of the cosine", f"{compression.low_cosine:.4f}"),
        ("Lowest cosine", f"{compression.least_cosine:.4f}"),
    )
    return (Sheet(f"{compression.method.capitalize()}, {compression.detail} (lossy)", FACTS, rows),)


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({format_share(part, whole)})"


def _words(file: VectorFile | Conversion) -> str:
    """Return the number of words with a vector as text, and the number of entries in the file if it differs."""
    return f"{file.num_words:,}" + ("" if file.num_words == file.num_entries else f" in {file.num_entries:,} entries")


def _time(subset: SubsetFacts) -> str:
    seconds = format_seconds(subset.seconds)
    return f"none: read from the cache; reading the file took {seconds}" if subset.is_from_cache else seconds


def _found_as(subset: SubsetFacts) -> str:
    counts = {how: getattr(subset, field) for field, how in _FOUND_AS.items()}
    return ", ".join(f"{count:,} {how}" for how, count in counts.items() if count)


def _spread(norms: tuple[float, float, float]) -> tuple[float, float, float]:
    least, median, most = norms
    return least, most, median


def _miss_sheet(subset: SubsetFacts) -> Sheet:
    num_missed = subset.num_words - subset.num_found
    has_counts = subset.num_tokens is not None
    which = f"{len(subset.misses)} of {num_missed:,} words, " + (
        "the most frequent first" if has_counts else "the first"
    )
    columns = columns_of(which, *["#Uses"] * has_counts)
    rows = tuple((word, f"{count:,}") if has_counts else (word,) for word, count in subset.misses)
    return Sheet("Not found", columns, rows)


def _fault_sheet(num_duplicates: int, faults: tuple[FaultCount, ...], duplicates: str) -> Sheet:
    rows = [(fault.kind, f"{fault.count:,}", "\n".join(fault.examples)) for fault in faults]
    if num_duplicates:
        rows.append(("duplicate", f"{num_duplicates:,}", duplicates))
    return Sheet("Faults of the file", columns_of("Fault", "#Words", "Details"), tuple(rows))
