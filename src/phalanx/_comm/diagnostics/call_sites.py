"""Find the user's line that called a collective: the first frame outside torch, Python's library and Phalanx."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import threading
from types import FrameType
from typing import NamedTuple

import torch

import phalanx

_OURS = os.path.dirname(os.path.abspath(phalanx.__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_PACKAGES = tuple(
    {
        os.path.join(folder, "")
        for folder in (
            *(os.path.join(_PYTHON, name) for name in ("site-packages", "dist-packages")),
            *(sysconfig.get_path(name) for name in ("purelib", "platlib")),  # those of a virtual environment
            *site.getsitepackages(),
            site.getusersitepackages(),
        )
    }
)
# Files of decorators of torch's public functions: a deprecated function is called through typing_extensions.
_FORWARDING = ("typing_extensions.py", "contextlib.py")

# By file: whether it only forwards calls. Phalanx's own examples and tests count as the user's files.
_library: dict[str, bool] = {}


def _is_library(filename: str) -> bool:
    answer = _library.get(filename)
    if answer is None:
        pythons = filename.startswith(("<frozen ", _PYTHON)) and not filename.startswith(_PACKAGES)
        answer = pythons or filename.startswith((_OURS, _TORCH)) or os.path.basename(filename) in _FORWARDING
        _library[filename] = answer
    return answer


_COMM = os.path.join(_OURS, "_comm") + os.sep
_C10D, _C10D_LOGGER = (os.path.join(_TORCH, "distributed", name) for name in ("distributed_c10d.py", "c10d_logger.py"))


class ScriptCall(NamedTuple):
    """A `ScriptCall` is a call of `function`, a function of torch.distributed, in the script itself."""

    function: str
    file: str
    line: int


def find_script_call() -> ScriptCall | None:
    """Return the script's own call of the current operation; None if a library's code calls it.

    The constructor of a wrapper counts as a library's code, and so does every installed package.
    """
    frame: FrameType | None = sys._getframe(1)
    function = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name == _C10D:
            function = frame.f_code.co_name
        elif name != _C10D_LOGGER and not name.startswith(_COMM) and os.path.basename(name) not in _FORWARDING:
            return (
                None if name.startswith(_PACKAGES) or _is_library(name) else ScriptCall(function, name, frame.f_lineno)
            )
        frame = frame.f_back
    return None


IN_THREAD = "a thread of "
"""The prefix of the call site of a call on a library's own thread."""

# Collective functions of ours whose names do not show that: the errors of a rank that waits alone in one give its name.
_NAMED = frozenset({"save_checkpoint", "consolidate_state_dict"})


def calling_site() -> tuple[str, int]:
    """Return (file, line) of the user's call.

    If only libraries are on the stack, return torch's first line in this thread, provided that torch has started the
    thread in Python, as `dcp.async_save` does; otherwise ("", 0), as in autograd's own threads.
    """
    frame: FrameType | None = sys._getframe(1)
    named = ""
    while frame is not None:
        code = frame.f_code
        is_library = _library.get(code.co_filename)  # inlined, since each call pays for it once per frame of ours
        if not (_is_library(code.co_filename) if is_library is None else is_library):
            return (f"{named} in {short(code.co_filename)}" if named else code.co_filename), frame.f_lineno
        if code.co_name in _NAMED:
            named = code.co_name
        frame = frame.f_back
    return _site_of_thread(sys._getframe(1))


def _site_of_thread(frame: FrameType) -> tuple[str, int]:
    """Return torch's outermost line on this stack, if it runs in a Python thread."""
    torchs: FrameType | None = None
    outermost = frame
    while True:
        if outermost.f_code.co_filename.startswith(_TORCH):
            torchs = outermost
        if outermost.f_back is None:
            break
        outermost = outermost.f_back
    if torchs is None or outermost.f_code.co_filename != threading.__file__:
        return "", 0
    return f"{IN_THREAD}torch/{torchs.f_code.co_filename[len(_TORCH) :]}", torchs.f_lineno


def short(filename: str) -> str:
    """Return the file name relative to the working directory if the file is below it."""
    try:
        here = os.getcwd() + os.sep
    except OSError:  # the working directory was removed
        return filename
    return filename[len(here) :] if filename.startswith(here) else filename
