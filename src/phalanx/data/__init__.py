"""Decide which rank reads which samples, in which order, and read them."""

from phalanx.data.hugging_face import from_datasets
from phalanx.data.json_lines import from_json_lines
from phalanx.data.litdata import from_litdata
from phalanx.data.parquet import from_parquet
from phalanx.data.permutation import Permutation
from phalanx.data.sampler import DistributedSampler
from phalanx.data.stream import Stream
from phalanx.data.webdataset import from_webdataset

__all__ = [
    "DistributedSampler",
    "Permutation",
    "Stream",
    "from_datasets",
    "from_json_lines",
    "from_litdata",
    "from_parquet",
    "from_webdataset",
]
