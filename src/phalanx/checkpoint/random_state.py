"""`RandomState` saves the random state of every rank as one part of a checkpoint."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from phalanx.checkpoint.peers import Peers
from phalanx.errors import CheckpointError


class RandomState:
    """Save and load each rank's random states: of Python, of NumPy if it is imported, and of PyTorch.

        manager.save(step, {"model": model, "random": RandomState()})

    Each rank that has a saved state continues with it, whether or not as many ranks load the state as have saved it.
    Each additional rank gets seeds derived from the saved state, which differ from the seeds of all other ranks and are
    the same each time.

    `state_dict` is collective and returns the same on every rank: 10 to 15 kB per rank.
    """

    is_collective = True
    """Whether all ranks must call `state_dict` together."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks."""
        return {"ranks": Peers(self.process_group, what="RandomState.state_dict").all_gather(local_state())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's state.

        Raises:
            CheckpointError: `state_dict` is not a state of `RandomState`.
        """
        ranks = state_dict.get("ranks") if isinstance(state_dict, Mapping) else None
        if not isinstance(ranks, list) or not ranks:
            raise CheckpointError(
                "RandomState.load_state_dict: the argument is not a result of RandomState.state_dict."
            )
        rank = Peers(self.process_group).rank
        if rank < len(ranks):
            set_local_state(ranks[rank])
        else:
            _seed_new(ranks[rank % len(ranks)], rank)


def local_state() -> dict[str, Any]:
    """Return the state of this process."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "numbers": torch.tensor(numbers, device="cpu"), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if numpy := sys.modules.get("numpy"):
        words = numpy.random.get_state(legacy=False)
        if (name := words["bit_generator"]) != "MT19937":
            raise CheckpointError(
                f"RandomState: numpy.random.set_bit_generator selected {name}, but only the state of NumPy's default, "
                "MT19937, can be saved. Use your own generator instead (numpy.random.default_rng)."
            )
        keys = torch.from_numpy(words["state"]["key"].astype("int64"))
        rest = int(words["state"]["pos"]), int(words["has_gauss"]), float(words["gauss"])
        state["numpy"] = {"name": name, "keys": keys, "rest": rest}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_local_state(state: Mapping[str, Any]) -> None:
    """Set the state of this process; generators that it does not have (CUDA) are skipped."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state and "numpy" in sys.modules:
        saved = state["numpy"]
        keys = saved["keys"].cpu().numpy().astype("uint32")
        sys.modules["numpy"].random.set_state((saved["name"], keys, *saved["rest"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def _seed_new(of: Mapping[str, Any], rank: int) -> None:
    seed_all(zlib.crc32(of["torch"].cpu().numpy().tobytes()) << 20 | rank)


def seed_all(seed: int) -> None:
    """Seed Python's, torch's and NumPy's global generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
