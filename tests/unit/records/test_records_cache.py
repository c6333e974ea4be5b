"""The record of the content of a cache folder."""

from cache_records import cache_contents
from plimsoll.records.cache import CacheContents


def test_it_comes_back_as_it_was():
    assert CacheContents.from_json(cache_contents().to_json()) == cache_contents()
