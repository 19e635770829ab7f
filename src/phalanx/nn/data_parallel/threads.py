"""Make calls side by side, one thread for each, under the modes of the thread that asks for them."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from phalanx.torch_names import find

# PyTorch's DataParallel raises with this; it has no public name.
ExceptionWrapper: Any = find(
    "torch._utils.ExceptionWrapper", loses="phalanx.nn.DataParallel does not run on several devices"
)

T = TypeVar("T")


def run_in_threads(calls: Sequence[Callable[[], T]], where: str) -> list[T]:
    """Return what each call returns, in order; `where` names the calls in messages. One call alone runs here.

    The threads take over grad mode, inference mode, autocast and context variables, and share the intra-op threads of
    this one between them: so many calls of PyTorch at a time use no more cores than one call does.

    Raises:
        Exception: what the first call that failed raised (PyTorch's wrapping: its class, and a message with the
            number of the call and its traceback), after all calls have ended.
    """
    if len(calls) == 1:
        return [calls[0]()]
    results: list[Any] = [ExceptionWrapper(where="")] * len(calls)
    modes = _Modes()

    def work(number: int) -> None:
        try:
            with modes.entered(len(calls)):
                results[number] = calls[number]()
        except BaseException:
            told = f"in {where} {number} of {len(calls)}"
            results[number] = ExceptionWrapper(where=told)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(work, number), name=f"{where} {number}")
        for number in range(len(calls))
    ]
    with _threads_restored():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for result in results:
        if isinstance(result, ExceptionWrapper):
            result.reraise()
    return results  # every wrapper has been raised


class _Modes:
    """They are PyTorch's modes that belong to a thread, as they are here."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = torch.is_autocast_enabled("cpu")
        self._autocast_dtype = torch.get_autocast_dtype("cpu")
        self._autocast_cache = torch.is_autocast_cache_enabled()
        self._num_threads = torch.get_num_threads()

    @contextmanager
    def entered(self, num_calls: int) -> Iterator[None]:
        """Enter the modes, in a thread that is one of `num_calls`."""
        share = max(1, self._num_threads // num_calls)
        if share != self._num_threads:
            torch.set_num_threads(share)  # this holds for this thread, and for those that begin until it is restored
        autocast = torch.autocast(
            "cpu", self._autocast_dtype, enabled=self._autocast, cache_enabled=self._autocast_cache
        )
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad), autocast:
            yield


@contextmanager
def _threads_restored() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
