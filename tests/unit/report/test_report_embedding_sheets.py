"""The sheets of word vectors: counts, zero counts and faults."""

import vector_records
from plimsoll.report import embedding_sheets


def facts_of(sheet):
    return dict(sheet.rows)


def test_only_the_ways_by_which_words_were_found_are_named():
    facts = facts_of(embedding_sheets.subset_sheets(vector_records.subset_facts(num_lower=0, num_built=2000))[0])
    assert (
        facts["Found"] == "19,400 (97.0%) of the words: 17,000 as written, 400 capitalised, 2,000 built from subwords"
    )
    assert facts["In the text"] == "950,000 (95.0%) of all word occurrences"
    assert facts["Whole file"] == "would need 457.8 MiB in memory"  # 400,000 x 300 x 4 bytes


def test_without_counts_nothing_is_said_of_the_text_and_misses_are_only_named():
    first, misses, faults = embedding_sheets.subset_sheets(vector_records.uncounted())
    assert "In the text" not in facts_of(first)
    assert (misses.columns[0].title, misses.rows) == ("1 of 2,000 words, the first", (("don",),))
    assert faults.rows == ()


def test_faults_are_counted_with_examples_and_words_that_come_twice_behind_them():
    faults = embedding_sheets.subset_sheets(vector_records.subset_facts())[2]
    assert [row[:2] for row in faults.rows] == [("wrong dimension", "1"), ("NaN or infinite", "7"), ("duplicate", "3")]
    assert faults.rows[1][2] == "line 18: 'a': it holds nan\nline 19: 'b': it holds inf"


def test_a_header_that_promises_more_is_shown_beside_what_there_is():
    facts = facts_of(embedding_sheets.vector_file_sheets(vector_records.vector_file())[0])
    assert facts["Words"] == "1,048,576 in 1,048,584 entries; its header states 2,000,000"
    assert facts["In memory"] == "1.0 GiB in single precision"
    assert facts["Vector norms"] == "0.5 to 25, median 5"


def test_compression_is_a_share_of_the_bytes_before():
    facts = facts_of(embedding_sheets.compression_sheets(vector_records.compression())[0])
    assert facts["Size"] == "22.9 MiB before, 1.4 MiB after, 6.2%"


def test_all_is_said_of_all_alone_and_a_cached_subset_took_no_time():
    facts = vector_records.subset_facts(
        num_words=10_000, num_exact=9_999, num_lower=0, num_capitalised=0, is_from_cache=True
    )
    shown = facts_of(embedding_sheets.subset_sheets(facts)[0])
    assert shown["Found"].startswith("9,999 (99.9%) of the words")
    assert shown["Time"] == "none: read from the cache; reading the file took 500 ms"
