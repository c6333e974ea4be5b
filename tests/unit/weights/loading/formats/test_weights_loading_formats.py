"""The head of a file, which is long enough to distinguish all formats."""

from plimsoll.weights.loading.formats import HEAD_BYTES, safetensors, torch_bin


def test_the_head_holds_what_formats_look_at():
    assert len(torch_bin._OLD) <= HEAD_BYTES
    assert HEAD_BYTES > safetensors._LENGTH_BYTES
