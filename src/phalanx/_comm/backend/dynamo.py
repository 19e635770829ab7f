"""Mark functions that torch.compile must not trace, mainly the methods of a group and of its works.

torch's own groups are C++, at which Dynamo breaks the graph. Ours are Python, so Dynamo would trace their locks,
threads and opaque objects, unless they are marked. `torch.compiler.disable` also sets the marks, but it imports all of
Dynamo, which takes a second.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar

from phalanx._base.torch_names import find

_LOSES = "torch.compile traces a group's operations; call them outside of compiled code"
_set_strategy: Any = find("torch._C._dynamo.eval_frame.set_code_exec_strategy", loses=_LOSES, instead=None)
_FrameAction: Any = find("torch._C._dynamo.eval_frame._FrameAction", loses=_LOSES, instead=None)
_FrameExecStrategy: Any = find("torch._C._dynamo.eval_frame._FrameExecStrategy", loses=_LOSES, instead=None)
_DYNAMOS_DECORATORS = ("torch._compile", "torch.optim.optimizer")  # the decorators are defined in these modules

_Marked = TypeVar("_Marked", bound=type | Callable[..., Any])
_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(marked: _Marked) -> _Marked:
    """Exclude a function, or a class's own methods, and all functions that they call, from Dynamo."""
    for member in vars(marked).values() if isinstance(marked, type) else [marked]:
        for function in _functions(member):
            _exclude(function)
    return marked


def skipped(function: _Function) -> _Function:
    """Exclude a function's own code from Dynamo, but not the functions that it calls: `disable(recursive=False)`."""
    _exclude(function, with_callees=False)
    return function


def undecorated(function: Any) -> Any:
    """Return an optimizer's method without torch's decorators for Dynamo; only `untraced` code may call the result.

    Each decorator would import Dynamo at its first call: half a second, and 30 to 70 MB in every process.
    """
    while hasattr(function, "__wrapped__") and function.__globals__["__name__"] in _DYNAMOS_DECORATORS:
        function = function.__wrapped__
    return function


def _functions(member: Any) -> list[types.FunctionType]:
    if isinstance(member, property):
        candidates = [member.fget, member.fset]
    elif isinstance(member, staticmethod | classmethod):
        candidates = [member.__func__]
    else:
        candidates = [member]
    return [function for function in candidates if isinstance(function, types.FunctionType)]


def _exclude(function: Any, *, with_callees: bool = True) -> None:
    function = inspect.unwrap(function)  # all wrappers of a decorator, such as `torch.no_grad()`, share one code object
    # A call from traced code breaks the graph.
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "a process group's operations are executed, not traced"
    # If untraced code calls the function, Dynamo skips its frame and, `with_callees`, the frames of all its callees.
    if _set_strategy is not None and _FrameAction is not None and _FrameExecStrategy is not None:
        callees = _FrameAction.SKIP if with_callees else _FrameAction.DEFAULT
        _set_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, callees))
