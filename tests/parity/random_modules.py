"""Models of `random_models` whose state is made of more at random: shared, tied and renamed modules, odd tensors.

A model of a seed is the same in every process. `scramble` gives it other values, so that a load that leaves something
out is seen.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

import torch
from tests.checkpoint.random_trees import random_tensor
from tests.parity.random_models import Chain, Column, draw
from torch import Tensor, nn
from torch.nn.utils import parametrizations

SIZE = 8
NAMES = ("module", "_orig_mod", "submodule", "module_", "a#2", "x y", "ü", "0", "state", "params", "optimizer")


class Counting(nn.Module):
    """A scale, a buffer that moves with each call, one that is not saved, and a state that is no tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.scale = nn.Parameter(torch.randn(SIZE))
        self.register_buffer("mean", torch.zeros(SIZE))
        self.register_buffer("scratch", torch.randn(SIZE), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("no_parameter", None)

    def forward(self, h):
        if self.training:
            self.mean.lerp_(h.detach().mean((0, 1)), 0.1)
        return h + h * self.scale + self.mean

    def get_extra_state(self):
        return {
            "dict": {"calls": self.calls, "names": {"a", "b"}, 1: [(2, None)]},
            "tensor": torch.full((2, 3), float(self.calls)).t(),
            "none": None,
            "tensors": [torch.tensor(self.calls), {"x": torch.tensor([1.5], dtype=torch.bfloat16)}],
        }[self.kind]

    def set_extra_state(self, state):
        if self.kind == "dict":
            assert state["names"] == {"a", "b"}
            assert state[1] == [(2, None)]
            self.calls = state["calls"]
        elif self.kind != "none":
            self.calls = int(state[0] if self.kind == "tensors" else state[0, 0])


class Versioned(nn.Module):
    """A scale that was kept as its square root before version 2: what has no version is taken for old."""

    _version = 2

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, h):
        return h * self.scale

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if (local_metadata.get("version") or 1) < 2 and prefix + "scale" in state_dict:
            state_dict[prefix + "scale"] = state_dict[prefix + "scale"].square()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class SavedOtherwise(nn.Module):
    """A parameter that has another name in the state, by a hook before loading and one after saving."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(SIZE))
        self.register_state_dict_post_hook(self._rename)
        self.register_load_state_dict_pre_hook(self._rename_back)

    def forward(self, h):
        return h - self.shift

    @staticmethod
    def _rename(_module, state, prefix, _metadata):
        state[prefix + "offset"] = state.pop(prefix + "shift")

    @staticmethod
    def _rename_back(_module, state, prefix, *_unused):
        if prefix + "offset" in state:
            state[prefix + "shift"] = state.pop(prefix + "offset")


class Named(nn.Module):
    """A module under a name of choice."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, inner)

    def forward(self, h):
        return self._modules[self.name](h)


class Cast(nn.Module):
    """A module of another dtype."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner.to(dtype), dtype

    def forward(self, h):
        return self.inner(h.to(self.dtype)).to(h.dtype)


class Normalized(nn.Module):
    """Batch normalization of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(SIZE)

    def forward(self, h):
        return self.norm(h[0]).unsqueeze(0)


class Gaps(nn.Module):
    """Parameters that are parts of larger memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(SIZE, 2 * SIZE) * 0.1)[:, ::2])
        self.bias = nn.Parameter(torch.randn(3, SIZE)[1])

    def forward(self, h):
        return h @ self.weight + self.bias


def build(seed: int, *, in_other_memory: bool = True) -> Chain:
    """The model of a seed: a drawn chain, with a few more pieces, and then changed in some ways.

    `in_other_memory`: whether a buffer may lie in the memory of a parameter, and a parameter have gaps in its memory.
    """
    case = dataclasses.replace(draw(seed), size=SIZE, options={"find_unused_parameters": True})
    model = case.build()
    dice = random.Random(seed + 10**6)
    more: list[Callable[[], nn.Module]] = [
        lambda: Counting(dice.choice(["dict", "tensor", "none", "tensors"])),
        Versioned,
        SavedOtherwise,
        Normalized,
        Gaps,
        lambda: parametrizations.weight_norm(nn.Linear(SIZE, SIZE)),
        lambda: Column(SIZE),
    ]
    for make in dice.choices(more, k=dice.randint(1, 4)):
        model.pieces.insert(dice.randint(0, len(model.pieces)), make())
    for change in dice.choices(CHANGES, k=dice.randint(2, 6)):
        change(dice, model)
    if not in_other_memory:
        for module in model.modules():
            module._buffers.pop("view", None)
            if isinstance(module, Gaps):
                module.weight.data = module.weight.data.contiguous()
    return model


def _holders(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in model.modules():
        if not hasattr(module, "parametrizations"):
            yield from ((module, name, p) for name, p in module._parameters.items() if p is not None)


def _tie(dice: random.Random, model: Chain) -> None:
    holders = list(_holders(model))
    pairs = [
        (a, b)
        for a in holders
        for b in holders
        if a[2] is not b[2] and (a[2].shape, a[2].dtype) == (b[2].shape, b[2].dtype)
    ]
    if pairs:
        (_, _, kept), (module, name, _) = dice.choice(pairs)
        setattr(module, name, kept)


def _use_twice(dice: random.Random, model: Chain) -> None:
    model.pieces.append(dice.choice(list(model.pieces)))


def _name_twice(dice: random.Random, model: Chain) -> None:
    free = [name for name in NAMES if not hasattr(model, name)]
    module = dice.choice([m for m in model.modules() if m is not model and model not in m.modules()])
    model.add_module(dice.choice(free), module)


def _rename(dice: random.Random, model: Chain) -> None:
    at = dice.randrange(len(model.pieces))
    model.pieces[at] = Named(dice.choice(NAMES), model.pieces[at])


def _cast(dice: random.Random, model: Chain) -> None:
    at = dice.randrange(len(model.pieces))
    shared = {id(p) for other in model.children() for p in other.parameters() if other is not model.pieces}
    own = model.pieces[at]
    elsewhere = {id(p) for piece in model.pieces if piece is not own for p in piece.parameters()} | shared
    cast = any(isinstance(module, Cast) for module in own.modules())
    if not cast and not any(id(p) in elsewhere for p in own.parameters()) and list(model.pieces).count(own) == 1:
        model.pieces[at] = Cast(own, dice.choice([torch.float64, torch.bfloat16]))


def _freeze(dice: random.Random, model: Chain) -> None:
    for p in dice.sample(list(model.pieces.parameters()), k=min(2, len(list(model.pieces.parameters())))):
        p.requires_grad_(False)


def _add_buffers(dice: random.Random, model: Chain) -> None:
    module = dice.choice([m for m in model.modules() if not hasattr(m, "parametrizations")])
    pool: list[Tensor] = []
    for name in dice.sample(NAMES, k=dice.randint(1, 4)):
        if not hasattr(module, name):
            buffer = random_tensor(dice, pool).detach()
            module.register_buffer(name, buffer, persistent=dice.random() < 0.7)


def _add_frozen(dice: random.Random, model: Chain) -> None:
    name = dice.choice(NAMES)
    if not hasattr(model, name):
        tensor = random_tensor(dice, []).detach()
        model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def _add_view_of_parameter(dice: random.Random, model: Chain) -> None:
    p = dice.choice(list(model.parameters()))
    if not hasattr(model, "view"):
        model.register_buffer("view", p.detach())


CHANGES = (_tie, _use_twice, _name_twice, _rename, _cast, _freeze, _add_buffers, _add_frozen, _add_view_of_parameter)


def scramble(model: Chain, *, extra_state: bool = False) -> Chain:
    """Give all parameters and buffers other values; `extra_state`: and what is no tensor, too."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.randint(0, 2, tensor.shape, generator=generator))
    for module in model.modules():
        if isinstance(module, Counting) and extra_state:
            module.calls = -1
    return model


def batch(seed: int, step: int) -> Tensor:
    """The rows that the model is given in a step, on every rank."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return torch.randint(0, SIZE + 3, (1, SIZE), generator=generator)
