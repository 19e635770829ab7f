"""An `RRefProxy` is a proxy for a remote object: its methods run on the owner."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from phalanx.rpc import invoke
from phalanx.rpc.options import UNSET_RPC_TIMEOUT
from phalanx.rpc.rref import RRef


def call_method(rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of the object, on its owner."""
    return getattr(rref.local_value(), name)(*args, **kwargs)


call_method._calls_method = True  # type: ignore[attr-defined]
_HOW: dict[str, Callable[..., Any]] = {"sync": invoke.rpc_sync, "async": invoke.rpc_async, "remote": invoke.remote}


class RRefProxy:
    """An `RRefProxy` is the result of `RRef.rpc_sync()`, `rpc_async()` and `remote()`."""

    def __init__(self, rref: RRef[Any], how: str, timeout: float = UNSET_RPC_TIMEOUT) -> None:
        self.rref = rref
        self._how: Callable[..., Any] = _HOW[how]
        self.rpc_timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(self._call, name)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.rref._raise_if_failed()
        return self._how(self.rref.owner(), call_method, (self.rref, name, args, kwargs), timeout=self.rpc_timeout)


def _make_proxy(rref: RRef[Any], how: str, timeout: float) -> RRefProxy:
    return RRefProxy(rref, how, timeout)


RRef._make_proxy = staticmethod(_make_proxy)
