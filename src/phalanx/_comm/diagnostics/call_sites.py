"""Find the line of the user's program that called a collective: the first frame outside torch, Python and ours."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

import torch

import phalanx

_OURS = os.path.dirname(os.path.abspath(phalanx.__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_PACKAGES = tuple(os.path.join(_PYTHON, name) + os.sep for name in ("site-packages", "dist-packages"))
# Decorators of torch's public functions: a deprecated one is called through the first.
_PASS_ON = ("typing_extensions.py", "contextlib.py")

# Code that only passes the call on. Files of phalanx's own examples or tests lie elsewhere and count as the user's.
_library: dict[str, bool] = {}


def _is_library(filename: str) -> bool:
    answer = _library.get(filename)
    if answer is None:
        pythons = filename.startswith(("<frozen ", _PYTHON)) and not filename.startswith(_PACKAGES)
        answer = pythons or filename.startswith((_OURS, _TORCH)) or os.path.basename(filename) in _PASS_ON
        _library[filename] = answer
    return answer


IN_THREAD = "a thread of "
"""How the place of a call begins that a library's own thread has made, beside the user's program."""

# Collective calls of ours that do not look it: a rank that is alone in one shall see by which name it came there.
_NAMED = frozenset({"save_checkpoint", "consolidate_state_dict"})


def calling_site() -> tuple[str, int]:
    """Return (file, line) of the user's call.

    Where only libraries are on the stack it is torch's first line in this thread, if torch has started the thread in
    Python, as `dcp.async_save` does; else ("", 0), as in autograd's own threads.
    """
    frame: FrameType | None = sys._getframe(1)
    named = ""
    while frame is not None:
        code = frame.f_code
        is_library = _library.get(code.co_filename)  # spelt out: each call pays for it once per frame of ours
        if not (_is_library(code.co_filename) if is_library is None else is_library):
            return (f"{named} in {short(code.co_filename)}" if named else code.co_filename), frame.f_lineno
        if code.co_name in _NAMED:
            named = code.co_name
        frame = frame.f_back
    return _site_of_thread(sys._getframe(1))


def _site_of_thread(frame: FrameType) -> tuple[str, int]:
    """Return the outermost line of torch's on this stack, if a thread of Python's runs it."""
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
    """Return the file as people name it: relative to the working directory when it lies below it."""
    here = os.getcwd() + os.sep
    return filename[len(here) :] if filename.startswith(here) else filename
