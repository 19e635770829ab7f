"""A batch of any make is moved whole, and stays what it was."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple

import torch
from torch.nn.utils.rnn import pack_sequence

from phalanx._comm.transport.tensors import move_batch

META = torch.device("meta")
Pair = namedtuple("Pair", "left right")


class Graph:
    """torch_geometric's Data is such a class."""

    def __init__(self, nodes):
        self.nodes = nodes

    def to(self, device):
        return Graph(self.nodes.to(device))


class Named(dict):
    """The keys are attributes, too, and there is something beside them; as HuggingFace's ModelOutput."""

    def __init__(self, *, note):
        super().__init__()
        self.note = note


class Boxes(list):
    image_size = (0, 0)


def test_tensors_move_in_every_container_and_the_containers_keep_their_classes():
    ones = torch.ones(2)
    named, boxes = Named(note="kept"), Boxes([ones, "label"])
    named["x"], boxes.image_size = ones, (4, 5)
    batch = {
        "list": [ones, (ones, 3)],
        "pair": Pair(ones, None),
        "ordered": OrderedDict(a=ones),
        "default": defaultdict(list, a=[ones]),
        "user": UserDict(a={"deep": ones}),
        "named": named,
        "boxes": boxes,
        "graph": Graph(ones),
        "packed": pack_sequence([ones]),
    }
    moved = move_batch(batch, META)
    tensors = [
        moved["list"][0],
        moved["list"][1][0],
        moved["pair"].left,
        moved["ordered"]["a"],
        moved["default"]["a"][0],
        moved["user"]["a"]["deep"],
        moved["named"]["x"],
        moved["boxes"][0],
        moved["graph"].nodes,
        moved["packed"].data,
    ]
    assert [one.device for one in tensors] == [META] * len(tensors)
    assert {name: type(one) for name, one in moved.items()} == {name: type(one) for name, one in batch.items()}
    assert (moved["default"].default_factory, moved["named"].note, moved["boxes"].image_size) == (list, "kept", (4, 5))
    assert (moved["list"][1][1], moved["pair"].right, moved["boxes"][1]) == (3, None, "label")
    assert ones is named["x"] is boxes[0] is batch["user"]["a"]["deep"], "the caller's containers have changed"
