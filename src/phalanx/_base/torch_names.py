"""Look up undocumented names of torch in one place, and report the lost feature if a name is missing."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any, NoReturn

from phalanx._base.log import get_logger, warn_once
from phalanx._base.torch_versions import TESTED
from phalanx.errors import PhalanxError

_logger = get_logger(__name__)


class Missing:
    """A `Missing` stands in for a name that torch lacks: any use, as a function, class or module, raises an error."""

    def __init__(self, sentence: str) -> None:
        self.__dict__["_sentence"] = sentence

    def _fail(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PhalanxError(self.__dict__["_sentence"])

    __call__ = __instancecheck__ = __mro_entries__ = _fail

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python itself looks these up, for example in `inspect`
            raise AttributeError(self.__dict__["_sentence"])
        self._fail()


_ERROR = object()


def find(path: str, *, loses: str, instead: Any = _ERROR) -> Any:
    """Return torch's object at `path`; if it is missing, return `instead`, and log the lost feature once.

    Without `instead`, return a `Missing`, which raises an error when it is used.

    Arguments:
        path: the dotted name from "torch" on; "torch.a.function(x, y)" also requires parameters of these names, in
            this order, possibly with others between them.
        loses: the lost feature, as a sentence for the user.
        instead: what to return if the name is missing.
    """
    problem = describe_missing(path)
    if not problem:
        return resolve(path.partition("(")[0])
    if instead is _ERROR:
        return Missing(_sentence(problem, loses))
    report_loss(problem, loses)
    return instead


def report_loss(problem: str, loses: str) -> None:
    """Log, once per process, what the installed torch lacks and which feature is lost."""
    warn_once(_logger, _sentence(problem, loses))


def _sentence(problem: str, loses: str) -> str:
    version = sys.modules["torch"].__version__
    return f"torch {version} {problem}: {loses}. Phalanx is tested with torch {', '.join(TESTED)}."


def describe_missing(path: str) -> str:
    """Return what is wrong with a path for `find`, as the end of a sentence about torch; "" if it is found."""
    name, _, parameters = path.partition("(")
    try:
        found = resolve(name)
    except (AttributeError, ImportError):
        return f"has no {name}"
    wanted = [parameter.strip() for parameter in parameters.rstrip(")").split(",") if parameter.strip()]
    if not wanted:
        return ""
    try:
        there = list(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return ""  # a function in C without a signature
    if [parameter for parameter in there if parameter in wanted] == wanted:
        return ""
    return f"has a {name} without the parameters {', '.join(wanted)}"


def resolve(name: str) -> Any:
    """Return the module, class, function or attribute of a dotted name.

    Raises:
        AttributeError, ImportError: there is none.
    """
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for number in range(1, len(parts)):
        prefix = ".".join(parts[: number + 1])
        if prefix in sys.modules:  # first: a package may export a function under its module's name
            found = sys.modules[prefix]
        elif hasattr(found, parts[number]):
            found = getattr(found, parts[number])
        elif hasattr(found, "__path__"):
            found = importlib.import_module(prefix)
        else:
            raise AttributeError(f"{'.'.join(parts[:number])} has no {parts[number]}")
    return found
