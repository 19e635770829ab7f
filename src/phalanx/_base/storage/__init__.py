"""Read and write files on this machine, or at any fsspec address."""

from phalanx._base.storage.address import is_address, open_for_reading, place_of, split_address
from phalanx._base.storage.remote_folder import RemoteFolder
from phalanx._base.storage.retry import is_transient, retry

__all__ = ["RemoteFolder", "is_address", "is_transient", "open_for_reading", "place_of", "retry", "split_address"]
