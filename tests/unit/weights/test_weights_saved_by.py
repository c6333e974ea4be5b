"""What transformers asks to save a model in 4 bits."""

from safetensors import safe_open

from quantized_models import made, shrunk


def test_packed_weights_are_written_in_the_form_of_files(tmp_path):
    shrunk("int4", made("llama")).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names, said = set(file.keys()), file.metadata()
    assert {f"model.layers.0.mlp.up_proj._weight_{part}" for part in ("qdata", "scale", "zero_point")} <= names
    assert '"Int4Tensor"' in said["model.layers.0.mlp.up_proj.weight"]
