"""The place where a model is built with techniques that keep parameters off the device, and the parts moved there."""

import pytest

from plimsoll.device.off_device import is_marked
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.techniques.mechanisms.building import builds_outside, put_where_needed
from technique_trainings import gpt2

ALL = Choice(technique="layer_streaming", options={"blocks": "all"})
IN_FILES = Choice(technique="parameter_offload", options={"gradients": False})
IN_CODES = Choice(technique="lora", options={"rank": 2, "alpha": 4, "base": "nf4"})
IN_SHARDS = Choice(technique="fully_shard", options={"gathered": "once", "offload": "disk"})
ON_THE_HOST = Choice(technique="fully_shard", options={"gathered": "once", "offload": "host"})


@pytest.mark.parametrize(
    ("choice", "devices"),
    [
        (micro_batch_choice(1), set()),
        (ALL, {"cuda"}),
        (IN_FILES, {"cpu"}),
        (IN_CODES, {"cpu"}),
        (IN_SHARDS, {"cpu"}),
        (ON_THE_HOST, set()),
    ],
    ids=str,
)
def test_some_are_built_outside_of_the_memory_of_a_device(choice, devices):
    assert {device for device in ("cpu", "cuda") if builds_outside([micro_batch_choice(2), choice], device)} == devices


def test_a_model_is_put_on_the_device_but_for_what_is_streamed():
    model = gpt2()
    put_where_needed(model, "cpu", [micro_batch_choice(1), ALL])
    marked = {name for name, one in model.named_parameters() if is_marked(one)}
    assert marked == {name for name, _ in model.named_parameters() if name.startswith("transformer.h.")}
    other = gpt2()
    put_where_needed(other, "meta", [ALL])
    assert {str(one.device) for one in other.parameters()} == {"cpu", "meta"}
    assert other.transformer.h[0].ln_1.weight.device.type == "cpu"
    assert other.transformer.h[0].attn.bias.is_meta if hasattr(other.transformer.h[0].attn, "bias") else True
    put_where_needed(other, "meta", [micro_batch_choice(1)])
    assert {str(one.device) for one in other.parameters()} == {"meta"}
