"""A table in host memory, compared with `nn.Embedding(sparse=True)`: results are bitwise equal."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from plimsoll.embeddings import host
from plimsoll.embeddings.host import HostEmbedding
from plimsoll.errors import InputError, OutputError

# torch 2.13 warns about the sparse tensors of every optimizer, once per process.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")

ROWS, WIDTH = 60, 5
SHAPES = [(1,), (40,), (6, 9), (2, 3, 7), (0,), (3, 0)]
OPTIMIZERS = {"adagrad": torch.optim.Adagrad, "sparse_adam": torch.optim.SparseAdam, "sgd": torch.optim.SGD}


def pair(padding_idx=None, path=None, dtype=None):
    """Return a plain embedding and one in host memory, with equal values."""
    torch.manual_seed(1)
    plain = nn.Embedding(ROWS, WIDTH, padding_idx, sparse=True, dtype=dtype)
    return plain, HostEmbedding.from_rows(plain.weight.detach(), padding_idx=padding_idx, path=path)


def gradient_of(embedding, batches, seed=2):
    """Return the gradient of a weighted sum of several lookups, and their outputs."""
    generator = torch.Generator().manual_seed(seed)
    outputs = []
    for ids in batches:
        outputs.append(embedding(ids))
        factors = torch.randn(outputs[-1].shape, generator=generator).to(outputs[-1].dtype)
        (outputs[-1] * factors).sum().backward()
    return embedding.weight.grad, outputs


@pytest.mark.parametrize("padding_idx", [None, 3, -1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_have_the_bits_of_a_plain_embedding(shape, dtype, padding_idx):
    plain, mine = pair(padding_idx)
    ids = torch.randint(0, ROWS, shape, dtype=dtype)
    expected, (expected_output,) = gradient_of(plain, [ids])
    found, (output,) = gradient_of(mine, [ids])
    assert output.shape == (*shape, WIDTH)
    assert torch.equal(output, expected_output)
    assert found.is_coalesced()
    assert torch.equal(found._indices(), expected.coalesce()._indices())
    assert torch.equal(found._values(), expected.coalesce()._values())


def test_a_single_id_without_a_dimension_is_looked_up():
    """A single id without a dimension is looked up.

    With a padding row, the backward pass of a plain embedding fails for such an id (torch 2.13).
    """
    plain, mine = pair(padding_idx=3)
    found, (output,) = gradient_of(mine, [torch.tensor(4)])
    assert torch.equal(output, plain(torch.tensor(4)))
    assert found._indices().tolist() == [[4]]


@pytest.mark.parametrize("padding_idx", [None, 0])
@pytest.mark.parametrize("num_ids", [3000, 70_000])
def test_many_duplicates_are_added_up_in_the_same_order(num_ids, padding_idx):
    plain, mine = pair(padding_idx)
    ids = torch.randint(0, ROWS, (num_ids,))
    expected, _ = gradient_of(plain, [ids])
    found, _ = gradient_of(mine, [ids])
    assert torch.equal(found._values(), expected.coalesce()._values())


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_micro_batches_add_up(padding_idx):
    plain, mine = pair(padding_idx)
    batches = [torch.randint(0, high, (4, 8)) for high in (ROWS, 5, 2, ROWS)]
    expected, _ = gradient_of(plain, batches)
    found, _ = gradient_of(mine, batches)
    assert found.is_coalesced()
    assert torch.equal(found._indices(), expected.coalesce()._indices())
    torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=0, atol=1e-5)
    exact = gradient_of(pair(padding_idx, dtype=torch.float64)[0], batches)[0].to_dense()
    assert (found.to_dense() - exact).abs().max() < 1e-5


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("is_mapped", [False, True])
def test_weights_after_many_steps_are_those_of_plain_pytorch(name, padding_idx, is_mapped, tmp_path):
    trained = []
    for embedding in pair(padding_idx, path=tmp_path / "table" if is_mapped else None):
        optimizer = OPTIMIZERS[name](embedding.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(3)
        for step in range(40):
            optimizer.zero_grad()
            ids = torch.randint(0, (7, ROWS)[step % 2], (4, 9), generator=generator)
            gradient_of(embedding, [ids], seed=step)
            optimizer.step()
        trained.append(embedding.weight.detach())
    if name == "sgd":  # SGD adds the parts of a row's gradient to the weight one by one
        torch.testing.assert_close(*trained, rtol=0, atol=1e-5)
    else:
        assert torch.equal(*trained)


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_a_new_table_begins_with_the_bits_of_a_plain_embedding(padding_idx, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_BLOCK_ELEMENTS", 100)
    torch.manual_seed(7)
    plain = nn.Embedding(1000, 8, padding_idx)
    for path in (None, tmp_path / "table"):
        torch.manual_seed(7)
        assert torch.equal(HostEmbedding(1000, 8, padding_idx, path=path).weight, plain.weight)


def test_a_table_is_initialised_block_by_block(monkeypatch):
    monkeypatch.setattr(host, "_BLOCK_ELEMENTS", 160)
    seen = []
    HostEmbedding(50, 10, initialize=lambda block_RD: seen.append(tuple(block_RD.shape)))
    assert seen == [(16, 10)] * 3 + [(2, 10)]


def test_a_file_is_opened_with_what_a_training_left_in_it(tmp_path):
    path = tmp_path / "table.bin"
    first = HostEmbedding(ROWS, WIDTH, path=path)
    with torch.no_grad():
        first.weight[4] = 7
    again = HostEmbedding(ROWS, WIDTH, path=path)
    assert torch.equal(first.weight, again.weight)
    assert np.memmap(path, np.float32, "r", shape=(ROWS, WIDTH))[4].tolist() == [7] * WIDTH
    with torch.no_grad():
        again.weight[5] = 8
    assert first.weight[5].tolist() == [8] * WIDTH


def test_a_file_of_another_size_is_refused(tmp_path):
    HostEmbedding(ROWS, WIDTH, path=tmp_path / "table.bin")
    with pytest.raises(OutputError, match=r"has 1,200 bytes, but 61 rows of 5 torch.float32 are 1,220: give"):
        HostEmbedding(ROWS + 1, WIDTH, path=tmp_path / "table.bin")


def test_rows_are_not_copied_over_a_file(tmp_path):
    path = tmp_path / "table.bin"
    HostEmbedding(ROWS, WIDTH, path=path)
    with pytest.raises(OutputError, match=r"it exists; remove it, or open it with HostEmbedding\(60, 5, path=...\)"):
        HostEmbedding.from_rows(torch.zeros(ROWS, WIDTH), path=path)


@pytest.mark.parametrize("kind", ["array", "memmap", "tensor"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_training_does_not_change_the_rows_it_was_made_of(kind, dtype, tmp_path):
    values = np.arange(12, dtype=dtype).reshape(4, 3)
    values.tofile(tmp_path / "rows")
    rows = {"array": values, "memmap": np.memmap(tmp_path / "rows", dtype, "r", shape=(4, 3))}.get(kind)
    rows = torch.from_numpy(values) if rows is None else rows
    for path in (None, tmp_path / "table"):
        table = HostEmbedding.from_rows(rows, path=path)
        assert table.weight.dtype == torch.from_numpy(values).dtype
        assert table.weight.requires_grad
        with torch.no_grad():
            table.weight[1] = 0
        assert np.asarray(rows)[1].tolist() == [3, 4, 5]
        assert table.weight[2].tolist() == [6, 7, 8]


def test_a_frozen_table_is_the_mapping_it_was_made_of(tmp_path):
    rows = np.memmap(tmp_path / "rows", np.float32, "w+", shape=(4, 3))
    rows[:] = 2
    table = HostEmbedding.from_rows(rows, trainable=False)
    assert table.weight.data_ptr() == rows.ctypes.data
    output = table(torch.tensor([1, 1, 3]))
    assert output.tolist() == [[2] * 3] * 3
    assert not output.requires_grad


@pytest.mark.parametrize("part", [slice(None), slice(1, 3), slice(None, None, 2)])
def test_a_frozen_table_of_a_file_for_reading_can_be_written_and_the_file_stays(part, tmp_path):
    np.arange(12, dtype=np.float32).tofile(tmp_path / "rows")
    rows = np.memmap(tmp_path / "rows", np.float32, "r", shape=(4, 3))[part]
    table = HostEmbedding.from_rows(rows, trainable=False)
    assert table.weight.tolist() == rows.tolist()
    table.load_state_dict({"weight": torch.zeros(table.weight.shape)})
    assert not table.weight.any()
    assert np.fromfile(tmp_path / "rows", np.float32).tolist() == list(range(12))


def test_a_frozen_table_of_an_array_for_reading_does_not_change_the_array():
    values = np.ones((4, 3), np.float32)
    values.flags.writeable = False
    table = HostEmbedding.from_rows(values, trainable=False)
    table.weight.data.zero_()
    assert values.all()


@pytest.mark.parametrize("rows", [torch.zeros(3), np.zeros((2, 2), np.int64), torch.zeros(1, 2, 3)])
def test_what_is_no_matrix_of_floats_is_refused(rows):
    with pytest.raises(InputError, match="give a matrix of floats"):
        HostEmbedding.from_rows(rows)


def test_a_type_that_there_is_not_is_refused():
    assert HostEmbedding(3, 2, dtype="fp16").weight.dtype == torch.float16
    with pytest.raises(InputError, match="dtype 'fp33' is not a floating-point type: give fp32"):
        HostEmbedding(3, 2, dtype="fp33")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 3), "0 rows of width 3: give"), ((3, 0), "3 rows of width 0"), ((3, 2, 3), "padding_idx 3 is not a row")],
)
def test_impossible_sizes_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        HostEmbedding(*arguments)


@pytest.mark.parametrize("ids", [[0, ROWS], [-1, 2]])
def test_ids_outside_of_the_table_are_an_index_error(ids):
    _, mine = pair()
    for look_up in (mine, mine.prefetch, lambda ids: host._rows_at(mine.weight.detach(), ids)):
        with pytest.raises(IndexError, match="looked up in a table of 60 rows: map ids outside of 0 to 59"):
            look_up(torch.tensor(ids))


@pytest.mark.parametrize(
    "move", [lambda m: m.to("meta"), nn.Module.half, lambda m: m.to(torch.bfloat16), nn.Module.double]
)
def test_the_table_stays_where_it_is_when_the_model_moves(move):
    _, table = pair()
    model = nn.Sequential(table, nn.Linear(WIDTH, 2))
    table(torch.tensor([1, 1])).sum().backward()
    weight, values, gradient = table.weight, table.weight.detach().clone(), table.weight.grad
    move(model)
    assert table.weight is weight
    assert (weight.device.type, weight.dtype) == ("cpu", torch.float32)
    assert torch.equal(weight, values)
    assert weight.grad is gradient
    assert (model[1].weight.device.type, model[1].weight.dtype) != ("cpu", torch.float32)


def test_a_model_in_half_precision_gets_rows_in_half_precision():
    plain, table = pair()
    model = nn.Sequential(table, nn.Linear(WIDTH, 2)).to(torch.bfloat16)
    output = model[0](torch.tensor([1, 1, 4]))
    assert torch.equal(output, plain.to(torch.bfloat16)(torch.tensor([1, 1, 4])))
    model[1](output).sum().backward()
    assert table.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_table_in_another_precision_has_the_bits_of_a_plain_one(dtype):
    plain, mine = pair(dtype=dtype)
    ids = torch.randint(0, ROWS, (50,))
    expected, (expected_output,) = gradient_of(plain, [ids])
    found, (output,) = gradient_of(mine, [ids])
    assert torch.equal(output, expected_output)
    assert torch.equal(found.to_dense(), expected.coalesce().to_dense())


def test_under_autocast_it_does_what_a_plain_embedding_does():
    results = []
    for embedding in pair():
        torch.manual_seed(5)
        model = nn.Sequential(embedding, nn.Linear(WIDTH, 4))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.tensor([[1, 2, 1], [5, 5, 5]])).float().square().sum()
        loss.backward()
        results.append((loss.detach(), embedding.weight.grad.to_dense()))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_it_works_without_gradients():
    plain, mine = pair()
    ids = torch.tensor([[4, 4], [0, 59]])
    for block in (torch.no_grad(), torch.inference_mode()):
        with block:
            assert torch.equal(mine(ids), plain(ids))
    mine.weight.requires_grad_(False)
    assert not mine(ids).requires_grad
    assert torch.equal(mine(ids), plain(ids))


def test_weights_are_saved_and_loaded_in_place(tmp_path):
    plain, mine = pair(path=tmp_path / "table")
    other = HostEmbedding(ROWS, WIDTH, path=tmp_path / "other")
    place = other.weight.data_ptr()
    assert mine.state_dict()["weight"].data_ptr() == mine.weight.data_ptr()
    torch.save(mine.state_dict(), tmp_path / "saved")
    for assign in (False, True):
        torch.nn.init.zeros_(other.weight)
        other.load_state_dict(torch.load(tmp_path / "saved"), assign=assign)
        assert other.weight.data_ptr() == place
        assert torch.equal(other.weight, plain.weight)
    nn.Embedding(ROWS, WIDTH).load_state_dict(mine.state_dict())
    mine.load_state_dict(plain.state_dict())


def test_a_copy_trains_by_itself(tmp_path):
    _, mine = pair(path=tmp_path / "table")
    twin = copy.deepcopy(mine)
    with torch.no_grad():
        twin.weight.zero_()
    assert mine.weight.any()
    assert gradient_of(twin, [torch.tensor([1, 1])])[0].coalesce()._indices().tolist() == [[1]]


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_done_for_ids_on_another_device_gives_the_same(shape, padding_idx, monkeypatch):
    """The lookup for ids on a GPU has the same results when it runs on the CPU."""
    monkeypatch.setattr(host, "_are_on_one_device", lambda *_: False)
    plain, mine = pair(padding_idx)
    ids = torch.randint(0, ROWS, shape)
    assert host._rows_at(mine.weight.detach(), ids)[2].shape == (len(ids.unique()), WIDTH)  # each row is sent once
    expected, (expected_output,) = gradient_of(plain, [ids])
    found, (output,) = gradient_of(mine, [ids])
    assert torch.equal(output, expected_output)
    assert found.is_coalesced()
    assert torch.equal(found._indices(), expected.coalesce()._indices())
    torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=0, atol=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_only_the_rows_of_a_batch_are_there():
    plain, mine = pair(padding_idx=3)
    mine.cuda()
    ids = torch.randint(0, ROWS, (6, 9))
    expected, (expected_output,) = gradient_of(plain, [ids])
    output = mine(ids.cuda())
    assert torch.equal(output.cpu(), expected_output)
    (output * torch.randn(6, 9, WIDTH, generator=torch.Generator().manual_seed(2)).cuda()).sum().backward()
    assert mine.weight.grad.device.type == "cpu"
    torch.testing.assert_close(mine.weight.grad.to_dense(), expected.to_dense(), rtol=0, atol=1e-5)


def test_it_describes_itself(tmp_path):
    assert repr(HostEmbedding(3, 2, 0)) == "HostEmbedding(3, 2, padding_idx=0)"
    assert repr(HostEmbedding(3, 2, path=tmp_path / "a")) == f"HostEmbedding(3, 2, path={tmp_path / 'a'})"
