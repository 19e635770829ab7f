"""Placed models on devices that this machine has not: is every value brought to where it is needed?

PyTorch has fake tensors with a device and no memory, whose operations refuse operands of two devices as real ones do. A
device type "unit" is registered with PyTorch, so that autograd takes its devices for real ones. Its engine knows one of
the type: forward goes over four of them, forward and backward over one and the CPU.
"""

import functools
import itertools

import torch
from tests.nn.placed_models import MODELS, make, values
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from phalanx.nn.placement import module as place_module
from phalanx.nn.placement import transfers
from phalanx.nn.placement.devices import Room
from phalanx.nn.placement.plan import decide_placement
from phalanx.nn.placement.together import count_once, find_homes
from phalanx.partition import list_layers, measure_layers


def put(model, layers, placement):
    """Every tensor of the model on the device of its layer; shared ones stay shared."""
    devices = place_module._devices_of_tensors(layers, placement)
    made = {}
    for part in model.modules():
        for tensors in (part._parameters, part._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        new = torch.empty(tensor.shape, dtype=tensor.dtype, device=devices[id(tensor)])
                        made[id(tensor)] = nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new, tensor
                    tensors[key] = made[id(tensor)][0]


def cuts_of(count, parts, most):
    cuts = list(itertools.combinations(range(1, count), parts - 1))
    for cut in cuts[:: max(1, len(cuts) // most)]:
        yield [end - begin for begin, end in zip((0, *cut), (*cut, count), strict=True)]


@functools.cache
def measured(name):
    model, example = make(name)
    layers = list_layers(model)
    return count_once(layers, measure_layers(layers, example, rounds=1))


def run(name, devices, counts, output, *, backward):
    """One model, cut so, once."""
    model, example = make(name)
    layers = list_layers(model)
    costs = measured(name)
    rooms = [Room(torch.device(device)) for device in devices]
    placement = decide_placement(costs, [1] * len(costs), find_homes(layers, costs), {}, rooms, counts)
    output_device = None if output is None else torch.device(output)
    with FakeTensorMode():
        inputs = [torch.empty(x.shape, dtype=x.dtype, device=devices[0]) for x in example]
        put(model, layers, placement)
        place_module.attach(model, layers, placement, ((), (), output_device))
        results = values(model(*inputs))
        if output_device is not None:
            assert {value.device for value in results} == {output_device}
        if backward:
            with torch.autograd.set_multithreading_enabled(False):  # fake tensors bear one thread
                sum(value.sum().to(devices[0]) for value in results).backward()
            for key, parameter in model.named_parameters():
                if not key.startswith("unused"):
                    assert parameter.grad.device == parameter.device, (name, devices, counts, key)


def is_refused(case):
    """Whether an operation finds its operands on two devices."""
    try:
        run(*case[:3], None, backward=False)
    except RuntimeError as error:
        return "device" in str(error)
    return False


def num_layers(name):
    return len(measured(name))


def main():
    _setup_privateuseone_for_python_backend("unit")
    units = [f"unit:{i}" for i in range(4)]
    forward = [
        (name, units[:parts], counts, output)
        for name in MODELS
        for parts in (2, 3, 4)
        for counts in cuts_of(num_layers(name), parts, 2)
        for output in ((None, "unit:0") if parts == 2 else (None,))
    ]
    both = [
        (name, devices, counts, None)
        for name in MODELS
        for devices in (["unit:0", "cpu"], ["cpu", "unit:0", "cpu"])
        for counts in cuts_of(num_layers(name), len(devices), 2)
    ]
    for case in forward:
        run(*case, backward=False)
    for case in both:
        run(*case, backward=True)
    # without transfers almost all are refused (not where the next device has no weights): else this would show nothing
    transfers.transfer.__code__ = (lambda value, device, source: value).__code__
    refused = sum(is_refused(case) for case in forward[::3])
    print(f"{len(forward)} cuts forward, {len(both)} forward and backward; without transfers {refused} are refused")


if __name__ == "__main__":
    main()
