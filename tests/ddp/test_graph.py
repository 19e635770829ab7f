import functools
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from phalanx.ddp.graph import MOST_OBJECTS, find_reach, find_tensors, tensors_in


@dataclass
class Output:
    logits: torch.Tensor
    extra: dict


def test_tensors_are_found_in_any_nesting():
    a, b, c, d = (torch.zeros(1) for _ in range(4))
    found = list(tensors_in({"x": [a, (b, "text", 3)], "y": Output(c, {"z": {"deep": [d]}}), "n": None}))
    assert [id(tensor) for tensor in found] == [id(a), id(b), id(c), id(d)]


def test_a_class_of_dataclass_is_not_an_output():
    assert list(tensors_in(Output)) == []


def test_reach_holds_the_leaves_that_outputs_depend_on():
    used, unused = nn.Linear(2, 2), nn.Linear(2, 2)
    reach = find_reach([used(torch.ones(1, 2)), unused.bias.detach(), used.weight])
    assert reach.leaves == {id(used.weight), id(used.bias)}
    assert reach.complete


def test_an_output_that_is_a_parameter_reaches_itself():
    parameter = nn.Parameter(torch.ones(1))
    assert find_reach([parameter]).leaves == {id(parameter)}


def test_reentrant_checkpoints_hide_what_lies_behind():
    layer, inputs = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    hidden = find_reach([checkpoint(layer, inputs, use_reentrant=True)])
    assert not hidden.complete
    assert id(layer.weight) not in hidden.leaves
    seen = find_reach([checkpoint(layer, inputs, use_reentrant=False)])
    assert seen.complete
    assert id(layer.weight) in seen.leaves


def test_reaches_join():
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    both = find_reach([a(torch.ones(1, 1))]) | find_reach([b(torch.ones(1, 1))])
    assert {id(a.weight), id(b.bias)} <= both.leaves


@dataclass
class Node:
    content: object
    parent: "Node | None" = None
    unset: object = field(init=False)


def test_structures_that_contain_themselves_are_walked_once():
    tensor = torch.zeros(1)
    mapping = {"tensor": tensor}
    mapping["itself"] = [mapping]
    child = Node(tensor, Node(tensor))
    child.parent.parent = child
    assert find_tensors([mapping, child]) == ([tensor] * 3, True)


def test_no_code_of_the_users_runs():
    class Lazy(dict):
        def values(self):
            raise RuntimeError("loads everything")

    class Counted(list):
        __iter__ = None

    class Classless:
        __class__ = property(lambda self: 1 / 0)

    @dataclass
    class Broken:
        content: object

    Broken.content = property(lambda self: 1 / 0)
    tensor = torch.zeros(1)
    assert find_tensors(Lazy(a=Counted([object.__new__(Broken), Classless(), tensor]))) == ([tensor], True)


def test_the_walk_ends_after_some_objects():
    tensor = torch.zeros(1)
    assert find_tensors([tensor, 1, 2, tensor], most=4) == ([tensor], False)
    assert find_tensors([tensor, 1, 2, tensor], most=5) == ([tensor, tensor], True)
    deep = functools.reduce(lambda inner, _: [inner], range(100_000), tensor)
    assert tensors_in(deep) == []
    assert tensors_in([list(range(MOST_OBJECTS)), tensor]) == []
