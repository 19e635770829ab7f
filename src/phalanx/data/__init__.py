"""Which rank reads which sample, in which order."""

from phalanx.data.permutation import Permutation
from phalanx.data.sampler import DistributedSampler

__all__ = ["DistributedSampler", "Permutation"]
