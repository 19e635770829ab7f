"""Tensors of every dtype that torch has, however they lie in memory, arrive with the same bits."""

import random
import warnings
from collections.abc import Iterator

import pytest
import torch
from tests.rpc.workers import run_workers, same, worker

from phalanx import rpc

DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
QUANTIZED = [torch.qint8, torch.quint8, torch.qint32]  # no CPU makes the two smaller ones in this way
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers of their size."""
    plain = tensor.detach().resolve_neg()
    is_half = plain.is_conj() and plain.element_size() == 4  # which torch may not be able to turn into memory
    plain = plain.conj() if is_half else plain.resolve_conj()
    found = plain.view(INTEGERS[plain.element_size()]).contiguous()
    if is_half:  # the sign of the imaginary part
        found = found ^ -(1 << 31)
    return torch.view_as_real(found).view(torch.int64) if found.is_complex() else found


def layouts(dtype: torch.dtype, rng: random.Random) -> Iterator[torch.Tensor]:
    """Tensors of random bits that lie in memory in many ways."""

    def make(*shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        if dtype == torch.bool:
            return torch.tensor([rng.random() < 0.5 for _ in range(count)], dtype=torch.bool).view(shape)
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)

    yield make()
    yield make(0)
    yield make(3, 0, 2)
    yield make(rng.randint(1, 9))
    yield make(4, 5).t()
    yield make(2, 3, 4).permute(2, 0, 1)
    yield make(3, 1).expand(3, 4)
    yield make(6, 8)[::2, 1::3]
    yield make(40)[7:]
    yield make(1 << 17)  # these two through shared memory
    yield make(1 << 9, 1 << 8).t()
    if dtype.is_complex:
        yield make(5).conj()
        yield make(3, 4).t().conj()
        if dtype.itemsize > 4:
            yield make(5).conj().imag
    if dtype.is_floating_point or dtype.is_complex:
        yield torch.nn.Parameter(make(2, 3))
        yield make(2, 3).requires_grad_()
        yield make(3, 4).t().requires_grad_()


def check(found: torch.Tensor, sent: torch.Tensor, where: object) -> None:
    kinds = [(type(one), one.dtype, one.shape, one.requires_grad) for one in (found, sent)]
    assert kinds[0] == kinds[1], where
    if sent.is_quantized:
        assert torch.equal(found.int_repr(), sent.int_repr()), where
        assert (found.q_scale(), found.q_zero_point()) == (sent.q_scale(), sent.q_zero_point())
    else:
        assert torch.equal(bits(found), bits(sent)), where


def _all(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore", UserWarning)  # torch's, of quantized and half complex tensors
    rng = random.Random(3)
    with worker(rank, 2, folder):
        if rank:
            return
        for dtype in DTYPES:
            if str(dtype).startswith("torch.q"):
                continue
            for number, tensor in enumerate(layouts(dtype, rng)):
                for name in ("w1", "w0"):
                    check(rpc.rpc_sync(name, same, (tensor,)), tensor, (dtype, number, name))
        for dtype in QUANTIZED:
            tensor = torch.quantize_per_tensor(torch.linspace(-1, 1, 12).view(3, 4), 0.1, 2, dtype)
            check(rpc.rpc_sync("w1", same, (tensor,)), tensor, dtype)
        everything = [one for dtype in DTYPES if not str(dtype).startswith("torch.q") for one in layouts(dtype, rng)]
        found = rpc.rpc_sync("w1", same, (everything,))
        for one, sent in zip(found, everything, strict=True):
            check(one, sent, sent.dtype)


@pytest.mark.slow
def test_tensors_of_every_dtype_arrive_with_the_same_bits():
    """Tensors of float8, uint16 to uint64 and complex32 could not be sent: torch pickles none of them."""
    run_workers(_all, 2)
