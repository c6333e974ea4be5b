"""Short waits of OpenMP threads for one another, so that other programs do not slow down training.

After each op, OpenMP threads wait for the slowest thread. GCC's library, which torch's wheels use, checks 300,000 times
in a loop (it spins) before a thread gives up its core. If another program uses a core, a thread may spin on the core
that the slowest thread needs, after each op. If its own threads outnumber the cores, the library spins only 1,000
times, but it does not count other programs. Results are bitwise identical. Measurements are in docs/LOG.md.

Source: GCC's libgomp manual ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"). Needs no torch.
"""

from __future__ import annotations

import os

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_NUM_SPINS = 1000


def spin_briefly() -> None:
    """Make OpenMP threads spin briefly, unless the environment already configures how they wait.

    This takes effect in this process if torch is not yet imported, and in processes that it starts.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = str(_NUM_SPINS)
