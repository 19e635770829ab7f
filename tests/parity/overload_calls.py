"""Every overload of a process group's collectives and messages, read from the docstrings of the installed torch.

`every_call` makes each of them in all the ways that Python has, and some that are wrong, and tells what came of it: the
same function runs over Gloo and over ours. What the tensors of a call are is said once per operation (`_OPERATIONS`);
which arguments there are, in which order, with which names, torch says.
"""

from __future__ import annotations

import copy
import itertools
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

CPU = torch.device("cpu")
N = 3  # elements of one rank's part

# What the tensors of a call are, in the order in which torch names them: `one` of N elements, one `per_rank`, a `whole`
# of all ranks' parts; `@root` where only the root gives them. Lists of these are `several`.
_OPERATIONS = {
    "allreduce": ("one",),
    "allreduce_coalesced": ("several one",),
    "broadcast": ("one",),
    "reduce": ("one",),
    "allgather": ("per_rank", "one"),
    "allgather_coalesced": ("per_rank several", "several one"),
    "all_gather_single": ("whole", "one"),
    "all_gather_single_coalesced": ("several whole", "several one"),
    "gather": ("per_rank@root", "one"),
    "scatter": ("one", "per_rank@root"),
    "reduce_scatter": ("one", "per_rank"),
    "reduce_scatter_single": ("one", "whole"),
    "reduce_scatter_single_coalesced": ("several one", "several whole"),
    "alltoall": ("per_rank", "per_rank"),
    "all_to_all_single": ("whole", "whole"),
    "barrier": (),
    "send": ("one",),
    "recv": ("one",),
    "recv_anysource": ("one",),
}
_OTHER_NAMES = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}
# What c10d offers beside them, and Gloo has not, or not as a collective with one outcome.
LEFT_OUT = {
    "_end_coalescing": "Gloo has none",
    "allreduce_sparse": "Gloo's Backend has none; sparse tensors go through allreduce",
    "gather_single": "new in torch 2.15",
    "gather_into_tensor": "new in torch 2.15",
    "reconfigure": "changes the group",
}
_WAYS = (("positional", 99), ("keyword", 0), ("mixed", 1))


@dataclass(frozen=True)
class Parameter:
    """An argument of an overload: its name, torch's word for its type, and whether it may be left out."""

    name: str
    type: str
    optional: bool


@dataclass(frozen=True)
class Overload:
    """One signature of `owner`.`method`."""

    owner: str
    method: str
    parameters: tuple[Parameter, ...]

    def __str__(self) -> str:
        return f"{self.owner}.{self.method}({', '.join(p.name for p in self.parameters)})"


def overloads() -> list[Overload]:
    """All that the installed torch has and that return a Work, in its order."""
    found = []
    for owner in ("ProcessGroup", "Backend"):
        cls = getattr(c10d, owner)
        for method in sorted(dir(cls)):
            for line in (getattr(getattr(cls, method), "__doc__", None) or "").splitlines():
                signature = re.fullmatch(rf"(?:\d+\. )?{method}\(self: [\w.]+(?:, )?(.*)\) -> \S*Work", line)
                if signature:
                    found.append(Overload(owner, method, tuple(_parameters(signature[1]))))
    return found


def _parameters(text: str) -> list[Parameter]:
    # Defaults are reprs of objects, "<... object at 0x...>", which hold neither ": " nor a comma; but a timedelta's do.
    text = re.sub(r"= datetime\.timedelta\([^)]*\)", "= ...", text)
    pieces = re.split(r", (?=\w+: )", text) if text else []
    parameters = []
    for piece in pieces:
        name, _, rest = piece.partition(": ")
        kind, equals, _ = rest.partition(" = ")
        parameters.append(Parameter(name, kind, bool(equals)))
    return parameters


def every_call(rank: int, size: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, str, Any]]:
    """Make all calls; of each its name, "done" or the kind of its refusal, and the tensors afterwards."""
    group = dist.group.WORLD
    owners = {"ProcessGroup": group, "Backend": group._get_backend(CPU)}
    told: list[tuple[str, str, Any]] = []
    for overload in overloads():
        if overload.method not in LEFT_OUT:
            target = owners[overload.owner]
            calls = _Calls(overload, rank, size, dtype)
            for label, args, kwargs in calls.right():
                told.append((f"{overload} {label}", *calls.make(target, args, kwargs)))
            for label, args, kwargs in calls.wrong():
                told.append((f"{overload} {label}", *calls.refused(target, args, kwargs)))
    return told


class _Calls:
    def __init__(self, overload: Overload, rank: int, size: int, dtype: torch.dtype) -> None:
        self.overload, self.rank, self.size, self.dtype = overload, rank, size, dtype
        self.operation = _OTHER_NAMES.get(overload.method, overload.method)
        self.tensors = _OPERATIONS[self.operation]
        self.root = size - 1  # 0 in a call that does not say

    def right(self) -> Any:
        """All ways of Python to give the arguments, with each of those that may be left out, and without."""
        parameters = self.overload.parameters
        must = [p for p in parameters if not p.optional]
        may = [p for p in parameters if p.optional]
        for chosen in itertools.chain.from_iterable(itertools.combinations(may, n) for n in range(len(may) + 1)):
            given = [p for p in parameters if p in must or p in chosen]
            for way, num_positional in _WAYS:
                self.root = self.size - 1 if any(p.name in ("opts", "root") for p in given) else 0
                by_place = list(itertools.takewhile(lambda p: p in given, parameters))[:num_positional]  # noqa: B023
                by_place += [p for p in given[len(by_place) :] if p.name.startswith("arg")]  # which have no name
                values = self._values()
                args = [values[p] for p in by_place]
                kwargs = {p.name: values[p] for p in reversed(given) if p not in by_place}
                yield f"{way}, {len(given)} given", args, kwargs

    def wrong(self) -> Any:
        """Draw calls that no overload takes."""
        parameters = self.overload.parameters
        values = self._values()
        must = [values[p] for p in parameters if not p.optional]
        everything = [values[p] for p in parameters]
        if must:
            yield "too few", must[:-1], {}
            yield "twice", must, {parameters[0].name: must[0]}
        yield "too many", [*everything, 1, 2, 3], {}
        yield "an unknown name", must, {"tensorlist": 1}
        for at, parameter in enumerate(parameters):
            strange = copy.copy(everything)
            strange[at] = {"root": 0.5, "tag": "0"}.get(parameter.name, "text")
            yield f"text for {parameter.name}", strange, {}

    def make(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[str, Any]:
        """The kind of the outcome, and the tensors."""
        nxt, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        # A message needs its other half: each rank sends to the next.
        own = torch.full((N,), self.rank + 10.0, dtype=self.dtype)
        other = None
        if self.operation == "send":
            other = dist.group.WORLD.recv([own], previous, 5)
        elif self.operation.startswith("recv"):
            other = dist.group.WORLD.send([own], nxt, 5)
        try:
            work = getattr(target, self.overload.method)(*args, **kwargs)
            work.wait()
        except Exception as error:
            return _kind(error), None
        if other is not None:
            other.wait()
        partial = self.operation == "reduce" and self.rank != self.root  # what Gloo leaves there is its own affair
        left = None if partial else [t.tolist() for t in _flat([*args, *(kwargs[k] for k in sorted(kwargs))])]
        return "done", (left, own.tolist())

    def refused(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[str, Any]:
        try:
            getattr(target, self.overload.method)(*args, **kwargs).wait()
        except Exception as error:
            return _kind(error), None
        return "done", None

    def _values(self) -> dict[Parameter, Any]:
        """A value for each parameter; tensors are new each time."""
        numbers = itertools.count(self.rank * 100)
        places = iter(self.tensors)
        return {p: self._value(p, places, numbers) for p in self.overload.parameters}

    def _value(self, parameter: Parameter, places: Any, numbers: Any) -> Any:
        name, kind = parameter.name, parameter.type
        if "torch.Tensor" in kind:
            return self._nested(next(places), kind.count("Sequence["), numbers)
        if name.endswith("split_sizes"):
            return [N] * self.size
        if name == "op":
            return dist.ReduceOp.MAX
        if name == "timeout":
            return timedelta(seconds=40)
        if name == "opts":
            return self._options(kind)
        return {"root": self.root, "dstRank": (self.rank + 1) % self.size, "srcRank": (self.rank - 1) % self.size}.get(
            name, 5
        )

    def _options(self, kind: str) -> Any:
        options = getattr(c10d, re.search(r"\w+Options", kind)[0])()
        if hasattr(options, "rootRank"):
            options.rootRank = self.root
        if hasattr(options, "reduceOp"):
            options.reduceOp = dist.ReduceOp.MAX
        return options

    def _nested(self, place: str, depth: int, numbers: Any) -> Any:
        is_absent = place.endswith("@root") and self.root != self.rank
        value = [] if is_absent else self._built(place.removesuffix("@root").split(), numbers)
        while _depth(value) < depth and not is_absent:
            value = [value]
        return value

    def _built(self, words: list[str], numbers: Any) -> Any:
        if not words:
            words = ["one"]
        head, rest = words[0], words[1:]
        if head in ("one", "whole"):
            count = N * (self.size if head == "whole" else 1)
            return torch.tensor([next(numbers) for _ in range(count)], dtype=self.dtype)
        return [self._built(rest, numbers) for _ in range(2 if head == "several" else self.size)]


def _depth(value: Any) -> int:
    return 1 + (_depth(value[0]) if value else 0) if isinstance(value, list) else 0


def _flat(values: list[Any]) -> list[torch.Tensor]:
    return [
        t for v in values for t in ([v] if isinstance(v, torch.Tensor) else _flat(v) if isinstance(v, list) else [])
    ]


def _kind(error: BaseException) -> str:
    return "TypeError" if isinstance(error, TypeError) else "RuntimeError" if isinstance(error, RuntimeError) else "?"
