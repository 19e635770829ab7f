"""Exceptions of every make come to who called: of their own type where they can be rebuilt, and never as a hang."""

import itertools
import pickle
import random
import threading
from typing import Any

import pytest
import torch
from tests.rpc.workers import nothing, run_caller, same

from phalanx import rpc
from phalanx.errors import DeadlineError
from phalanx.rpc import RemoteError, autograd, remote_error

# -- generated classes -------------------------------------------------------------------------------------------------
# A class is made of a base and of one way for each of its parts. Both workers make the same ones, by their names.


class OwnText(str):
    """A text that cannot be pickled."""

    def __reduce_ex__(self, protocol):
        raise TypeError("no")


def raise_it(error: type[BaseException]) -> None:
    raise error("by the class")


def give(value: Any) -> Any:
    return value


def endless(self):
    return str(self)


def rebuild_in_a_circle(kind: type[Exception], length: int) -> Exception:
    """An exception whose causes lead back to it, or to themselves."""
    errors = [kind("one in a circle") if number else kind() for number in range(length)]
    for one, following in zip(errors, [*errors[1:], errors[length // 2]], strict=True):
        BaseException.__dict__["__cause__"].__set__(one, following)
    return errors[0]


def hold_lock(self, *args):
    self.__dict__["lock"] = threading.Lock()


USUAL = [Exception, KeyError, OSError, ValueError, StopIteration, AttributeError]
BASES = [*USUAL, BaseException, SystemExit, GeneratorExit]
TEXTS = {
    "usual": None,
    "raises": lambda self: raise_it(ValueError),
    "ends the process": lambda self: raise_it(SystemExit),
    "no text": lambda self: 3,
    "own text": lambda self: OwnText("a text"),
    "endless": endless,
}
PICKLES = {
    "usual": None,
    "raises": lambda self: raise_it(RuntimeError),
    "ends the process": lambda self: raise_it(SystemExit),
    "no pickle": lambda self: 3,
    "raises there": lambda self: (raise_it, (LookupError,)),
    "ends the process there": lambda self: (raise_it, (SystemExit,)),
    "leaves a generator there": lambda self: (raise_it, (GeneratorExit,)),
    "becomes an exit there": lambda self: (SystemExit, (0,)),
    "becomes a number there": lambda self: (give, (3,)),
    "becomes a class there": lambda self: (give, (KeyError,)),
    "circle of one": lambda self: (rebuild_in_a_circle, (type(self), 1)),
    "circle of three": lambda self: (rebuild_in_a_circle, (type(self), 3)),
    "circle at the end": lambda self: (rebuild_in_a_circle, (type(self), 5)),
}
OTHERS: dict[str, dict[str, Any]] = {
    "usual": {},
    "many arguments": {"__init__": lambda self, one=1, two=2, *, three=3: None},
    "asks for arguments": {"__init__": lambda self, one, two: None},
    "sets nothing": {"__setattr__": lambda self, name, value: raise_it(TypeError)},
    "own cause": {"__cause__": property(lambda self: raise_it(TypeError))},
    "own notes": {"__notes__": property(lambda self: raise_it(SystemExit))},
    "own repr": {"__repr__": lambda self: raise_it(SystemExit)},
    "own module": {"__module__": property(lambda self: raise_it(TypeError))},
    "holds what cannot be pickled": {"__init__": hold_lock},
}


def make_class(number: int, base: type[BaseException], text: str, way: str, other: str) -> type[BaseException]:
    parts = {"__module__": __name__, **OTHERS[other]}
    if TEXTS[text] is not None:
        parts["__str__"] = TEXTS[text]
    if PICKLES[way] is not None:
        parts["__reduce__"] = PICKLES[way]
    name = f"Made{number}"
    made = globals()[name] = type(name, (base,), parts)
    return made


def make_classes() -> list[tuple[tuple[str, ...], type[BaseException]]]:
    """Each pair of ways once, at least, and others by chance."""
    rng = random.Random(7)
    wanted = [(Exception, text, way, "usual") for text, way in itertools.product(TEXTS, PICKLES)]
    wanted += [(rng.choice(BASES), text, "usual", other) for text, other in itertools.product(TEXTS, OTHERS)]
    wanted += [(base, "usual", way, rng.choice(list(OTHERS))) for base, way in itertools.product(BASES, PICKLES)]
    return [((base.__name__, *ways), make_class(n, base, *ways)) for n, (base, *ways) in enumerate(wanted)]


CLASSES = make_classes()


def make_error(number: int) -> BaseException:
    ways, made = CLASSES[number]
    arguments = (1, 2) if ways[3] == "asks for arguments" else ("an argument",) * (number % 2)
    error = made(*arguments)
    if number % 3 == 0 and "__setattr__" not in made.__dict__:
        error.__context__ = ValueError("before")
    return error


def fail_so(number: int) -> None:
    raise make_error(number)


@rpc.functions.async_execution
def fail_later(number: int) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_exception(make_error(number))
    return future


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, number):
        ctx.number = number
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise make_error(ctx.number)


def fails_backward(x: torch.Tensor, number: int) -> torch.Tensor:
    return FailsBackward.apply(x, number)


def call_backward(number: int) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("w1", fails_backward, (x, number), timeout=30).sum()])


def expected(number: int) -> type[BaseException] | None:
    """The class that a pickle of it has, where it is one that may be raised at who called."""
    try:
        made = pickle.loads(pickle.dumps(make_error(number), 5))
    except BaseException:
        return None
    return type(made) if isinstance(made, Exception) else None


def check_error(number: int, call: Any) -> BaseException:
    with pytest.raises(Exception) as caught:
        call()
    assert not isinstance(caught.value, DeadlineError), CLASSES[number][0]
    return caught.value


def exit_when_unpickled() -> Any:
    return Ends()


class Ends:
    """An exception that ends the process as it is unpickled."""

    def __reduce__(self):
        return raise_it, (SystemExit,)


def _call_all() -> None:
    for number, (ways, made) in enumerate(CLASSES):
        calls = [lambda number=number: rpc.rpc_sync("w1", fail_so, (number,), timeout=30)]
        if issubclass(made, Exception):  # torch's Future takes no other
            calls.append(lambda number=number: rpc.rpc_async("w1", fail_later, (number,), timeout=30).wait())
        if number % 4 == 0:
            calls.append(lambda number=number: rpc.remote("w1", fail_so, (number,)).to_here(timeout=30))
            calls.append(lambda number=number: rpc.rpc_sync("w0", fail_so, (number,), timeout=30))
        for call in calls:
            error = check_error(number, call)
            kind = expected(number) if issubclass(made, Exception) else None
            if kind is not None:
                assert type(error) is kind, (ways, error)
            else:
                assert type(error) in (RemoteError, made), (ways, type(error))
            cause = remote_error._first_cause(error)
            assert type(cause) is remote_error.RemoteTraceback, ways
            assert "On WorkerInfo" in str(cause), ways
    for call in (lambda: rpc.rpc_sync("w1", exit_when_unpickled), lambda: rpc.rpc_sync("w1", same, (Ends(),))):
        with pytest.raises(RemoteError, match="SystemExit"):
            call()
    assert rpc.rpc_sync("w1", nothing, timeout=30) is None


@pytest.mark.slow
def test_an_exception_of_any_class_is_answered():
    """One whose text or pickle raises was never answered, causes in a circle were walked for ever, and one that raised
    SystemExit as it was unpickled ended who called; so did such a result, or argument."""
    run_caller(_call_all, 2)


def _backward_all() -> None:
    for number, (ways, made) in enumerate(CLASSES[:78:3]):
        error = check_error(3 * number, lambda number=number: call_backward(3 * number))
        if issubclass(made, Exception):
            assert isinstance(error, autograd.BackwardError), ways
            assert "was raised on worker 'w1'" in str(error), ways


def test_an_exception_of_any_class_ends_a_backward_pass():
    run_caller(_backward_all, 2)
