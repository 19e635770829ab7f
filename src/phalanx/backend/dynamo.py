"""What torch.compile must not look into: the methods by which torch calls a group and its works, above all.

torch's own groups are C++, at which Dynamo ends its graph. Ours are Python, so it went on into them: locks, threads,
objects that it takes for opaque ones. Told so, it treats both alike. `torch.compiler.disable` would say it too, but
imports all of Dynamo, for a second; these are the two marks that it leaves.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C import _dynamo

_Marked = TypeVar("_Marked", bound=type | Callable[..., Any])


def untraced(marked: _Marked) -> _Marked:
    """Have Dynamo leave a function, or a class's own methods, and all that they call to the interpreter."""
    for member in vars(marked).values() if isinstance(marked, type) else [marked]:
        for function in _functions(member):
            _leave_alone(function)
    return marked


def _functions(member: Any) -> list[types.FunctionType]:
    if isinstance(member, property):
        candidates = [member.fget, member.fset]
    elif isinstance(member, staticmethod | classmethod):
        candidates = [member.__func__]
    else:
        candidates = [member]
    return [function for function in candidates if isinstance(function, types.FunctionType)]


def _leave_alone(function: Any) -> None:
    function = inspect.unwrap(function)  # a decorator's own code, as of `torch.no_grad()`, is everybody's
    # A call in code that is being traced ends the graph.
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "a process group's operations are carried out, not traced"
    # A frame that is reached otherwise, and all below it, is run as it is.
    frames: Any = _dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    else:  # torch 2.6
        frames.skip_code(function.__code__)
