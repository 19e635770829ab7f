"""Random states: what torch.save takes and torch.load opens with weights_only, nested, shared, of every type."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import Tensor

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16,
]  # fmt: skip


def random_state(dice: random.Random) -> dict[str, Any]:
    """A state of some dozens of leaves."""
    pool: list[Tensor] = []
    return {random_key(dice): random_value(dice, pool, 3) for _ in range(dice.randint(0, 6))} | {
        "model": random_value(dice, pool, 4)
    }


def random_key(dice: random.Random) -> Any:
    return dice.choice(["a", "b", "a.b", "weight", "", "ü", "x y", "0", "1", "state", "a#2"])


def random_value(dice: random.Random, pool: list[Tensor], depth: int) -> Any:
    kind = dice.choice(["tensor"] * 5 + ["scalar"] * 3 + (["dict", "list", "tuple", "ordered"] if depth else []))
    if kind == "tensor":
        return random_tensor(dice, pool)
    if kind == "scalar":
        if dice.random() < 0.2:  # made anew, as they can change
            return dice.choice([set, bytearray, Counter])(dice.choices(range(5), k=dice.randint(0, 3)))
        return dice.choice([
            None, True, False, 0, -1, 2**70, 0.1, float("inf"), 1e-300, "", "text", "ä\n", b"bytes", (1, 2), [], {}, (),
            [1, [2, "x"]], torch.float16, torch.Size([2, 3]), torch.device("cpu"), 3 + 4j,
        ])  # fmt: skip
    count = dice.randint(0, 4)
    if kind in ("dict", "ordered"):
        keys = dice.choice([random_key, lambda dice: dice.randint(0, 3)])
        items = [(keys(dice), random_value(dice, pool, depth - 1)) for _ in range(count)]
        return dict(items) if kind == "dict" else OrderedDict(items)
    values = [random_value(dice, pool, depth - 1) for _ in range(count)]
    return values if kind == "list" else tuple(values)


def random_tensor(dice: random.Random, pool: list[Tensor]) -> Tensor:
    if pool and dice.random() < 0.3:
        tensor = dice.choice(pool)
        return dice.choice([tensor, tensor.detach(), tensor[..., 1:] if tensor.dim() else tensor, tensor.detach().t()
                            if tensor.dim() == 2 else tensor])  # fmt: skip
    shape = [dice.choice([0, 1, 2, 3, 5]) for _ in range(dice.randint(0, 4))]
    dtype = dice.choice(DTYPES)
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = bits.view(dtype).view(shape) if dtype is not torch.bool else torch.rand(shape) > 0.5
    if dice.random() < 0.2 and tensor.dim() > 1:
        tensor = tensor.transpose(0, 1)
    if dice.random() < 0.1 and tensor.dim() and dtype.itemsize > 1:
        tensor = tensor[::2]
    if dice.random() < 0.2 and dtype in (torch.float32, torch.float64):
        tensor = torch.nn.Parameter(tensor, requires_grad=dice.random() < 0.8)
    pool.append(tensor)
    return tensor


def change(value: Any) -> None:
    """Change everything in a state that can be changed, in place, as training that goes on would."""
    if isinstance(value, Tensor):
        value.detach().copy_(torch.zeros(value.shape))
    elif isinstance(value, (set, Counter)):
        value.update([99])
    elif isinstance(value, bytearray):
        value.append(99)
    elif isinstance(value, dict):
        for item in value.values():
            change(item)
        value["changed"] = True
    elif isinstance(value, (list, tuple)):
        for item in value:
            change(item)
        if isinstance(value, list):
            value.append("changed")


def difference(left: Any, right: Any, where: str = "state") -> str:
    """The first place in which two states differ, in words; empty if they are the same to the bit."""
    if type(left) is not type(right):
        return f"{where}: {type(left)} and {type(right)}"
    if isinstance(left, Tensor):
        same_form = (left.dtype, left.shape, left.requires_grad) == (right.dtype, right.shape, right.requires_grad)
        return "" if same_form and bits_of(left) == bits_of(right) else f"{where}: {left!r} and {right!r}"
    if isinstance(left, dict):
        if list(left) != list(right) or [type(k) for k in left] != [type(k) for k in right]:
            return f"{where}: keys {list(left)} and {list(right)}"
        pairs = [(f"{where}[{key!r}]", left[key], right[key]) for key in left]
    elif isinstance(left, (list, tuple)) and not isinstance(left, torch.Size):
        if len(left) != len(right):
            return f"{where}: {len(left)} and {len(right)} items"
        pairs = [(f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(left, right, strict=True))]
    else:
        return "" if left == right else f"{where}: {left!r} and {right!r}"
    return next(filter(None, (difference(a, b, name) for name, a, b in pairs)), "")


def bits_of(tensor: Tensor) -> bytes:
    return (
        torch.empty(tensor.shape, dtype=tensor.dtype)
        .copy_(tensor.detach())
        .view(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )
