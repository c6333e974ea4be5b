"""The words and numbers of word vectors, once: the terminal and the HTML page show the same sheets."""

from __future__ import annotations

from plimsoll.records.embeddings import CompressionFacts, Conversion, FaultCount, SubsetFacts, VectorFile
from plimsoll.records.units import format_bytes, format_seconds, format_share
from plimsoll.report.sheets import FACTS, Sheet, columns_of

_FOUND_AS = {
    "num_exact": "as written",
    "num_lower": "in lower case",
    "num_capitalised": "capitalised",
    "num_built": "built of parts of words",
}
_MISSING = {
    "zeros": "zeros",
    "mean": "the mean of those found",
    "normal": "drawn, with the mean and deviation of those found",
}


def subset_sheets(subset: SubsetFacts) -> tuple[Sheet, ...]:
    """Say which words were found, where the rows are, and what was not found."""
    full_bytes = 4 * subset.num_entries * subset.dimension
    rows = [
        ("Vectors", f"{subset.source_format}, {subset.num_entries:,} entries of {subset.dimension} numbers"),
        ("Words", f"{subset.num_words:,}, of {subset.vocabulary}"),
        ("Found", f"{_share(subset.num_found, subset.num_words)} of the words: {_found_as(subset)}"),
    ]
    if subset.num_tokens is not None and subset.num_hit_tokens is not None:
        rows.append(("In the text", f"{_share(subset.num_hit_tokens, subset.num_tokens)} of all uses of words"))
    rows += [
        ("Other rows", f"{_MISSING[subset.missing]}; padding is zeros"),
        ("Values", f"mean {subset.mean:.4f}, deviation {subset.deviation:.4f}"),
        ("Rows", f"{subset.num_rows:,} in {subset.precision}, {format_bytes(subset.num_bytes)} in {subset.folder}"),
        ("All of the file", f"would take {format_bytes(full_bytes)}"),
        ("Time", _time(subset)),
    ]
    return (
        Sheet(f"Word vectors {subset.source}", FACTS, tuple(rows)),
        _miss_sheet(subset),
        _fault_sheet(subset.num_duplicates, subset.faults, "wanted words that came again: the first was taken"),
    )


def vector_file_sheets(file: VectorFile) -> tuple[Sheet, ...]:
    """Say what is in a file of word vectors."""
    promised = "" if file.num_promised is None else f"; its header says {file.num_promised:,}"
    rows = [
        ("Format", file.format),
        ("Words", f"{_words(file)}{promised}"),
        ("Numbers of a vector", f"{file.dimension:,}"),
        ("File", format_bytes(file.num_file_bytes)),
        ("In memory", f"{format_bytes(file.num_full_bytes)} in single precision"),
        ("First words", ", ".join(map(repr, file.first_words))),
    ]
    if file.norms:
        rows.append(("Lengths of vectors", "{:.3g} to {:.3g}, half of them up to {:.3g}".format(*_spread(file.norms))))
    rows.append(("Time", format_seconds(file.seconds)))
    faults = _fault_sheet(file.num_duplicates, file.faults, "words that came again: the first is taken")
    return Sheet(f"Word vectors {file.path}", FACTS, tuple(rows)), faults


def conversion_sheets(conversion: Conversion) -> tuple[Sheet, ...]:
    """Say what was written."""
    rows = (
        ("From", conversion.source),
        ("Words", f"{_words(conversion)}, of {conversion.dimension} numbers"),
        ("Size", f"{format_bytes(conversion.num_bytes)} in {conversion.precision}"),
        ("Time", format_seconds(conversion.seconds)),
    )
    faults = _fault_sheet(conversion.num_duplicates, conversion.faults, "words that came again: the first was taken")
    return Sheet(f"Word vectors {conversion.output}", FACTS, rows), faults


def compression_sheets(compression: CompressionFacts) -> tuple[Sheet, ...]:
    """Say what compression saved and what it cost."""
    before, after = compression.num_bytes_before, compression.num_bytes_after
    rows = (
        ("Vectors", f"{compression.num_rows:,} of {compression.dimension} numbers"),
        ("Size", f"{format_bytes(before)} before, {format_bytes(after)} after, {after / before:.1%}"),
        ("Cosine, mean", f"{compression.mean_cosine:.4f}"),
        ("Cosine, 99 % have at least", f"{compression.low_cosine:.4f}"),
        ("Cosine, the least", f"{compression.least_cosine:.4f}"),
    )
    return (Sheet(f"{compression.method.capitalize()}, {compression.detail} (lossy)", FACTS, rows),)


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({format_share(part, whole)})"


def _words(file: VectorFile | Conversion) -> str:
    """The words that have a vector, of what the file has."""
    return f"{file.num_words:,}" + ("" if file.num_words == file.num_entries else f" in {file.num_entries:,} entries")


def _time(subset: SubsetFacts) -> str:
    seconds = format_seconds(subset.seconds)
    return f"none: it is from the cache, where reading the file took {seconds}" if subset.is_from_cache else seconds


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
        rows.append(("twice", f"{num_duplicates:,}", duplicates))
    return Sheet("What is wrong with the file", columns_of("What", "#Words", "Where"), tuple(rows))
