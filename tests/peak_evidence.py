"""Hand-made evidence of every cause: a training that needs 1,200 MiB of 800 MiB, and texts of errors.

The process takes 200 MiB before the model; the training itself takes 1,000 MiB, of which a tenth is 100 MiB.
"""

from evidence_records import evidence as evidence_of_growth
from plimsoll.diagnose.evidence import Evidence
from plimsoll.diagnose.parse.event import event_of
from plimsoll.records.diagnosis import Remedy, Share
from plimsoll.records.plan import Choice
from plimsoll.records.prediction import Holding, Moment

MIB = 1 << 20
VOCABULARY, LENGTH = 5000, 256

GPU = "CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of 24.00 GiB of which {} GiB is free. "
REST = (
    "Including non-PyTorch memory, this process has {} GiB memory in use. Of the allocated memory {} GiB is allocated "
    "by PyTorch, and {} GiB is reserved by PyTorch but unallocated."
)
FULL = GPU.format(3, 1) + REST.format(23, 21, 0)
FRAGMENTED = GPU.format(1, 0.5) + REST.format(23, 18, 4)
OTHERS = GPU.format(2, 1) + "Process 9 has 20.00 GiB memory in use. " + REST.format(2, 1, 0)
HUGE = GPU.format(100, 1)
SHM = (
    "DataLoader worker (pid 1) is killed by signal: Bus error. It is possible that dataloader's workers are out of shm."
)
PINNED = "RuntimeError: Caught RuntimeError in pin memory thread for device 0.\nRuntimeError: CUDA error: out of memory"


def holding(size_mib, category, shape, count=1, **made):
    """Return a holding of equal tensors from the forward pass."""
    fields = {"step": 2, "phase": "forward", "op": "mm", "module": "net", "line": "/home/me/net.py:7"} | made
    return Holding(num_bytes=size_mib * MIB, count=count, category=category, shape=shape, made=Moment(**fields))


def shares(**sizes_mib):
    """Return the shares of a peak; names have _ for the space."""
    made = {"baseline": 200} | {name.replace("_", " "): size for name, size in sizes_mib.items()}
    return tuple(
        Share(category=name, num_bytes=size * MIB, known="predicted", place="net, net.py:7")
        for name, size in sorted(made.items(), key=lambda part: -part[1])
    )


def evidence(**changes):
    """Return evidence of a training that does not fit, with only its activations known."""
    fields = {
        "subject": "job.yaml", "kind": "cpu", "has_run_out": True, "peak_bytes": 1200 * MIB,
        "limit_bytes": 800 * MIB, "phase": "backward", "shares": shares(activations=990, parameters=10),
        "sequence_length": LENGTH, "vocab_size": VOCABULARY,
    }  # fmt: skip
    return Evidence(**fields | changes)


def of_text(error, /, **changes):
    """Return the evidence from an error's text."""
    return Evidence(subject="log", kind="unknown", event=event_of(error).model_copy(update=changes))


def tried(technique, saving_mib=500, **changes):
    """Return a remedy that the predictor has tried."""
    fields = {
        "choices": (Choice(technique=technique, options={"a": 1}),), "text": "less", "known": "predicted",
        "saving_bytes": saving_mib * MIB, "saving_low_bytes": (saving_mib - 10) * MIB,
        "saving_high_bytes": (saving_mib + 10) * MIB, "step_time_factor": 1.25, "fits": True,
        "settings": {"pin": [f"{technique}=1"]},
    }  # fmt: skip
    return Remedy(**fields | changes)


LOGITS = holding(300, "temporaries", f"float32[{64 * LENGTH}, {VOCABULARY}]", line="/home/me/loss.py:3")
SCORES = holding(
    200, "activations", f"float32[8, 4, {LENGTH}, {LENGTH}]", count=4, op="_safe_softmax", module="net.attn"
)
TABLE = holding(400, "parameters", f"float32[{VOCABULARY}, 512]")

PLANTED = {
    "absurd_request": [evidence(holdings=(holding(900, "temporaries", "float32[60000, 4000]"),)), of_text(HUGE)],
    "attention_scores": [evidence(holdings=(SCORES,))],
    "context": [evidence(shares=shares(baseline=400, activations=800))],
    "embeddings": [evidence(holdings=(TABLE,))],
    "fragmentation": [
        evidence(shares=shares(activations=800, fragmentation=200)), of_text(FRAGMENTED),
        evidence(kind="cuda", is_fragmented=True, requested_bytes=64 * MIB, shares=()),
    ],
    "graph_kept": [evidence_of_growth()],
    "logits": [evidence(holdings=(LOGITS,))],
    "optimizer_states": [
        evidence(shares=shares(activations=700, optimizer_states=300)),
        of_text(FULL, code="optimizer.step()", place="train.py:9"),
    ],
    "optimizer_temporaries": [evidence(phase="optimizer", shares=shares(activations=800, temporaries=200))],
    "other_process": [of_text(OTHERS)],
    "padding": [evidence(padding_share=0.5)],
    "pinned": [of_text(PINNED)],
    "shm": [of_text(SHM)],
    "true_capacity": [evidence(), of_text(FULL), of_text("MemoryError")],
}  # fmt: skip

CLEAN = [
    evidence(
        has_run_out=False, limit_bytes=2000 * MIB, holdings=(LOGITS, SCORES, TABLE), padding_share=0.5,
        shares=shares(activations=300, temporaries=300, optimizer_states=300, fragmentation=100), phase="optimizer",
    ),
    of_text("CUDA error: device-side assert triggered", code="optimizer.step()"),
    Evidence(subject="nothing", kind="cpu"),
]  # fmt: skip
