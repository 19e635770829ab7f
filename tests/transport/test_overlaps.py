"""Tensors that share memory are found exactly, whatever their layout: beside sets of the addresses of all elements."""

import itertools
import random

import torch

from phalanx._comm.transport.overlaps import find_shared


def _addresses(tensor):
    width = tensor.element_size()
    steps = [
        range(0, n * s * width, s * width) if s else [0] * n for n, s in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    starts = [tensor.data_ptr() + sum(place) for place in itertools.product(*steps)]
    return [start + byte for start in starts for byte in range(width)]


def _lies_apart_from_itself(tensor):
    addresses = _addresses(tensor)
    return len(addresses) == len(set(addresses))


def _any_view(choose, memory):
    """Return a slice with steps of a tensor of two or three dimensions, perhaps permuted; or any strides at all."""
    if choose.random() < 0.3:
        shape = [choose.randint(0, 4) for _ in range(choose.randint(0, 3))]
        strides = [choose.randint(1, 9) for _ in shape]
        return memory.as_strided(shape, strides, choose.randint(0, 30))
    shape = choose.choice([(12, 12), (4, 6, 6), (2, 3, 4, 6)])
    view = memory[:144].view(shape)
    view = view.permute(choose.sample(range(len(shape)), len(shape)))
    for dim, size in enumerate(view.shape):
        begin = choose.randrange(max(size, 1))
        step = choose.choice([1, 1, 1, 2, 3])
        view = view[(slice(None),) * dim + (slice(begin, choose.randint(min(begin + 1, size), size), step),)]
    return view


def test_whether_any_two_views_share_an_element_is_known_exactly():
    choose = random.Random(7)
    seen = {True: 0, False: 0}
    for _ in range(3000):
        memory = torch.zeros(200, dtype=choose.choice([torch.uint8, torch.float32, torch.complex128]))
        views = [_any_view(choose, memory) for _ in range(choose.randint(1, 5))]
        views = [view for view in views if _lies_apart_from_itself(view)]
        sets = [set(_addresses(view)) for view in views]
        pairs = {pair for pair in itertools.combinations(range(len(sets)), 2) if sets[pair[0]] & sets[pair[1]]}
        found = find_shared(views)
        assert (found is not None) == bool(pairs), [(v.shape, v.stride(), v.storage_offset()) for v in views]
        assert found is None or tuple(sorted(found)) in pairs
        seen[bool(pairs)] += 1
    assert min(seen.values()) > 500


def test_parts_along_any_dimension_lie_apart_and_no_element_is_marked(monkeypatch):
    """Each rank's part of a matrix's columns begins before the others' have ended, in every usual program."""
    monkeypatch.setattr("phalanx._comm.transport.overlaps._find_marked", None)
    for shape in [(12,), (5, 12), (12, 12, 3), (2, 12, 12, 2)]:
        whole = torch.zeros(shape)
        for order in itertools.permutations(range(len(shape))):
            view = whole.permute(order)
            for dim, size in enumerate(view.shape):
                for parts in (view.unbind(dim), view.split(1, dim), view.chunk(5, dim), view.tensor_split(7, dim)):
                    assert find_shared(parts) is None
                assert find_shared([view.select(dim, at) for at in range(size)]) is None
                assert find_shared([view.narrow(dim, 0, size), view.select(dim, size - 1)]) == (0, 1)


def test_parts_of_several_tensors_and_empty_ones_lie_apart():
    one, other = torch.zeros(6, 8), torch.zeros(6, 8)
    empty = one[:0]
    assert find_shared([*one.chunk(4, 1), *other.chunk(4, 1), empty, empty]) is None
    assert find_shared([*one.chunk(4, 1), *other.chunk(4, 1), empty, other[2:3, 5:6]]) == (6, 9)
