"""Register parameters whose optimizer update ranks share, and functions that wait for ranks that still read them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_owners: MutableMapping[Tensor, weakref.ref[object]] = WeakIdKeyDictionary()
_readers: weakref.WeakKeyDictionary[object, Callable[[], None]] = weakref.WeakKeyDictionary()


def register_shared_update(parameters: Iterable[Tensor], owner: object) -> None:
    """Register that ranks share the update of `parameters`, or of their masters, while `owner` exists."""
    for parameter in parameters:
        _owners[parameter] = weakref.ref(owner)


def unregister_shared_update(parameter: Tensor) -> None:
    """Register that from now on each rank updates the parameter on its own."""
    _owners.pop(parameter, None)


def register_readers(owner: object, await_others: Callable[[], None]) -> None:
    """Register that all ranks read `owner`'s parameters in memory; `await_others` waits until no other rank does."""
    _readers[owner] = await_others


def unregister_readers(owner: object) -> None:
    """Register that from now on only this rank reads the memory of `owner`'s parameters."""
    _readers.pop(owner, None)


def await_readers(parameters: Iterable[Tensor]) -> None:
    """Wait until no other rank reads the `parameters` whose memory is shared."""
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
