"""Parser of ``PYTORCH_CUDA_ALLOC_CONF`` (`plimsoll.device.cuda.allocator_settings.text_of`) into allocator rules.

Follows ``AcceleratorAllocatorConfig::parseArgs`` and ``CUDAAllocatorConfig::getKeys`` of torch 2.13, with the same keys
and bounds. NOT covered: ``backend:cudaMallocAsync``, which is another allocator.
"""

from __future__ import annotations

import re

from plimsoll.errors import InputError
from plimsoll.records.allocator import MIB, AllocatorRules

# Options that affect no block sizes on a device; their values are ignored.
_WITHOUT_SIZES = {
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "throw_on_cudamalloc_oom",
}
_WITH_SIZES = {
    "backend",
    "expandable_segments",
    "garbage_collection_threshold",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "roundup_power2_divisions",
}
_OPTION = re.compile(r"([^,:\[\]]+):(\[[^\[\]]*\]|[^,:\[\]]+)(?:,|$)")
_NUM_INTERVALS = 16


def rules_from_text(text: str) -> AllocatorRules:
    """Return the rules for a text such as ``expandable_segments:True,max_split_size_mb:128``; spaces are ignored.

    Raises:
        InputError: if a key is unknown, a value exceeds torch's bounds, or the text contains anything but key:value
            pairs.
    """
    options = _options(text)
    for key in ("pinned_max_round_threshold_mb", "pinned_max_cached_size_mb"):
        _number(options, key, default=0, at_least=0)  # host memory, only validated
    large_mib = _number(options, "large_segment_size_mb", default=20, at_least=11)
    threshold = options.get("garbage_collection_threshold")
    split_mib = _number(options, "max_split_size_mb", default=0, at_least=large_mib)
    return AllocatorRules(
        large_segment_bytes=large_mib * MIB,
        max_split_bytes=split_mib * MIB or None,
        max_non_split_rounding_bytes=MIB
        * _number(options, "max_non_split_rounding_mb", default=large_mib, at_least=large_mib),
        roundup_power2_divisions=_divisions(options.get("roundup_power2_divisions", "0")),
        garbage_collection_threshold=None if threshold is None else _share("garbage_collection_threshold", threshold),
        expandable_segments=_truth(options.get("expandable_segments", "False")),
        process_share=_share("per_process_memory_fraction", options.get("per_process_memory_fraction", "1.0")),
    )


def _options(text: str) -> dict[str, str]:
    squeezed = re.sub(r"\s", "", text)
    options: dict[str, str] = {}
    place = 0
    while place < len(squeezed):
        option = _OPTION.match(squeezed, place)
        if option is None:
            raise InputError(
                f"cannot read the allocator's options {text!r} from {squeezed[place:]!r} on: give key:value pairs with "
                "commas between them, such as expandable_segments:True,max_split_size_mb:128"
            )
        options[option[1]] = option[2]
        place = option.end()
    for key in options:
        if key not in _WITH_SIZES | _WITHOUT_SIZES:
            known = ", ".join(sorted(_WITH_SIZES | _WITHOUT_SIZES))
            raise InputError(f"the allocator's options {text!r} have an unknown key {key!r}: use one of {known}")
    if options.get("backend", "native") != "native":
        raise InputError(
            f"the allocator's options {text!r} choose the backend {options['backend']!r}, whose memory cannot be "
            "predicted: use backend:native, or leave it out"
        )
    return options


def _number(options: dict[str, str], key: str, default: int, at_least: int) -> int:
    text = options.get(key)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < at_least:
        raise InputError(f"the allocator's option {key} is {text!r}: give a whole number of MiB from {at_least} on")
    return int(text)


def _share(key: str, text: str) -> float:
    is_fraction = key == "per_process_memory_fraction"  # may be 0 or 1, unlike the garbage collection threshold
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not (0 < share < 1 or (is_fraction and share in (0, 1))):
        raise InputError(f"the allocator's option {key} is {text!r}: give a number between 0 and 1, such as 0.8")
    return share


def _truth(text: str) -> bool:
    if text not in ("True", "False"):
        raise InputError(f"the allocator's option expandable_segments is {text!r}: give True or False")
    return text == "True"


def _divisions(text: str) -> int | tuple[int, ...]:
    """Parse ``4`` or ``[256:1,512:2,>:8]``: a lower bound in MiB and the divisions (`parseRoundUpPower2Divisions`)."""
    if not text.startswith("["):
        return _power_of_two(text, text)
    divisions = [0] * _NUM_INTERVALS
    last = -1
    for pair in text[1:-1].split(","):
        start, colon, number_text = pair.partition(":")
        number = _power_of_two(number_text if colon else "", text)
        if start == ">":
            divisions[last + 1 :] = [number] * (_NUM_INTERVALS - last - 1)
            continue
        index = min((_power_of_two(start, text) or 1).bit_length() - 1, _NUM_INTERVALS - 1)
        if last < 0:
            divisions[:index] = [number] * index
        divisions[index] = number
        last = index
    return tuple(divisions)


def _power_of_two(text: str, whole: str) -> int:
    number = int(text) if text.isdecimal() else -1
    if number < 0 or number & (number - 1):
        raise InputError(
            f"the allocator's option roundup_power2_divisions is {whole!r}, but {text!r} is not a power of two: "
            "give powers of two, such as 4 or [256:1,512:2,1024:4,>:8]"
        )
    return number
