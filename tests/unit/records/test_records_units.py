"""Sizes and durations to text and back; every expected value is computed by hand."""

import pytest

from plimsoll.errors import InputError
from plimsoll.records.units import format_bytes, format_seconds, format_share, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1", 1),
        (4096, 4096),
        ("800B", 800),
        ("2KiB", 2048),
        ("1 kB", 1000),
        ("800MiB", 838_860_800),
        ("800MB", 800_000_000),
        ("2GiB", 2_147_483_648),
        ("2gib", 2_147_483_648),
        ("1.5 GB", 1_500_000_000),
        (" 1.5 GiB ", 1_610_612_736),
        ("1TiB", 1_099_511_627_776),
        ("2PiB", 2_251_799_813_685_248),
        ("2pb", 2_000_000_000_000_000),
        ("0.1GiB", 107_374_182),  # 107374182.4
        ("9007199254740993", 9_007_199_254_740_993),  # 2**53 + 1 has no exact float
        (2e9, 2_000_000_000),
    ],
)
def test_a_size_is_read(text: str | int, num_bytes: int):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "8G", "8 Gi B", "-1GiB", "1,5GiB", "1e9", "lots", "٣GiB", "inf", True, None]
)
def test_what_is_not_a_size_is_refused(text: object):
    with pytest.raises(InputError) as caught:
        parse_bytes(text)
    assert str(caught.value) == (
        f"cannot read {text!r} as a size in bytes: write a number and a unit (B, KiB, MiB, GiB, TiB, PiB, kB, MB, GB, "
        "TB or PB), for example 2GiB or 800MiB"
    )


def test_a_size_beyond_what_the_kernel_counts_in_is_refused():
    assert parse_bytes(str(2**63 - 1)) == 2**63 - 1
    with pytest.raises(InputError, match="a size must be less than 8192 PiB, got '8192PiB'"):
        parse_bytes("8192PiB")


@pytest.mark.parametrize("text", ["0", 0, "0GiB", "0.4B"])
def test_a_size_of_less_than_one_byte_is_refused(text: str | int):
    with pytest.raises(InputError, match="a size must be more than 0 bytes, got .*: write for example 2GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (None, "unknown"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1_048_524, "1023.9 KiB"),  # 1023.949 KiB
        (1_048_525, "1.0 MiB"),  # 1023.950 KiB would be "1024.0 KiB"
        (1_048_576, "1.0 MiB"),
        (3_650_722_202, "3.4 GiB"),
        (2**40, "1.0 TiB"),
        (2**50, "1.0 PiB"),
        (5000 * 2**50, "5000.0 PiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_a_size_is_written(num_bytes: int | None, text: str):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "unknown"),
        (0, "0 ms"),
        (0.85, "850 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (12.34, "12.3 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (11_279, "3 h 07 min"),
        (100 * 3600, "100 h 00 min"),
    ],
)
def test_a_duration_is_written(seconds: float | None, text: str):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 7, "0.0%"),
        (7, 7, "100.0%"),
        (1, 10**6, "0.1%"),
        (10**6 - 1, 10**6, "99.9%"),
        (1, 3, "33.3%"),
        (0, 0, "0.0%"),
    ],
)
def test_a_share_is_all_or_nothing_only_where_it_is(part: int, whole: int, text: str):
    assert format_share(part, whole) == text
