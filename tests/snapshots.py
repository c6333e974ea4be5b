"""Hand-made snapshots in torch's format: an allocator with segments, blocks, events and stacks.

`Allocator` follows ``torch/csrc/cuda/Module.cpp`` (`memorySnapshot`) of torch 2.13. An event has the requested size,
and a block the size of the whole allocation. Stacks share frames, innermost first.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

MIB = 1 << 20
SITE = "/usr/lib/python3/site-packages/torch/"

USER = [{"filename": "train.py", "line": line, "name": "<module>"} for line in range(100)]
FORWARD = {"filename": SITE + "nn/modules/linear.py", "line": 125, "name": "forward"}
TO = {"filename": SITE + "nn/modules/module.py", "line": 900, "name": "to"}
ADAM = {"filename": SITE + "optim/adamw.py", "line": 400, "name": "step"}
BACKWARD = {"filename": SITE + "autograd/__init__.py", "line": 347, "name": "backward"}
ENGINE = {"filename": "??", "line": 0, "name": "torch::autograd::Engine::thread_main"}


class Allocator:
    """One device; memory begins at ``address``, and every segment has one or more blocks."""

    def __init__(self, device: int = 0, address: int = 0x7F0000000000) -> None:
        self.device, self.next_address, self.num_events = device, address, 0
        self.events: list[dict[str, Any]] = []
        self.segments: list[dict[str, Any]] = []

    def event(self, action: str, size: int, frames: list[Any], **fields: int) -> None:
        """Write an event."""
        self.num_events += 1
        where = fields or {"addr": 0}
        self.events.append(
            {"action": action, **where, "size": size, "stream": 0, "time_us": 10**15 + self.num_events}
            | {"compile_context": "N/A", "user_metadata": "", "frames": frames}
        )

    def segment(self, size: int, pool: tuple[int, int] = (0, 0)) -> dict[str, Any]:
        """Reserve memory of the device."""
        segment = {
            "device": self.device, "address": self.next_address, "total_size": size, "allocated_size": 0,
            "active_size": 0, "requested_size": 0, "stream": 0, "segment_type": "large", "segment_pool_id": pool,
            "is_expandable": False, "frames": [], "blocks": [],
        }  # fmt: skip
        segment["blocks"].append(
            {"address": self.next_address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
        )
        self.event("segment_alloc", size, [], addr=self.next_address)
        self.segments.append(segment)
        self.next_address += size + (2 << 20)
        return segment

    def alloc(self, size: int, *frames: dict[str, Any], pool: tuple[int, int] = (0, 0)) -> int:
        """Allocate in the first hole that is large enough, or in a new segment; return the address."""
        stack = list(frames)
        rounded = -(-size // 512) * 512
        for segment in self.segments:
            for index, block in enumerate(segment["blocks"]):
                if block["state"] == "inactive" and block["size"] >= rounded and segment["segment_pool_id"] == pool:
                    return self._take(segment["blocks"], index, size, rounded, stack)
        self.segment(-(-rounded // (2 * MIB)) * 2 * MIB, pool)
        return self._take(self.segments[-1]["blocks"], 0, size, rounded, stack)

    def _take(self, blocks: list[dict[str, Any]], index: int, size: int, rounded: int, stack: list[Any]) -> int:
        block = blocks[index]
        rest = block["size"] - rounded
        if rest:
            blocks.insert(index + 1, block | {"address": block["address"] + rounded, "size": rest})
        block |= {"size": rounded, "requested_size": size, "state": "active_allocated", "frames": stack}
        self.event("alloc", size, stack, addr=block["address"])
        return block["address"]

    def free(self, address: int, *frames: dict[str, Any]) -> None:
        """Free an allocation, and join the hole with its neighbours."""
        for segment in self.segments:
            for block in segment["blocks"]:
                if block["address"] == address:
                    for action in ("free_requested", "free_completed"):
                        self.event(action, block["requested_size"], list(frames), addr=address)
                    block |= {"state": "inactive", "requested_size": 0, "frames": []}
                    segment["blocks"] = joined(segment["blocks"])
                    return
        raise AssertionError(address)

    def oom(self, size: int, device_free: int, *frames: dict[str, Any]) -> None:
        """Run out of memory."""
        self.event("oom", size, list(frames), device_free=device_free)

    def as_dict(self, **settings: Any) -> dict[str, Any]:
        """Return the result of `torch.cuda.memory._snapshot`."""
        traces: list[list[dict[str, Any]]] = [[] for _ in range(self.device)]
        return {
            "segments": self.segments,
            "device_traces": [*traces, self.events],
            "allocator_settings": {"expandable_segments": False, "roundup_power2_divisions": {"1": 0}} | settings,
            "external_annotations": [],
        }


def joined(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the blocks with adjacent holes joined."""
    found: list[dict[str, Any]] = []
    for block in blocks:
        if found and found[-1]["state"] == block["state"] == "inactive":
            found[-1] |= {"size": found[-1]["size"] + block["size"]}
        else:
            found.append(block)
    return found


def write(path: Path, content: Any, protocol: int = 4) -> Path:
    """Write a pickle as torch does."""
    path.write_bytes(pickle.dumps(content, protocol))
    return path


def training(num_steps: int, leak: int = 0) -> Allocator:
    """Allocate parameters, states, and per step activations, gradients and a temporary; some steps leak."""
    device = Allocator()
    for _ in range(4):
        device.alloc(4 * MIB, TO, USER[3])
    for step in range(num_steps):
        saved = [device.alloc(8 * MIB, FORWARD, USER[10]) for _ in range(3)]
        if leak:
            device.alloc(leak, USER[12])
        gradients = [device.alloc(4 * MIB, ENGINE) for _ in range(4)]
        for address in saved:
            device.free(address, BACKWARD, USER[14])
        if step == 0:
            for _ in range(8):
                device.alloc(4 * MIB, ADAM, USER[15])
        device.free(device.alloc(4 * MIB, ADAM, USER[15]), ADAM, USER[15])
        for address in gradients:
            device.free(address, ADAM, USER[16])
    return device
