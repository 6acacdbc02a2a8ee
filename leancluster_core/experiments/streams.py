"""Random streams: one generator for each (seed, purpose, index); no draw depends on another.

Training tasks are drawn in blocks, each from a generator of its own: a resumed run needs no random
state, and OH/BN/NA x NE/L2 of a trial see the very same tasks.
"""

from __future__ import annotations

import numpy as np
import torch

PURPOSES = ("initialisation", "training", "validation", "evaluation", "refill", "directions")


def random_stream(
    seed: int, purpose: str, index: int = 0, device: torch.device | str = "cpu"
) -> torch.Generator:
    """A torch generator for one purpose of one seed; equal arguments give equal draws."""
    spawn_key = (PURPOSES.index(purpose), index)
    state = np.random.SeedSequence(seed, spawn_key=spawn_key).generate_state(2, np.uint64)
    return torch.Generator(device).manual_seed(int(state[0]) >> 1)
