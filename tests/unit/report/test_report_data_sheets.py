"""The sheets of a corpus: the shortening of long lists, and empty values."""

import corpus_records
from plimsoll.records.corpus import LabelCount, TagCount
from plimsoll.report import data_sheets


def test_an_answer_is_summed_up_in_a_few_words():
    corpus = corpus_records.corpus_facts(num_texts=1234)
    assert data_sheets.headline(corpus) == "1,234 texts"
    feed = corpus_records.feed_rates()
    assert data_sheets.headline(feed) == f"{len(feed.rates)} rates"


def test_the_most_frequent_classes_are_shown_first_and_no_more_than_twenty():
    labels = tuple(LabelCount(name=f"c{number}", num_texts=number + 1) for number in range(30))
    sheet = data_sheets.label_sheet(corpus_records.corpus_facts(labels=labels, num_texts=465))
    assert sheet.title == "Classes, 20 of 30"
    assert [row[0] for row in sheet.rows] == [f"c{number}" for number in range(29, 9, -1)]
    assert sheet.rows[0] == ("c29", "30", "6.5%")


def test_what_was_left_out_is_counted_and_the_first_of_it_named():
    skipped = tuple(f"file {number}: why" for number in range(100))
    sheet = data_sheets.skipped_sheet(corpus_records.corpus_facts(num_skipped=1234, skipped=skipped))
    assert sheet.title == "Left out, 5 of 1,234"
    assert sheet.rows[0] == ("file 0: why",)
    assert data_sheets.skipped_sheet(corpus_records.corpus_facts(num_skipped=0, skipped=())).rows == ()


def test_bytes_are_written_as_sizes_and_the_rest_as_numbers():
    rows = data_sheets.rate_sheet(corpus_records.feed_rates()).rows
    assert [row[2] for row in rows] == ["5,000,000 texts/s", "4.0 MiB/s", "100,000,000 tokens/s"]
    assert [row[3] for row in rows] == ["", "", "200.0 MiB"]


def test_the_way_of_this_job_is_marked():
    rows = data_sheets.filling_sheet(corpus_records.inspection()).rows
    assert [row[0] for row in rows] == ["padded to 256", "by_length *"]
    assert rows[1][1:] == ("1,010", "2.0%", "2,048", "0")


def test_tags_are_shares_of_the_words():
    tags = (TagCount(name="B-PER", num_words=10), TagCount(name="O", num_words=30))
    sheet = data_sheets.tag_sheet(corpus_records.corpus_facts(labels=(), tags=tags))
    assert sheet.title == "Tags, 2 of 2"
    assert sheet.rows == (("O", "30", "75.0%"), ("B-PER", "10", "25.0%"))


def test_hidden_files_are_counted_beside_what_was_left_out():
    for num_skipped, num_hidden, said in ((0, 0, "none"), (0, 1, "1 hidden file or folder"), (5, 0, "5"),
                                          (5, 3, "5 and 3 hidden files and folders")):  # fmt: skip
        facts = corpus_records.corpus_facts(num_skipped=num_skipped, num_hidden=num_hidden)
        assert ("Left out", said) in data_sheets.corpus_sheet(facts).rows
