"""The table of GPUs: every row is sound, all spellings of a name are found, and a live card keeps its real values."""

import pytest

from plimsoll.device.cuda.gpus import all_gpus, cublas_workspace_bytes, find_gpu, spec_of
from plimsoll.errors import DeviceError
from plimsoll.records.device import Device, DeviceSpec, MemoryUse

MIB, GIB = 1 << 20, 1 << 30
ROWS = pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.name)


def device(name: str, hardware_bytes: int, **fields) -> Device:
    use = MemoryUse(used_bytes=0, peak_bytes=0, reserved_bytes=0)
    known = {"kind": "cuda", "capacity_bytes": hardware_bytes, "free_bytes": hardware_bytes, "use": use}
    return Device.model_validate(known | {"name": name, "hardware_bytes": hardware_bytes} | fields)


@ROWS
def test_a_row_is_sound(gpu: DeviceSpec):
    assert gpu.nominal_bytes is not None
    assert 0.9 * gpu.nominal_bytes < gpu.capacity_bytes <= gpu.capacity_high_bytes <= gpu.nominal_bytes
    assert gpu.capacity_bytes < gpu.nominal_bytes
    assert gpu.context_low_bytes is not None
    assert gpu.context_high_bytes is not None
    assert 50 * MIB < gpu.context_low_bytes < gpu.context_high_bytes < 900 * MIB
    assert gpu.capacity_source
    assert gpu.context_source
    assert gpu.architecture in {"6.0", "6.1", "7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"}
    assert gpu.memory_bytes_per_second is not None
    assert 1e11 < gpu.memory_bytes_per_second < 1e13
    assert gpu.num_sms is not None
    assert gpu.shared_memory_per_sm_bytes is not None
    assert len(gpu.sources) == 4
    assert DeviceSpec.model_validate_json(gpu.model_dump_json()) == gpu


@ROWS
def test_faster_types_are_not_slower(gpu: DeviceSpec):
    flops = gpu.flops
    if gpu.name.endswith("Laptop GPU"):  # the clock depends on the laptop
        assert flops.fp32 is None
        return
    assert flops.fp32 is not None
    assert 2e12 < flops.fp32 < 120e12
    assert (flops.bf16 is None) == (float(gpu.architecture or 0) < 8.0)
    assert (flops.fp8 is None) == (float(gpu.architecture or 0) < 8.9)
    if flops.bf16 is not None and flops.tf32 is not None and flops.fp16 is not None:
        assert flops.fp32 <= flops.tf32 < flops.bf16 == flops.fp16


@pytest.mark.parametrize(
    ("name", "tera"),  # NVIDIA's data sheets: dense fp16 with sums in fp32
    [
        ("RTX 3090", 71.0),
        ("RTX 4090", 165.2),
        ("RTX 5090", 209.5),
        ("T4", 65.0),
        ("V100 16GB", 125.0),
        ("A100 80GB", 312.0),
        ("A40", 149.7),
        ("A30", 165.0),
        ("A10", 125.0),
        ("L4", 121.0),
        ("L40", 181.0),
        ("P100", 18.7),
        ("RTX A6000", 154.8),
        ("RTX 2080 Ti", 53.8),
    ],
)
def test_rates_are_those_of_the_data_sheets(name: str, tera: float):
    assert find_gpu(name).flops.fp16 == pytest.approx(tera * 1e12, rel=0.005)


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [("RTX 3060", 12_622_168_064), ("RTX 4060", 8_318_222_336), ("A100-SXM4-40GB", 42_474_471_424)],
)
def test_measured_capacities_lie_in_the_range(name: str, num_bytes: int):
    gpu = find_gpu(name)
    assert gpu.capacity_bytes <= num_bytes < gpu.capacity_high_bytes + MIB


def test_every_name_means_one_gpu():
    names = [name.lower() for gpu in all_gpus() for name in (gpu.name, *gpu.aliases)]
    assert len(names) == len(set(names))
    for gpu in all_gpus():
        for name in (gpu.name, *gpu.aliases):
            assert find_gpu(name) == gpu


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("rtx3060", "RTX 3060"),
        ("RTX 3060", "RTX 3060"),
        ("NVIDIA GeForce RTX 3060", "RTX 3060"),
        ("geforce-rtx_3060", "RTX 3060"),
        ("3060", "RTX 3060"),
        ("1080 ti", "GTX 1080 Ti"),
        ("rtx 3080", "RTX 3080 10GB"),
        ("a100-80gb", "A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("Tesla T4", "T4"),
        ("h100", "H100 80GB HBM3"),
        ("a6000", "RTX A6000"),
    ],
)
def test_names_are_found_however_they_are_written(text: str, name: str):
    assert find_gpu(text).name == name


def test_an_unknown_name_gets_near_ones_and_the_list():
    with pytest.raises(DeviceError) as caught:
        find_gpu("rtx 3061")
    said = str(caught.value)
    assert said.startswith("there is no GPU 'rtx 3061' in the table: did you mean RTX 3060? use one of GTX 1060 6GB, ")
    assert said.endswith("B200")
    with pytest.raises(DeviceError, match="no GPU 'MI300X' in the table: use one of"):
        find_gpu("MI300X")


def test_a_name_of_several_sizes_is_asked_back():
    with pytest.raises(DeviceError) as caught:
        find_gpu("A100")
    assert str(caught.value) == (
        "'A100' is the name of 2 GPUs with different memory: give A100-SXM4-40GB (39.4 GiB) or A100-SXM4-80GB "
        "(79.1 GiB)"
    )


@pytest.mark.parametrize(
    ("architecture", "num_bytes"), [("7.5", 8_519_680), ("8.9", 8_519_680), ("9.0", 33_554_432), ("12.0", 33_554_432)]
)
def test_the_workspace_of_cublas(architecture: str, num_bytes: int):
    assert cublas_workspace_bytes(architecture) == num_bytes


def test_a_live_card_keeps_what_was_probed_and_gets_the_rest():
    spec = spec_of(device("NVIDIA GeForce RTX 3060", 12_622_168_064, architecture="sm_86", num_cores=28))
    table = find_gpu("rtx 3060")
    assert (spec.capacity_bytes, spec.capacity_high_bytes) == (12_622_168_064, 12_622_168_064)
    assert (spec.name, spec.aliases, spec.architecture) == ("NVIDIA GeForce RTX 3060", ("local",), "8.6")
    assert (spec.flops, spec.context_low_bytes, spec.sources) == (table.flops, table.context_low_bytes, table.sources)
    assert spec.capacity_source == "read from the device"


def test_the_capacity_tells_cards_of_one_name_apart():
    big = spec_of(device("NVIDIA GeForce RTX 3080", 12117 * MIB, architecture="sm_86", num_cores=70))
    small = spec_of(device("NVIDIA GeForce RTX 3080", 10009 * MIB, architecture="sm_86", num_cores=68))
    assert (big.nominal_bytes, small.nominal_bytes) == (12 * GIB, 10 * GIB)
    assert (big.memory_bytes_per_second, small.memory_bytes_per_second) == (912_000_000_000, 760_000_000_000)


def test_a_live_card_of_no_known_name_has_what_its_architecture_says():
    spec = spec_of(device("NVIDIA RTX PRO 6000", 95 * GIB, architecture="sm_120", num_cores=188))
    assert (spec.architecture, spec.capacity_bytes, spec.nominal_bytes) == ("12.0", 95 * GIB, None)
    assert (spec.cublas_workspace_bytes, spec.shared_memory_per_sm_bytes) == (33_554_432, 102_400)
    assert spec.context_low_bytes == int(0.8 * (55 + 2.6 * 188)) * MIB
    assert spec.flops.fp32 is None
    bare = spec_of(device("something new", GIB))
    assert (bare.architecture, bare.cublas_workspace_bytes, bare.context_low_bytes) == (None, None, None)


def test_a_processor_is_no_gpu():
    with pytest.raises(DeviceError, match="of kind 'cpu', not a GPU: give cuda"):
        spec_of(device("AMD EPYC", GIB, kind="cpu"))
