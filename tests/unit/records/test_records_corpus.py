"""Facts about a corpus, restored unchanged from JSON, tuples included."""

import corpus_records
from plimsoll.records.corpus import FeedRates, Inspection


def test_quantiles_are_pairs_of_a_share_and_a_length():
    again = Inspection.from_json(corpus_records.inspection().to_json())
    assert again.quantiles == ((0.0, 1), (0.5, 50), (0.9, 120), (1.0, 512))
    assert [filling.is_this_job for filling in again.fillings] == [False, True]


def test_memory_that_was_not_watched_is_unknown_and_not_zero():
    rates = FeedRates.from_json(corpus_records.feed_rates().to_json()).rates
    assert [rate.private_bytes for rate in rates] == [None, None, 200 << 20]
