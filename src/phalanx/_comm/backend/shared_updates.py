"""The memory of an optimizer whose update ranks share notes here which parameters it has; other code asks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_owners: MutableMapping[Tensor, weakref.ref[object]] = WeakIdKeyDictionary()
_readers: weakref.WeakKeyDictionary[object, Callable[[], None]] = weakref.WeakKeyDictionary()


def register_shared_update(parameters: Iterable[Tensor], owner: object) -> None:
    """Note that ranks share the update of `parameters`, or of their masters, as long as `owner` lives."""
    for parameter in parameters:
        _owners[parameter] = weakref.ref(owner)


def register_readers(owner: object, await_others: Callable[[], None]) -> None:
    """Note that all ranks read the memory of `owner`'s parameters; `await_others` waits until no other rank does."""
    _readers[owner] = await_others


def unregister_readers(owner: object) -> None:
    """Note that only this rank reads the memory of `owner`'s parameters from now on."""
    _readers.pop(owner, None)


def await_readers(parameters: Iterable[Tensor]) -> None:
    """Wait until no other rank reads those of `parameters` whose memory ranks share."""
    if not _readers:
        return
    owners = {id(owner): owner for p in parameters if p in _owners and (owner := _owners[p]()) is not None}
    for owner in owners.values():
        if await_others := _readers.get(owner):
            await_others()


def has_shared_update(parameter: Tensor) -> bool:
    """Return whether ranks share the update of the parameter, or of its master."""
    owner = _owners.get(parameter)
    return owner is not None and owner() is not None
