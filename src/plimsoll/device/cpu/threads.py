"""How threads wait for one another: briefly, so that a machine that other programs use too stays quick.

After each op the threads of OpenMP wait for the slowest of them. GCC's library, which torch's wheels use, lets them
spin 300,000 times before they give up their core. Where another program has one of the cores, a thread may so spin on
the core that its partner needs, until the kernel takes it away, after each op. Where threads outnumber cores the
library itself spins only 1,000 times, but it does not see other programs. Results are the same bits. Measurements are
in docs/LOG.md. Source: GCC's libgomp manual ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"). Needs no torch.
"""

from __future__ import annotations

import os

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_NUM_SPINS = 1000


def spin_briefly() -> None:
    """Have OpenMP's threads spin briefly, unless the environment already says how they wait.

    Holds for this process if torch has not been imported, and for the processes that it starts.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = str(_NUM_SPINS)
