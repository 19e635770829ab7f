"""Find the line of the user's program that called a collective: the first frame outside torch, Python and ours."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
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


# Collective calls of ours that do not look it: a rank that is alone in one shall see by which name it came there.
_NAMED = frozenset({"save_checkpoint", "consolidate_state_dict"})


def calling_site(depth: int = 2) -> tuple[str, int]:
    """Return (file, line) of the user's call; ("", 0) when only libraries are on the stack (autograd's own threads)."""
    frame: FrameType | None = sys._getframe(depth)
    named = ""
    while frame is not None:
        code = frame.f_code
        if not _is_library(code.co_filename):
            return (f"{named} in {short(code.co_filename)}" if named else code.co_filename), frame.f_lineno
        if code.co_name in _NAMED:
            named = code.co_name
        frame = frame.f_back
    return "", 0


def short(filename: str) -> str:
    """Return the file as people name it: relative to the working directory when it lies below it."""
    here = os.getcwd() + os.sep
    return filename[len(here) :] if filename.startswith(here) else filename
