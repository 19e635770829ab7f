"""Models with batch normalization, in one process and on ranks."""

import torch

CHANNELS = 3


def _batch(rows, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(rows, CHANNELS, *shape, generator=generator) * torch.tensor([1.0, 0.1, 30.0]).view(
        -1, *[1] * len(shape)
    )
    return (values + 0.5).to(dtype)


def _slopes(*shape, dtype=torch.float32):
    """What the loss has as gradients of the outputs."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(13), dtype=dtype)


def _randomized(layer):
    """Parameters and running statistics that no constructor gives, so that each is seen to be used."""
    generator = torch.Generator().manual_seed(11)
    for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
        if tensor is not None:
            with torch.no_grad():
                tensor.copy_(torch.rand(CHANNELS, generator=generator) + 0.5)
    return layer


def _steps(layer, inputs, slopes, num_steps=2):
    """Outputs, gradients and running statistics after some steps on the same batch."""
    outputs, gradients = [], []
    for _ in range(num_steps):
        x = inputs.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        y = layer(x)
        (y * slopes).sum().backward()
        outputs.append(y.detach())
        gradients.append(x.grad)
    return {
        "outputs": outputs,
        "input gradients": gradients,
        "parameter gradients": [parameter.grad for parameter in layer.parameters()],
        "state": layer.state_dict(),
    }


def _check(results, expected, sizes, **tolerance):
    for name in ("outputs", "input gradients"):
        for step, whole in enumerate(expected[name]):
            for result, part in zip(results, whole.split(sizes), strict=True):
                torch.testing.assert_close(result[name][step], part, **tolerance)
    for index, gradient in enumerate(expected["parameter gradients"]):
        total = sum(result["parameter gradients"][index] for result in results)
        torch.testing.assert_close(total, gradient, **tolerance)
    for result in results:
        assert list(result["state"]) == list(expected["state"])
        for key, tensor in expected["state"].items():
            torch.testing.assert_close(result["state"][key], tensor, **tolerance)
            assert torch.equal(result["state"][key], results[0]["state"][key]), f"{key} has other bits"
