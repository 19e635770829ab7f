"""Which rank reads which sample, in which order."""

from phalanx.data.permutation import Permutation
from phalanx.data.sampler import DistributedSampler
from phalanx.data.stream import Stream

__all__ = ["DistributedSampler", "Permutation", "Stream"]
