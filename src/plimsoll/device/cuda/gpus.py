"""A table of common GPUs, for predictions about GPUs that this machine does not have.

Columns: number of multiprocessors (SMs), boost clock (MHz), memory bandwidth (GB/s), PCIe generation x lanes, nominal
size (GiB). The last column is the range of total memory in MiB that CUDA reports under Linux, with a letter
for each source (see `_SAW`). Drivers differ by up to 3 % (RTX 3070: 7753 to 7973 MiB). Under Windows, CUDA reports
nearly the nominal size, but the system keeps a part of it. Switching ECC changes the size by 6 %.

Rates are SMs x clock x operations per SM and cycle (`_PER_SM`), with fp32 accumulation. torch requests it, and GeForce
cards run it at half speed. All rates are peaks; the table does not contain the share of the peak that a model reaches.
NOT covered: AMD and Intel, MIG slices, mobile cards other than two, cards with changed memory.
"""

from __future__ import annotations

import difflib
import re
from functools import cache

from plimsoll.errors import DeviceError
from plimsoll.records.device import Device, DeviceSpec, Flops
from plimsoll.records.units import format_bytes

_MIB, _GIB = 1 << 20, 1 << 30

# Name, aliases | compute capability, key of `_PER_SM` | SMs, boost MHz | GB/s | link | GiB | MiB under CUDA, sources
_TABLE = """
GTX 1060 6GB, GTX 1060                  |  6.1 pascal  |  10 1708 |  192 | 3x16 |   6 | 6063-6075 y
GTX 1070                                |  6.1 pascal  |  15 1683 |  256 | 3x16 |   8 | 8118-8119 d
GTX 1080                                |  6.1 pascal  |  20 1733 |  320 | 3x16 |   8 | 8120-8120 d
GTX 1080 Ti                             |  6.1 pascal  |  28 1582 |  484 | 3x16 |  11 | 11172-11182 yo
GTX 1650                                |  7.5 gtx16   |  14 1665 |  128 | 3x16 |   4 | 3904-3904 y
GTX 1660 Ti                             |  7.5 gtx16   |  24 1770 |  288 | 3x16 |   6 | 5914-5914 y
RTX 2060                                |  7.5 geforce |  30 1680 |  336 | 3x16 |   6 | 5918-5918 y
RTX 2070                                |  7.5 geforce |  36 1620 |  448 | 3x16 |   8 | 7782-7782 d
RTX 2080                                |  7.5 geforce |  46 1710 |  448 | 3x16 |   8 | gddr
RTX 2080 Ti                             |  7.5 geforce |  68 1545 |  616 | 3x16 |  11 | 11018-11019 po
TITAN RTX                               |  7.5 full    |  72 1770 |  672 | 3x16 |  24 | 24212-24212 y
RTX 3050, RTX 3050 8GB                  |  8.6 geforce |  20 1777 |  224 | 4x8  |   8 | gddr
RTX 3060, RTX 3060 12GB                 |  8.6 geforce |  28 1777 |  360 | 4x16 |  12 | 11931-12044 px
RTX 3060 Ti                             |  8.6 geforce |  38 1665 |  448 | 4x16 |   8 | 7833-7833 y
RTX 3070                                |  8.6 geforce |  46 1725 |  448 | 4x16 |   8 | 7753-7973 y
RTX 3080 10GB                           |  8.6 geforce |  68 1710 |  760 | 4x16 |  10 | 10002-10009 y
RTX 3080 12GB                           |  8.6 geforce |  70 1710 |  912 | 4x16 |  12 | 12117-12117 y
RTX 3080 Ti                             |  8.6 geforce |  80 1665 |  912 | 4x16 |  12 | 11910-12054 y
RTX 3090                                |  8.6 geforce |  82 1695 |  936 | 4x16 |  24 | 24115-24268 pyd
RTX 3090 Ti                             |  8.6 geforce |  84 1860 | 1008 | 4x16 |  24 | 24110-24214 py
RTX 4050 Laptop GPU, RTX 4050, RTX 4050 Laptop | 8.9 geforce | 20 - | 192 | 4x8 | 6 | gddr
RTX 4060 Laptop GPU, RTX 4060 Laptop    |  8.9 geforce |  24    - |  256 | 4x8  |   8 | 7915-7915 y
RTX 4060                                |  8.9 geforce |  24 2460 |  272 | 4x8  |   8 | 7807-7932 yx
RTX 4060 Ti 8GB                         |  8.9 geforce |  34 2535 |  288 | 4x8  |   8 | 7806-7806 y
RTX 4060 Ti 16GB                        |  8.9 geforce |  34 2535 |  288 | 4x8  |  16 | gddr
RTX 4070                                |  8.9 geforce |  46 2475 |  504 | 4x16 |  12 | 11994-12002 y
RTX 4070 SUPER                          |  8.9 geforce |  56 2475 |  504 | 4x16 |  12 | gddr
RTX 4070 Ti                             |  8.9 geforce |  60 2610 |  504 | 4x16 |  12 | 12007-12011 yo
RTX 4070 Ti SUPER                       |  8.9 geforce |  66 2610 |  672 | 4x16 |  16 | 16069-16069 y
RTX 4080                                |  8.9 geforce |  76 2505 |  717 | 4x16 |  16 | 16049-16049 p
RTX 4080 SUPER                          |  8.9 geforce |  80 2550 |  736 | 4x16 |  16 | 15944-15944 y
RTX 4090                                |  8.9 geforce | 128 2520 | 1008 | 4x16 |  24 | 24081-24217 yo
RTX 5060 Ti 8GB                         | 12.0 geforce |  36 2572 |  448 | 5x8  |   8 | gddr
RTX 5060 Ti 16GB                        | 12.0 geforce |  36 2572 |  448 | 5x8  |  16 | 15848-15850 y
RTX 5070                                | 12.0 geforce |  48 2512 |  672 | 5x16 |  12 | gddr
RTX 5070 Ti                             | 12.0 geforce |  70 2452 |  896 | 5x16 |  16 | gddr
RTX 5080                                | 12.0 geforce |  84 2617 |  960 | 5x16 |  16 | 15840-15840 y
RTX 5090                                | 12.0 geforce | 170 2407 | 1792 | 5x16 |  32 | 32102-32120 yo
RTX A2000 6GB                           |  8.6 full    |  26 1200 |  288 | 4x16 |   6 | ecc
RTX A2000 12GB                          |  8.6 full    |  26 1200 |  288 | 4x16 |  12 | 12017-12017 y
RTX A4000, A4000                        |  8.6 full    |  48 1560 |  448 | 4x16 |  16 | 16117-16117 y
RTX A5000, A5000                        |  8.6 full    |  64 1695 |  768 | 4x16 |  24 | 24248-24248 y
RTX A6000, A6000                        |  8.6 full    |  84 1800 |  768 | 4x16 |  48 | 48670-48676 po
RTX 6000 Ada Generation, RTX 6000 Ada, 6000 Ada | 8.9 full | 142 2505 | 960 | 4x16 | 48 | 48497-48539 y
P4                                      |  6.1 pascal  |  20 1063 |  192 | 3x16 |   8 | ecc
P100-PCIE-16GB, P100, P100 16GB         |  6.0 pascal  |  56 1303 |  732 | 3x16 |  16 | 16280-16280 p
V100-SXM2-16GB, V100 16GB               |  7.0 full    |  80 1530 |  900 | 3x16 |  16 | 16130-16160 p
V100-PCIE-16GB                          |  7.0 full    |  80 1380 |  900 | 3x16 |  16 | 16160-16160 p
V100-SXM2-32GB, V100 32GB               |  7.0 full    |  80 1530 |  900 | 3x16 |  32 | 32494-32501 y
V100-PCIE-32GB                          |  7.0 full    |  80 1380 |  900 | 3x16 |  32 | hbm
T4                                      |  7.5 full    |  40 1590 |  320 | 3x16 |  16 | 14909-15109 po
A10                                     |  8.6 full    |  72 1695 |  600 | 4x16 |  24 | 22515-22515 d
A10G                                    |  8.6 geforce |  80 1710 |  600 | 4x16 |  24 | 22587-22722 po
A16                                     |  8.6 full    |  10 1755 |  200 | -    |  16 | ecc
A30                                     |  8.0 full    |  56 1440 |  933 | 4x16 |  24 | 24164-24164 y
A40                                     |  8.6 full    |  84 1740 |  696 | 4x16 |  48 | 45312-48688 dy
A100-SXM4-40GB, A100 40GB               |  8.0 full    | 108 1410 | 1555 | 4x16 |  40 | 40325-40540 ox
A100-PCIE-40GB                          |  8.0 full    | 108 1410 | 1555 | 4x16 |  40 | 40325-40540 o
A100-SXM4-80GB, A100 80GB               |  8.0 full    | 108 1410 | 2039 | 4x16 |  80 | 81038-81251 y
A100 80GB PCIe                          |  8.0 full    | 108 1410 | 1935 | 4x16 |  80 | 81154-81154 y
L4                                      |  8.9 full    |  58 2040 |  300 | 4x16 |  24 | 22563-22693 y
L40                                     |  8.9 l40     | 142 2490 |  864 | 4x16 |  48 | 45414-45516 d
L40S                                    |  8.9 full    | 142 2520 |  864 | 4x16 |  48 | 45589-45589 p
H100 PCIe                               |  9.0 h100pcie| 114    - | 2039 | 5x16 |  80 | 81008-81008 p
H100 80GB HBM3, H100 SXM, H100 SXM5, H100 80GB | 9.0 h100sxm | 132 - | 3350 | 5x16 | 80 | 81082-81090 p
H100 NVL                                |  9.0 h100nvl | 132    - | 3938 | 5x16 |  94 | 95320-95320 y
H200, H200 SXM                          |  9.0 h100sxm | 132    - | 4800 | 5x16 | 141 | 143156-143156 p
GH200 480GB, GH200 96GB                 |  9.0 h100sxm | 132    - | 4000 | c2c  |  96 | hbm
GH200 144G HBM3e, GH200 144GB           |  9.0 h100sxm | 132    - | 4900 | c2c  | 144 | hbm
B200, B200 180GB                        | 10.0 b200    | 148    - | 8000 | 5x16 | 180 | 182631-182642 p
"""

_SAW = {
    "p": "torch.cuda.get_device_properties as printed in public repositories",
    "y": "the start line of Ultralytics' trainings (total_memory in MiB) in public logs",
    "o": '"total capacity of" in public out-of-memory messages',
    "d": "other programs' print of CUDA's total memory in public repositories",
    "x": "the records of Stone-ResearchLife/xMem (arXiv 2510.21048)",
}
# For cards whose size no source reports: least and greatest share of the nominal size among similar cards.
_SHARES = {"gddr": (0.945, 1.0), "ecc": (0.91, 1.0), "hbm": (0.98, 1.0)}

# Ambiguous names: a name in `_USUAL` means its first card, any other name is an error.
_FAMILIES = {
    "rtx3080": ("RTX 3080 10GB", "RTX 3080 12GB"),
    "rtx4060ti": ("RTX 4060 Ti 8GB", "RTX 4060 Ti 16GB"),
    "rtx5060ti": ("RTX 5060 Ti 8GB", "RTX 5060 Ti 16GB"),
    "rtxa2000": ("RTX A2000 6GB", "RTX A2000 12GB"),
    "a2000": ("RTX A2000 6GB", "RTX A2000 12GB"),
    "v100": ("V100-SXM2-16GB", "V100-SXM2-32GB"),
    "a100": ("A100-SXM4-40GB", "A100-SXM4-80GB"),
    "h100": ("H100 80GB HBM3", "H100 PCIe", "H100 NVL"),
    "gh200": ("GH200 480GB", "GH200 144G HBM3e"),
}
_USUAL = {"rtx3080", "h100"}

# Operations per SM and cycle, from NVIDIA's architecture whitepapers: fp32, tf32, fp16, bf16, fp8, int8.
_PER_SM = {
    "6.0 pascal": (128, None, 256, None, None, None),
    "6.1 pascal": (256, None, 4, None, None, 1024),
    "7.0 full": (128, None, 1024, None, None, None),
    "7.5 gtx16": (128, None, 256, None, None, None),
    "7.5 geforce": (128, None, 512, None, None, 2048),
    "7.5 full": (128, None, 1024, None, None, 2048),
    "8.0 full": (128, 1024, 2048, 2048, None, 4096),
    "8.6 geforce": (256, 256, 512, 512, None, 2048),
    "8.6 full": (256, 512, 1024, 1024, None, 2048),
    "8.9 geforce": (256, 256, 512, 512, 1024, 2048),
    "8.9 l40": (256, 256, 512, 512, 1024, 1024),
    "8.9 full": (256, 512, 1024, 1024, 2048, 2048),
    "12.0 geforce": (256, 256, 512, 512, 1024, 2048),
}
# Cards whose tensor cores run at another clock: TFLOP/s from NVIDIA's data sheets, without sparsity, in the same order.
_TERA = {
    "9.0 h100pcie": (51.0, 378.0, 756.0, 756.0, 1513.0, 1513.0),
    "9.0 h100sxm": (67.0, 494.0, 989.0, 989.0, 1979.0, 1979.0),
    "9.0 h100nvl": (60.0, 417.0, 835.0, 835.0, 1671.0, 1671.0),
    "10.0 b200": (75.0, 1125.0, 2250.0, 2250.0, 4500.0, 4500.0),
}
# KiB of shared memory per SM, from "Technical Specifications per Compute Capability" (CUDA C++ Programming Guide).
_SHARED_KIB = {
    "6.0": 64, "6.1": 96, "7.0": 96, "7.5": 64, "8.0": 164, "8.6": 100, "8.9": 100, "9.0": 228, "10.0": 228,
    "12.0": 100,
}  # fmt: skip
# Bytes per second in one direction: PCIe base specifications; NVIDIA Grace Hopper whitepaper for NVLink-C2C.
_LINKS = {
    "3x16": 15_750_000_000, "4x8": 15_750_000_000, "4x16": 31_500_000_000, "5x8": 31_500_000_000,
    "5x16": 63_000_000_000, "c2c": 450_000_000_000, "-": None,
}  # fmt: skip

# Context size of a process with lazily loaded kernels (CUDA 11.7 or later): least and most MiB, and the source.
_HOPPER = (
    742,
    816,
    "an H200's recording (tests/recordings, torch 2.11): 742 MiB in a new process that has trained, 816 "
    "after 140 trainings of seven models, 612 of them bare",
)
_CONTEXTS = {
    "RTX 3060": (118, 158, "xMem's records (torch 2.6, cu124): 118 to 140 MiB, and 18 MiB during training"),
    "RTX 3090": (256, 333, "InvokeAI#9413 (torch 2.7.1, cu128): 256 MiB bare; up to 30 % more for kernels"),
    "RTX 6000 Ada Generation": (426, 554, "unsloth-zoo#1053 (torch 2.10, cu130): 426 MiB bare; up to 30 % for kernels"),
    "A100-SXM4-40GB": (354, 460, "xMem's records on Colab (torch 2.6): 354 MiB in training; up to 30 % for kernels"),
    **dict.fromkeys(("H100 80GB HBM3", "H100 NVL", "H200", "GH200 480GB", "GH200 144G HBM3e"), _HOPPER),
}
_CONTEXT_GUESS = (
    "not measured on this card: 55 MiB and 2.6 MiB for each SM, less 20 % or plus 40 %: the line through what was read "
    "of RTX 3060, RTX 3090, A100 and RTX 6000 Ada"
)
_SOURCES = (
    "SMs, clock, bandwidth, connector: NVIDIA's product page or data sheet of the card",
    "rates: NVIDIA's architecture whitepapers and data sheets, without sparsity",
    "shared memory: CUDA C++ Programming Guide, technical specifications per compute capability",
    "cuBLAS workspace: pytorch aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize",
)


@cache
def all_gpus() -> tuple[DeviceSpec, ...]:
    """Return the specifications of all GPUs in the table, in the order of the table."""
    return tuple(_spec_from(line) for line in _TABLE.strip().splitlines())


def find_gpu(name: str) -> DeviceSpec:
    """Return the GPU with a name. Case, spaces, dashes and the words NVIDIA, GeForce and Tesla are ignored.

    Raises:
        DeviceError: if no GPU has this name, or it is the name of several GPUs with different memory and `_USUAL` does
            not resolve it.
    """
    key = _key(name)
    found = next((found for word in ("", "rtx", "gtx") if (found := _named(word + key))), ())
    if not found:
        near = difflib.get_close_matches(key, _names(), n=3, cutoff=0.8)
        meant = f"did you mean {' or '.join(dict.fromkeys(_names()[match].name for match in near))}? " if near else ""
        known = ", ".join(gpu.name for gpu in all_gpus())
        raise DeviceError(f"there is no GPU {name!r} in the table: {meant}use one of {known}")
    if len(found) > 1 and key not in _USUAL:
        choices = " or ".join(f"{gpu.name} ({format_bytes(gpu.capacity_bytes)})" for gpu in found)
        raise DeviceError(f"{name!r} is the name of {len(found)} GPUs with different memory: give {choices}")
    return found[0]


def spec_of(device: Device) -> DeviceSpec:
    """Return the specification of a GPU of this machine.

    Capacity, architecture and number of multiprocessors are read from the device, and rates from the table. The
    capacity is the hardware's, without limits on the process. For a GPU that is not in the table, only facts that
    follow from its architecture and number of multiprocessors are known.

    Raises:
        DeviceError: if the device is not a CUDA device.
    """
    if device.kind != "cuda":
        raise DeviceError(f"{device.name!r} is a device of kind {device.kind!r}, not a GPU: give cuda, or a GPU's name")
    architecture = _capability(device.architecture)
    probed = {
        "name": device.name,
        "aliases": ("local",),
        "architecture": architecture,
        "capacity_bytes": device.hardware_bytes,
        "capacity_high_bytes": device.hardware_bytes,
        "capacity_source": "read from the device",
        "num_sms": device.num_cores,
    }
    found = _named(_key(device.name))
    if found:
        nearest = min(found, key=lambda gpu: abs(gpu.capacity_bytes - device.hardware_bytes))
        return DeviceSpec.model_validate(nearest.model_dump() | probed)
    low_bytes, high_bytes, source = _context(device.name, device.num_cores)
    return DeviceSpec.model_validate(
        probed
        | {
            "context_low_bytes": low_bytes,
            "context_high_bytes": high_bytes,
            "context_source": source,
            "shared_memory_per_sm_bytes": _shared_memory_bytes(architecture),
            "cublas_workspace_bytes": cublas_workspace_bytes(architecture) if architecture else None,
            "sources": _SOURCES[2:],
        }
    )


def cublas_workspace_bytes(architecture: str) -> int:
    """Return the bytes of torch's cuBLAS workspace per handle and stream: 32 MiB from ``sm_90`` on, else 8.125 MiB.

    This follows `parseChosenWorkspaceSize` of pytorch's main branch in 2026, which lists the capabilities 9, 10 and 12.
    Older versions list 9.0 only, so a Blackwell card takes 24 MiB less there. On the main branch, cuBLASLt shares the
    workspace. In older versions it takes 1 MiB more. NOT covered: ``CUBLAS_WORKSPACE_CONFIG``,
    ``CUBLASLT_WORKSPACE_SIZE``.
    """
    return 4096 * 8 * 1024 if architecture.partition(".")[0] in ("9", "10", "12") else 4096 * 1024 * 2 + 16 * 1024 * 8


def _spec_from(line: str) -> DeviceSpec:
    names, rates, size, bandwidth, link, nominal, seen = (cell.strip() for cell in line.split("|"))
    name, *aliases = (text.strip() for text in names.split(","))
    architecture = rates.split()[0]
    num_sms, clock_mhz = size.split()
    nominal_bytes = int(nominal) * _GIB
    low_bytes, high_bytes, source = _capacity(nominal_bytes, seen)
    context_low_bytes, context_high_bytes, context_source = _context(name, int(num_sms))
    return DeviceSpec(
        name=name,
        aliases=tuple(aliases),
        architecture=architecture,
        nominal_bytes=nominal_bytes,
        capacity_bytes=low_bytes,
        capacity_high_bytes=high_bytes,
        capacity_source=source,
        context_low_bytes=context_low_bytes,
        context_high_bytes=context_high_bytes,
        context_source=context_source,
        memory_bytes_per_second=int(bandwidth) * 10**9,
        host_link_bytes_per_second=_LINKS[link],
        flops=_flops(" ".join(rates.split()), int(num_sms), None if clock_mhz == "-" else int(clock_mhz)),
        num_sms=int(num_sms),
        shared_memory_per_sm_bytes=_shared_memory_bytes(architecture),
        cublas_workspace_bytes=cublas_workspace_bytes(architecture),
        sources=_SOURCES,
    )


def _capacity(nominal_bytes: int, seen: str) -> tuple[int, int, str]:
    if seen in _SHARES:
        least, most = _SHARES[seen]
        source = f"not seen: {least:.1%} to {most:.0%} of the nominal size, as other cards with such memory report"
        return int(nominal_bytes * least), int(nominal_bytes * most), source
    span, letters = seen.split()
    low, high = span.split("-")
    return int(low) * _MIB, int(high) * _MIB, "; ".join(_SAW[letter] for letter in letters)


def _context(name: str, num_sms: int | None) -> tuple[int | None, int | None, str | None]:
    if name in _CONTEXTS:
        low, high, source = _CONTEXTS[name]
        return low * _MIB, high * _MIB, source
    if num_sms is None:
        return None, None, None
    guess_mib = 55 + 2.6 * num_sms
    return int(0.8 * guess_mib) * _MIB, int(1.4 * guess_mib) * _MIB, _CONTEXT_GUESS


def _flops(rates: str, num_sms: int, clock_mhz: int | None) -> Flops:
    names = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")
    if rates in _TERA:
        return Flops(**{name: tera * 1e12 for name, tera in zip(names, _TERA[rates], strict=True)})
    if clock_mhz is None:
        return Flops()
    cycles_per_second = num_sms * clock_mhz * 1e6
    per_sm = zip(names, _PER_SM[rates], strict=True)
    return Flops(**{name: None if rate is None else rate * cycles_per_second for name, rate in per_sm})


def _shared_memory_bytes(architecture: str | None) -> int | None:
    return _SHARED_KIB[architecture] * 1024 if architecture in _SHARED_KIB else None


def _capability(architecture: str | None) -> str | None:
    """Return the compute capability of an architecture: ``8.6`` for ``sm_86`` and ``12.0`` for ``sm_120``.

    ``None`` if the architecture is unknown.
    """
    match = re.fullmatch(r"sm_(\d+)(\d)", architecture or "")
    return f"{match[1]}.{match[2]}" if match else None


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce|tesla", "", name.lower())


@cache
def _names() -> dict[str, DeviceSpec]:
    return {_key(name): gpu for gpu in all_gpus() for name in (gpu.name, *gpu.aliases)}


def _named(key: str) -> tuple[DeviceSpec, ...]:
    """Return the GPUs of the table that a normalized name stands for: one, the variants of a family, or none."""
    if key in _FAMILIES:
        return tuple(_names()[_key(name)] for name in _FAMILIES[key])
    return (_names()[key],) if key in _names() else ()
