"""The sheet of a cache folder."""

from cache_records import cache_contents
from plimsoll.report.cache_sheets import cache_sheets


def test_each_kind_has_a_row_and_all_of_them_together():
    (sheet,) = cache_sheets(cache_contents())
    assert sheet.title == "Cache cache"
    assert sheet.rows == (
        ("plans", "2", "2.0 MiB", "2026-11-27 12:00"),
        ("traces", "0", "0 B", ""),
        ("data", "1,000", "1.0 GiB", "2026-11-27 12:01"),
        ("all", "1,002", "1.0 GiB", ""),
    )


def test_the_rows_are_below_each_other_without_blank_lines():
    (sheet,) = cache_sheets(cache_contents())
    assert not sheet.is_prose


def test_what_was_removed_is_not_shown_as_what_is_there():
    (sheet,) = cache_sheets(cache_contents().model_copy(update={"is_removed": True}))
    assert sheet.title == "Removed from cache"
