"""The batches of an epoch: each sample once, within the budget, with little padding, from any position."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from plimsoll.data.batches.batching import Batches, Buckets, Cursor, batches_of
from plimsoll.data.batches.order import BlockShuffle
from plimsoll.errors import CheckpointError, DataError


class Texts:
    """Samples of given lengths."""

    def __init__(self, tokens: NDArray[np.integer]) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def lengths(self, ids: NDArray[np.int64]) -> NDArray[np.integer]:
        return self.tokens[ids]


def lognormal(num_texts: int, seed: int = 0) -> Texts:
    """Return lengths as lines of text have them: 27 tokens on average, at least 123 for one in 100, at most 512."""
    tokens = np.random.default_rng(seed).lognormal(3.0, 0.78, num_texts)
    return Texts(np.clip(tokens, 1, 512).astype(np.uint16))


def epoch_of(batches: Batches, epoch: int = 0) -> list[NDArray[np.int64]]:
    cursor, got = Cursor(epoch), []
    while cursor.epoch == epoch:
        assert batches.num_samples_before(cursor) == sum(map(len, got))
        got.append(batches.ids(cursor))
        cursor = batches.following(cursor)
    assert cursor == Cursor(epoch + 1)
    return got


def padding_share(texts: Texts, batches: list[NDArray[np.int64]]) -> float:
    padded = sum(len(ids) * int(texts.tokens[ids].max()) for ids in batches)
    return 1 - int(texts.tokens.sum(dtype=np.int64)) / padded


# rows that fit in memory, by length
ROWS_FOR = np.maximum(2000 // np.maximum(np.arange(513), 1) - np.arange(513) // 64, 1)

buckets = st.one_of(
    st.builds(Buckets, batch_size=st.integers(1, 9), pool_samples=st.integers(1, 60), longest_first=st.booleans()),
    st.builds(
        Buckets,
        max_tokens=st.integers(40, 300),
        pool_samples=st.integers(1, 60),
        pad_multiple=st.sampled_from([1, 4, 8]),
        longest_first=st.booleans(),
    ),
    st.builds(Buckets, rows_for=st.just(ROWS_FOR), pool_samples=st.integers(1, 60)),
)
shuffles = st.one_of(st.booleans(), st.builds(BlockShuffle, st.integers(1, 9), st.integers(1, 5)))


@given(tokens=st.lists(st.integers(0, 40), min_size=9, max_size=150), buckets=buckets, shuffle=shuffles)
@settings(max_examples=200, deadline=None)
def test_every_sample_comes_once_an_epoch_and_every_batch_is_in_its_budget(
    tokens: list[int], buckets: Buckets, shuffle: bool | BlockShuffle
):
    texts = Texts(np.array(tokens, np.uint16))
    batches = batches_of(texts, buckets, 5, shuffle)
    for epoch in range(2):
        got = epoch_of(batches, epoch)
        assert len(got) == batches.num_batches(epoch)
        assert sorted(np.concatenate(got).tolist()) == list(range(len(texts)))
        multiple = buckets.pad_multiple or 1
        for ids in got:
            longest = -(-int(texts.tokens[ids].max()) // multiple) * multiple
            assert not buckets.batch_size or len(ids) <= buckets.batch_size
            assert not buckets.max_tokens or len(ids) * longest <= buckets.max_tokens
            assert buckets.rows_for is None or len(ids) <= ROWS_FOR[longest]


@given(tokens=st.lists(st.integers(1, 40), min_size=9, max_size=100), buckets=buckets, epoch=st.integers(0, 1))
@settings(max_examples=50, deadline=None)
def test_what_is_left_from_any_place_on_is_what_was_left(tokens: list[int], buckets: Buckets, epoch: int):
    texts = Texts(np.array(tokens, np.uint8))
    whole = [ids.tolist() for ids in epoch_of(batches_of(texts, buckets, 1), epoch)]
    batches, cursor = batches_of(texts, buckets, 1), Cursor(epoch)
    for number, ids in enumerate(whole):
        fresh = batches_of(texts, buckets, 1)
        again = fresh.cursor(batches.state(cursor))
        assert (fresh.num_samples_before(again), fresh.ids(again).tolist()) == (sum(map(len, whole[:number])), ids)
        cursor = batches.following(cursor)


def test_buckets_pad_little():
    texts = lognormal(200_000)
    shuffled = padding_share(texts, epoch_of(batches_of(texts, 64)))
    of_size = padding_share(texts, epoch_of(batches_of(texts, Buckets(batch_size=64))))
    of_tokens = padding_share(texts, epoch_of(batches_of(texts, Buckets(max_tokens=4096))))
    assert shuffled > 0.6
    assert of_size < 0.02
    assert of_tokens < 0.01


def test_full_batches_use_the_budget():
    texts = lognormal(100_000)
    got = epoch_of(batches_of(texts, Buckets(max_tokens=8192)))
    elements = sorted(len(ids) * int(texts.tokens[ids].max()) for ids in got)
    assert np.median(elements) > 0.98 * 8192


@pytest.mark.parametrize(
    "buckets", [Buckets(batch_size=64), Buckets(max_tokens=4096), Buckets(rows_for=ROWS_FOR)], ids=str
)
def test_the_batch_of_the_longest_sample_comes_first_and_once(buckets: Buckets):
    texts = lognormal(150_000)
    texts.tokens = np.minimum(texts.tokens, 500)
    texts.tokens[77_777] = 512
    got = epoch_of(batches_of(texts, buckets, 3))
    assert 77_777 in got[0]
    assert len(got[0]) == max(len(ids) for ids in got if texts.tokens[ids].max() >= 490)
    plain = epoch_of(batches_of(texts, Buckets(**vars(buckets) | {"longest_first": False}), 3))
    moved = next(number for number, ids in enumerate(plain) if 77_777 in ids)
    assert moved > 0
    assert np.array_equal(got[0], plain[moved])
    assert np.array_equal(got[moved], plain[0])
    assert all(np.array_equal(one, other) for one, other in zip(got[1:moved], plain[1:moved], strict=True))
    later = epoch_of(batches_of(texts, buckets, 3), 1)
    assert 77_777 not in later[0]


def test_where_the_longest_sample_has_no_full_batch_the_largest_comes_first():
    texts = Texts(np.array([*range(1, 65), 100], np.uint8))
    batches = batches_of(texts, Buckets(batch_size=8, pool_samples=64), shuffle=False)
    got = epoch_of(batches)
    assert got[0].tolist() == list(range(63, 55, -1))  # 8 x 64 tokens; sample 64 is alone in the second pool
    assert got[-1].tolist() == [64]


def test_batches_come_in_another_order_each_epoch_and_seed_and_not_by_length():
    texts = lognormal(20_000)
    first, again, other_epoch, other_seed = (
        epoch_of(batches_of(texts, Buckets(batch_size=32), seed), epoch)
        for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0))
    )
    assert all(map(np.array_equal, first, again))
    assert not any(map(np.array_equal, first, other_epoch))
    assert not any(map(np.array_equal, first, other_seed))
    longest = np.array([texts.tokens[ids].max() for ids in other_epoch], float)
    assert abs(np.corrcoef(longest[:-1], longest[1:])[0, 1]) < 0.2


def test_a_state_is_a_few_integers():
    texts = lognormal(1000)
    batches = batches_of(texts, Buckets(max_tokens=2048, pool_samples=256), 1)
    state = batches.state(Cursor(3, 512, 2))
    assert set(state) == {"epoch", "position", "batch", "plan", "num_samples", "order"}
    assert (state["epoch"], state["position"], state["batch"]) == (3, 512, 2)
    assert all(0 <= value < 2**63 for value in state.values())  # 32 bytes
    assert batches.cursor(state) == Cursor(3, 512, 2)


@pytest.mark.parametrize(
    "other",
    [
        lambda texts: batches_of(texts, Buckets(max_tokens=1024, pool_samples=256), 1),
        lambda texts: batches_of(texts, Buckets(max_tokens=2048, pool_samples=512), 1),
        lambda texts: batches_of(texts, Buckets(max_tokens=2048, pool_samples=256), 2),
        lambda texts: batches_of(texts, Buckets(max_tokens=2048, pool_samples=256), 1, BlockShuffle(8, 8)),
        lambda texts: batches_of(texts, 32, 1),
    ],
)
def test_a_place_in_other_buckets_is_refused(other):
    texts = lognormal(1000)
    state = batches_of(texts, Buckets(max_tokens=2048, pool_samples=256), 1).state(Cursor(3, 512, 2))
    with pytest.raises(
        CheckpointError, match="in the middle of (epoch 3, whose batches were made with other buckets|a run)"
    ):
        other(texts).cursor(state)
    order = other(texts).state(Cursor())["order"]
    begin = state | {"epoch": 4, "position": 0, "batch": 0, "order": order}  # the position before the first batch
    assert other(texts).cursor(begin) == Cursor(4)


def test_batches_of_a_fixed_size_go_on_with_another_size():
    texts = lognormal(1000)
    batches = batches_of(texts, 8, 1)
    cursor = Cursor(1)
    for _ in range(5):
        cursor = batches.following(cursor)
    assert batches.state(cursor).items() >= {"epoch": 1, "position": 40}.items()
    other = batches_of(texts, 30, 1)
    ids = other.ids(other.cursor(batches.state(cursor)))
    whole = np.concatenate(epoch_of(batches, 1))
    assert np.array_equal(ids, whole[40:70])


def test_what_does_not_fit_the_buckets_is_an_error_in_numbers():
    texts = Texts(np.array([3, 700, 5]))
    with pytest.raises(DataError, match=r"sample 1 is padded to 704 tokens, more than .* max_tokens = 512: raise that"):
        batches_of(texts, Buckets(max_tokens=512, pad_multiple=8))
    with pytest.raises(DataError, match=r"rows_for ends at 600 tokens, but sample 1 is padded to 700"):
        batches_of(texts, Buckets(rows_for=np.ones(601, int)))
    with pytest.raises(
        DataError, match="more than a batch may have by rows_for, which allows no sample of that length"
    ):
        batches_of(texts, Buckets(rows_for=np.zeros(701, int)))
    alone = epoch_of(batches_of(texts, Buckets(max_tokens=512, allow_longer=True)))
    assert [ids.tolist() for ids in alone] == [[1], [2, 0]]


def test_what_buckets_cannot_be_made_of_is_an_error():
    with pytest.raises(DataError, match=r"one of batch_size, max_tokens and rows_for, but 0 are given: write"):
        Buckets()
    with pytest.raises(DataError, match=r"but 2 are given, batch_size, max_tokens: write"):
        Buckets(batch_size=3, max_tokens=4)
    with pytest.raises(DataError, match="max_tokens of buckets is at least 1, not 0"):
        Buckets(max_tokens=0)
    with pytest.raises(DataError, match="which list does not have: pass lengths"):
        batches_of([1, 2, 3], Buckets(batch_size=2))
    with pytest.raises(DataError, match="has 2 samples, but one step takes batch_size = 3"):
        batches_of([1, 2], Buckets(batch_size=3))
    got = epoch_of(batches_of([0] * 3, Buckets(batch_size=2), lengths=np.array([1, 9, 2])))
    assert [ids.tolist() for ids in got] == [[1, 2], [0]]


def test_batches_are_padded_as_the_data_set_says():
    texts = Texts(np.array([3, 9, 17]))
    texts.pad_multiple = 8
    batches = batches_of(texts, Buckets(max_tokens=48), shuffle=False)
    assert [ids.tolist() for ids in epoch_of(batches)] == [[2, 1], [0]]
