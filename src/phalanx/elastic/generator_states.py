"""Read the states of torch's, Python's and NumPy's random generators at little cost, and restore them.

Python's `random` and NumPy's global generator take 7 and 23 us to read through their own interfaces, more than a commit
may cost. Both are Mersenne Twisters (624 words and a position) at an address that can be found. If a check shows that
the memory there holds the state, it is copied from memory (0.1 us), and read through the interface only if it changed.
"""

from __future__ import annotations

import ctypes
import importlib
import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

_WORDS = 624
_cuda_is_initialized: Callable[[], bool] = torch.cuda.is_initialized


class GeneratorStates:
    """`GeneratorStates` reads random states: `capture` returns equal bytes as long as nothing was drawn."""

    def __init__(self) -> None:
        self._python = _python_words()
        self._numpy: Any = None  # the generator that owns `_numpy_words`
        self._numpy_words: Any = None
        self._last_numpy = (b"", False)  # the words, and whether the generator keeps the second of a pair of normals
        self._numpy_blob = b""
        self._last_python: Any = None
        self._python_blob = b""

    def capture(self) -> tuple[bytes, bytes, bytes, bytes]:
        """Return the states of torch (CPU), Python, NumPy and CUDA as bytes; b"" if NumPy or CUDA is not in use."""
        return (
            torch.default_generator.get_state().numpy().tobytes(),
            self._capture_python(),
            self._capture_numpy() if "numpy" in sys.modules else b"",
            _capture_cuda() if _cuda_is_initialized() else b"",
        )

    def _capture_python(self) -> bytes:
        now = random.getstate() if self._python is None else (bytes(self._python), random._inst.gauss_next)  # type: ignore[attr-defined]
        if now != self._last_python:
            self._last_python, self._python_blob = now, pickle.dumps(random.getstate())
        return self._python_blob

    def _capture_numpy(self) -> bytes:
        numpy_random: Any = sys.modules.get("numpy.random") or importlib.import_module("numpy.random")
        generator = numpy_random.mtrand._rand._bit_generator
        if generator is not self._numpy:
            self._numpy, self._numpy_words, self._last_numpy = generator, _numpy_words(generator), (b"", False)
        words, kept = self._last_numpy
        if self._numpy_words is not None and not kept and bytes(self._numpy_words) == words:
            return self._numpy_blob
        state: Any = numpy_random.get_state(legacy=False)
        self._last_numpy = (b"" if self._numpy_words is None else bytes(self._numpy_words), bool(state["has_gauss"]))
        self._numpy_blob = pickle.dumps(state)
        return self._numpy_blob


def _capture_cuda() -> bytes:
    """Return the states of all GPUs: 16 bytes each, where a pickled tensor takes 300."""
    return pickle.dumps([one.numpy().tobytes() for one in torch.cuda.get_rng_state_all()])


def restore(states: tuple[bytes, bytes, bytes, bytes]) -> None:
    """Restore the generators to the state that `capture` returned."""
    torch_state, python_state, numpy_state, cuda_state = states
    if torch_state:
        torch.set_rng_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))
    if python_state:
        random.setstate(pickle.loads(python_state))
    if numpy_state and "numpy" in sys.modules:
        from numpy.random import set_state

        set_state(pickle.loads(numpy_state))
    if cuda_state and torch.cuda.is_available():
        states_of_all = pickle.loads(cuda_state)
        torch.cuda.set_rng_state_all([torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in states_of_all])


def _python_words() -> Any:
    """Return a view of the words of Python's generator in memory (in CPython after the object's header), or None."""
    instance: Any = random._inst
    header = object.__basicsize__
    if sys.implementation.name != "cpython" or type(instance).__basicsize__ < header + 4 * (_WORDS + 1):
        return None
    words = (ctypes.c_uint32 * (_WORDS + 1)).from_address(id(instance) + header)
    _, (*key, position), _ = random.getstate()
    return words if [*words] == [position, *key] else None


def _numpy_words(generator: Any) -> Any:
    """Return a view of the words of NumPy's generator in memory; None if not found, or no Mersenne Twister."""
    if type(generator).__name__ != "MT19937":
        return None
    address = generator.ctypes.state_address
    words = (ctypes.c_uint32 * (_WORDS + 1)).from_address(int(getattr(address, "value", address)))
    state = generator.state["state"]
    return words if [*words] == [*map(int, state["key"]), int(state["pos"])] else None
