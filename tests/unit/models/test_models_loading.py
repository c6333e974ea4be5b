"""Loading tensor by tensor: the weights equal ``from_pretrained`` bitwise, in little memory or none."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from checkpoints import MODELS, model_of, save_as_bin, saved
from plimsoll.device.mapped_memory import MappedPool
from plimsoll.errors import DeviceError, WeightsError
from plimsoll.models.loading import Loaded, load_model
from processes import environment


def assert_same(loaded: Loaded, plain: torch.nn.Module) -> None:
    """Assert equal names, types and bits, including buffers that are not saved."""
    assert type(loaded.model) is type(plain)
    for mine, theirs in (
        (loaded.model.state_dict(), plain.state_dict()),
        (dict(loaded.model.named_parameters()), dict(plain.named_parameters())),
        (dict(loaded.model.named_buffers()), dict(plain.named_buffers())),
    ):
        assert list(mine) == list(theirs)
        for name, value in theirs.items():
            assert mine[name].dtype == value.dtype, name
            assert mine[name].device == value.device, name
            assert torch.equal(mine[name], value), name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", ["memory", "mapped"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_bitwise_those_of_from_pretrained(name, dtype, place, tmp_path):
    model = saved(name, tmp_path)
    plain = type(model).from_pretrained(tmp_path, dtype=dtype or "auto")
    loaded = load_model(tmp_path, dtype=dtype, place=place)
    assert_same(loaded, plain)
    assert loaded.missing == loaded.unexpected == ()
    assert not loaded.model.training
    assert all(parameter.requires_grad is (place == "memory") for parameter in loaded.model.parameters())


@pytest.mark.parametrize("place", ["memory", "mapped"])
@pytest.mark.parametrize("name", ["gpt2", "bert-masked", "t5", "mixtral"])
def test_files_of_torch_save_give_the_same(name, place, tmp_path):
    model = model_of(name)
    save_as_bin(model, tmp_path)
    assert_same(load_model(tmp_path, place=place), type(model).from_pretrained(tmp_path))


def test_a_half_precision_checkpoint_is_converted_up(tmp_path):
    model = model_of("llama").bfloat16()
    model.save_pretrained(tmp_path)
    assert load_model(tmp_path).model.dtype == torch.bfloat16
    assert_same(
        load_model(tmp_path, dtype=torch.float32),
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32),
    )


def test_tied_weights_that_differ_in_the_checkpoint_stay_apart(tmp_path):
    model = model_of("gpt2")
    save_as_bin(model, tmp_path)
    state = model.state_dict()
    state["lm_head.weight"] = torch.ones(100, 32)
    torch.save(state, tmp_path / "pytorch_model.bin")
    loaded = load_model(tmp_path).model
    assert torch.equal(loaded.lm_head.weight, torch.ones(100, 32))
    assert torch.equal(loaded.transformer.wte.weight, state["transformer.wte.weight"])


@pytest.mark.parametrize("place", ["memory", "mapped"])
def test_a_new_head_is_reported_and_drawn_as_transformers_does(place, tmp_path):
    saved("bert-masked", tmp_path)
    torch.manual_seed(3)
    plain = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    torch.manual_seed(3)
    loaded = load_model(tmp_path, head="classification", place=place)
    assert_same(loaded, plain)
    assert "classifier.weight" in loaded.missing
    assert "bert.pooler.dense.weight" in loaded.missing
    assert "cls.predictions.bias" in loaded.unexpected


def test_heads_are_chosen_by_name(tmp_path):
    saved("gpt2", tmp_path)
    names = {head: type(load_model(tmp_path, head=head).model).__name__ for head in ("none", "language-modeling")}
    assert names == {"none": "GPT2Model", "language-modeling": "GPT2LMHeadModel"}
    saved("opt", tmp_path / "opt")
    with pytest.raises(WeightsError, match="`opt`, for which transformers has no token-classification model"):
        load_model(tmp_path / "opt", head="token-classification")


def test_a_body_that_lacks_weights_is_an_error_unless_it_is_asked_for(tmp_path):
    config = saved("llama", tmp_path).config
    config.num_hidden_layers = 3
    with pytest.raises(WeightsError, match=r"lacks 9 of the weights of a LlamaForCausalLM .*set allow_missing"):
        load_model(tmp_path, config=config)
    loaded = load_model(tmp_path, config=config, allow_missing=True, place="mapped")
    assert len(loaded.missing) == 9
    assert not any(parameter.is_meta for parameter in loaded.model.parameters())


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert-masked"])
@pytest.mark.parametrize("vocab_size", [90, 107])
def test_another_vocabulary_keeps_the_rows_there_are(name, vocab_size, tmp_path):
    old = saved(name, tmp_path)
    model = load_model(tmp_path, vocab_size=vocab_size).model
    num_kept = min(vocab_size, 100)
    for mine, theirs in (
        (model.get_input_embeddings().weight, old.get_input_embeddings().weight),
        (model.get_output_embeddings().weight, old.get_output_embeddings().weight),
    ):
        assert mine.shape == (vocab_size, 32)
        assert torch.equal(mine[:num_kept], theirs[:num_kept])
        for row in mine[num_kept:]:
            torch.testing.assert_close(row, theirs.mean(dim=0), rtol=1e-4, atol=1e-6)
    assert model.config.vocab_size == vocab_size
    assert model(torch.tensor([[0, vocab_size - 1]])).logits.shape[-1] == vocab_size


def test_a_pool_holds_weights_that_learn(tmp_path):
    model = saved("gpt2", tmp_path)
    pool = MappedPool()
    loaded = load_model(tmp_path, pool=pool)
    assert all(pool.holds(parameter) and parameter.requires_grad for parameter in loaded.model.parameters())
    assert_same(loaded, type(model).from_pretrained(tmp_path))


def test_what_is_mapped_says_where_it_is(tmp_path):
    saved("gpt2", tmp_path)
    loaded = load_model(tmp_path, place="mapped")
    assert set(loaded.entries) == {name for name, _ in loaded.model.named_parameters()}
    entry = loaded.entries["transformer.h.0.mlp.c_fc.weight"]
    assert torch.equal(entry.read(), loaded.model.transformer.h[0].mlp.c_fc.weight)
    assert loaded.num_bytes == sum(one.num_bytes for one in loaded.entries.values())


def test_progress_is_told_in_bytes_up_to_the_last(tmp_path):
    saved("mixtral", tmp_path)
    told = []
    loaded = load_model(tmp_path, progress=lambda stage, done, total: told.append((stage, done, total)))
    assert told[-1] == ("loading weights", loaded.num_bytes, loaded.num_bytes)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


def test_an_interruption_leaves_through_the_progress(tmp_path):
    saved("gpt2", tmp_path)

    def interrupt(stage, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_model(tmp_path, progress=interrupt)
    assert load_model(tmp_path)


def test_generation_settings_come_along(tmp_path):
    model = saved("gpt2", tmp_path)
    model.generation_config.max_new_tokens = 7
    model.generation_config.save_pretrained(tmp_path)
    loaded = load_model(tmp_path).model
    assert loaded.generation_config.max_new_tokens == 7
    assert loaded.name_or_path == str(tmp_path)


def test_what_cannot_be_is_refused(tmp_path):
    saved("gpt2", tmp_path)
    with pytest.raises(WeightsError, match="place mapped keeps weights in files, which device meta cannot"):
        load_model(tmp_path, place="mapped", device="meta")
    with pytest.raises(WeightsError, match="dtype torch.int8 is not a floating-point type: give fp32"):
        load_model(tmp_path, dtype=torch.int8)
    with pytest.raises(WeightsError, match="not together with quantize int8: load with 1 adapters, save"):
        load_model(tmp_path, quantize="int8", adapters=[tmp_path])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(WeightsError, match="is quantized already"):
        load_model(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(WeightsError, match="is not a Hugging Face checkpoint that can be read"):
        load_model(tmp_path)


# Each case forks a process that has loaded a small model, because a limit cannot be taken back.
LIMITED = """
import gc, json, os, resource, sys, torch, transformers
from plimsoll.device import process
from plimsoll.models.loading import load_model
folder, small, *cases = sys.argv[1:]
torch.set_num_threads(1)
load_model(small)  # what libraries allocate once
gc.freeze()
for how, dtype, room in map(json.loads, cases):
    if os.fork():
        os.wait()
        continue
    dtype = dtype and getattr(torch, dtype)
    resource.setrlimit(resource.RLIMIT_DATA, (process.data_bytes() + room, resource.RLIM_INFINITY))
    try:
        if how == "plain":
            transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype or "auto")
        else:
            load_model(folder, place=how, dtype=dtype)
    except (MemoryError, RuntimeError, OSError) as error:
        print("no room", type(error).__name__, flush=True)
    else:
        print("loaded", flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> tuple[Path, Path, int, int]:
    """Return a folder with about 150 MiB of weights, a small one, and the bytes of all weights and of the largest."""
    folder, small = tmp_path_factory.mktemp("large"), tmp_path_factory.mktemp("small")
    fields = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 2000}
    config = transformers.LlamaConfig(**fields, num_attention_heads=4)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    saved("llama", small)
    sizes = [parameter.numel() * 4 for parameter in model.parameters()]
    yield folder, small, sum(sizes), max(sizes)
    shutil.rmtree(folder)


def outcomes(large: tuple[Path, Path, int, int], *cases: tuple[str, str | None, int]) -> list[str]:
    """Return the outcome of loading for each case: a place, a dtype and the available bytes."""
    folder, small, _, _ = large
    command = [sys.executable, "-c", LIMITED, str(folder), str(small), *map(json.dumps, cases)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return [" ".join(line.split()[:2]) for line in done.stdout.splitlines()]


def trained(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the weights after two steps of AdamW, and after in-place changes as by ``.data`` and peft's merging."""
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        ids = torch.arange(8)[None]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.data.add_(1)
        parameter.detach()[0] *= 2
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("save", [lambda model, folder: model.save_pretrained(folder), save_as_bin])
def test_mapped_weights_are_trained_like_others_and_the_files_stay(save, tmp_path):
    save(model_of("gpt2"), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    mapped = load_model(tmp_path, place="mapped").model
    assert all(map(torch.equal, trained(mapped), trained(load_model(tmp_path).model)))
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


def test_mapped_weights_that_are_one_tensor_in_the_file_but_two_in_the_model_are_written_apart(tmp_path):
    model = model_of("gpt2")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = model.state_dict()
    one, other = "transformer.h.0.ln_1.bias", "transformer.h.1.ln_1.bias"
    state[other] = state[one]
    torch.save(state, tmp_path / "pytorch_model.bin")
    weights = dict(load_model(tmp_path, place="mapped").model.named_parameters())
    with torch.no_grad():
        weights[one] += 1
    assert torch.equal(weights[other], state[one])
    assert torch.equal(weights[one], state[one] + 1)


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_type_has_the_names_that_people_give_it(dtype, tmp_path):
    saved("gpt2", tmp_path)
    assert {one.dtype for one in load_model(tmp_path, dtype=dtype).model.parameters()} == {torch.bfloat16}


@pytest.mark.long
def test_the_peak_is_the_model_and_its_largest_tensor_and_weights_that_are_mapped_to_be_read_take_no_room(large):
    _, _, all_bytes, largest_bytes = large
    assert all_bytes > 120 << 20
    whole_bytes, half_bytes, little = all_bytes + largest_bytes, all_bytes // 2 + largest_bytes, 64 << 20
    assert outcomes(
        large,
        ("memory", None, whole_bytes + little),
        ("memory", "bfloat16", half_bytes + little),
        ("plain", "bfloat16", half_bytes + little),
        ("read-only", None, little),
        ("memory", None, little),
    ) == ["loaded", "loaded", "no room", "loaded", "no room"]


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"quantize": "int3"}, WeightsError, "quantize is 'int3', which is not known: give one of None, int8, int4"),
        ({"place": "disk"}, WeightsError, "place is 'disk', which is not known: give one of memory, mapped, read-only"),
        ({"dtype": "fp33"}, WeightsError, "dtype 'fp33' is not a floating-point type: give fp32, bf16, fp16, fp64, or"),
        ({"head": "lm"}, WeightsError, "head is 'lm', which is not known: give one of None, language-modeling"),
        ({"vocab_size": 0}, WeightsError, "vocab_size is 0, but must be at least 1: give"),
        ({"device": "tpu"}, DeviceError, "no device 'tpu'"),
        ({"device": "cpu:x"}, DeviceError, "no device 'cpu:x'"),
        ({"device": "cuda:99"}, DeviceError, "cannot use cuda:99"),
    ],
)
def test_arguments_are_checked_before_anything_is_read(arguments, error, said, tmp_path):
    saved("gpt2", tmp_path)
    with pytest.raises(error, match=said):
        load_model(tmp_path, **arguments)


@pytest.mark.parametrize("form", [str, Path])
def test_adapters_may_be_a_single_folder(form, tmp_path):
    with pytest.raises(WeightsError, match="nowhere has no adapter_config"):
        load_model(saved_in(tmp_path / "m"), adapters=form(tmp_path / "nowhere"))


def saved_in(folder: Path) -> Path:
    saved("gpt2", folder)
    return folder
