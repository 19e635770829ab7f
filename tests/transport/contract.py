"""What every transport keeps (`phalanx._comm.transport.base`), as checks that each rank of a group makes by itself.

All ranks know what all bring, so each computes the result alone, in one process, and compares. The numbers are small
and whole: every order of addition gives the same bits. Each check of a failure takes a group of its own.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx.errors import ClosedError, DeadlineError, MismatchError, PeerLostError

OP = dist.ReduceOp
SIZES = (0, 1, 7, 1031)
LARGE = 70_001
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (
    torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64,
)  # fmt: skip
ONLY_MOVED = (torch.float8_e4m3fn, torch.float8_e5m2)
ARITHMETIC = (OP.SUM, OP.AVG, OP.PRODUCT, OP.MIN, OP.MAX)
BITWISE = (OP.BAND, OP.BOR, OP.BXOR)


def brings(rank, count, dtype, salt=0, op=None):
    """Return the input of `rank`: numbers from 1 to 3, or the type's largest for a mean of integers; both bools."""
    numbers = (torch.arange(count) * 7 + rank * 5 + salt) % 3 + (dtype != torch.bool)
    if op == OP.AVG and dtype in INTEGERS and dtype.itemsize < 8:
        numbers += torch.iinfo(dtype).max - 3
    return (numbers % 2 == 0) if dtype == torch.bool else numbers.to(dtype)


def wide(tensor):
    """In a type that torch can compute with; the 8-bit floats as their bytes."""
    if tensor.dtype in ONLY_MOVED:
        return tensor.view(torch.uint8)
    return tensor if tensor.dtype.is_floating_point or tensor.dtype.is_complex else tensor.to(torch.int64)


def combined(op, parts):
    """The reduction of `parts`, in one process."""
    dtype, stack = parts[0].dtype, torch.stack([wide(part) for part in parts])
    if op == OP.AVG:
        total = stack.sum(0) if dtype.is_complex else stack.to(torch.float64).sum(0)
        return (total / len(parts)).to(dtype)
    if op in BITWISE or dtype == torch.bool:
        word = {
            OP.BAND: torch.bitwise_and, OP.PRODUCT: torch.bitwise_and, OP.MIN: torch.bitwise_and,
            OP.BOR: torch.bitwise_or, OP.SUM: torch.bitwise_or, OP.MAX: torch.bitwise_or, OP.BXOR: torch.bitwise_xor,
        }[op]  # fmt: skip
        for part in stack[1:]:
            stack[0] = word(stack[0], part)
        return stack[0].to(dtype)
    whole = {OP.SUM: stack.sum, OP.PRODUCT: stack.prod, OP.MIN: stack.amin, OP.MAX: stack.amax}[op](0)
    return whole.to(dtype)


def assert_same(got, want, *what):
    """Equal, bit for bit; a mean of floats to the last place but one, for it may divide or multiply."""
    assert got.dtype == want.dtype, what
    if OP.AVG in what and (got.dtype.is_floating_point or got.dtype.is_complex):
        torch.testing.assert_close(got, want)
    else:
        assert torch.equal(wide(got), wide(want)), (*what, got, want)


def reductions(rank, world_size):
    """all_reduce, reduce and reduce_scatter: every reduction that a type has, every type, odd sizes."""
    pairs = [(op, dtype) for dtype in (*FLOATS, *INTEGERS) for op in ARITHMETIC]
    pairs += [(op, dtype) for dtype in COMPLEX for op in (OP.SUM, OP.AVG)]
    pairs += [(op, dtype) for dtype in (*INTEGERS, torch.bool) for op in BITWISE]
    pairs += [(op, torch.bool) for op in ARITHMETIC if op != OP.AVG]
    for number, (op, dtype) in enumerate(pairs):
        for count in (SIZES[1 + number % 3], *((0, LARGE) if dtype == torch.float32 and op == OP.SUM else ())):
            parts = [brings(r, count, dtype, op=op) for r in range(world_size)]
            want = combined(op, parts)
            mine = parts[rank].clone()
            dist.all_reduce(mine, op)
            assert_same(mine, want, "all_reduce", op, dtype, count)
        mine, root = parts[rank].clone(), number % world_size
        dist.reduce(mine, root, op)
        assert_same(mine, want if rank == root else parts[rank], "reduce", op, dtype, count)
        rows = [
            [brings(r, part + number % 2, dtype, part, op) for part in range(world_size)] for r in range(world_size)
        ]
        output = torch.empty(rank + number % 2, dtype=dtype)
        dist.reduce_scatter(output, rows[rank], op)
        assert_same(output, combined(op, [row[rank] for row in rows]), "reduce_scatter", op, dtype)
        whole = [brings(r, 3 * world_size, dtype, op=op) for r in range(world_size)]
        output = torch.empty(3, dtype=dtype)
        dist.reduce_scatter_single(output, whole[rank], op)
        assert_same(output, combined(op, whole)[3 * rank : 3 * rank + 3], "reduce_scatter_single", op, dtype)
    _odd_tensors(rank, world_size)


def _odd_tensors(rank, world_size):
    """Strides, conjugates, a factor, several tensors in one call, sparse ones."""
    parts = [brings(r, 12, torch.float32).view(3, 4).t() for r in range(world_size)]
    mine = parts[rank].clone(memory_format=torch.preserve_format)
    assert not mine.is_contiguous() or mine.shape != (4, 3)
    dist.all_reduce(mine)
    assert_same(mine, combined(OP.SUM, parts), "transposed")
    values = [torch.complex(brings(r, 5, torch.float32), brings(r, 5, torch.float32, 1)) for r in range(world_size)]
    mine = values[rank].clone().conj()
    dist.group.WORLD.allreduce([mine]).wait()  # torch's function would view it as pairs of real numbers
    assert_same(mine.resolve_conj(), combined(OP.SUM, values).conj().resolve_conj(), "conjugate")
    mine = values[rank].clone()
    dist.group.WORLD.allreduce([mine], OP.PRODUCT).wait()
    assert_same(mine, combined(OP.PRODUCT, values), "product of complex numbers")
    mine = brings(rank, 5, torch.float32)
    dist.all_reduce(mine, dist._make_nccl_premul_sum(2.0))
    assert_same(mine, 2 * combined(OP.SUM, [brings(r, 5, torch.float32) for r in range(world_size)]), "factor")
    several = [brings(rank, n, torch.float64) for n in (1, 4, 9)]
    dist.group.WORLD.allreduce_coalesced(several).wait()
    for n, got in zip((1, 4, 9), several, strict=True):
        assert_same(got, combined(OP.SUM, [brings(r, n, torch.float64) for r in range(world_size)]), "coalesced")
    for entries in (1, 50, 3000):
        rows = [torch.arange(r, entries + r) for r in range(world_size)]
        tables = [
            torch.sparse_coo_tensor(row[None], brings(r, entries, torch.float32), (4000,), check_invariants=True)
            for r, row in enumerate(rows)
        ]
        mine = tables[rank].clone()
        dist.all_reduce(mine)
        assert_same(mine.to_dense(), combined(OP.SUM, [table.to_dense() for table in tables]), "sparse", entries)


def moves(rank, world_size):
    """broadcast, gather, all_gather, scatter and all_to_all, in every type, of odd and of uneven sizes."""
    for dtype in (*FLOATS, *COMPLEX, *INTEGERS, torch.bool, *ONLY_MOVED):
        for count in (0, 7, *((LARGE,) if dtype == torch.int32 else ())):
            parts = [brings(r, count, dtype) for r in range(world_size)]
            root = count % world_size
            mine = parts[rank].clone()
            dist.broadcast(mine, root)
            assert_same(mine, parts[root], "broadcast", dtype, count)
            outputs = [torch.empty(count, dtype=dtype) for _ in range(world_size)]
            dist.all_gather(outputs, parts[rank])
            _assert_all(outputs, parts, "all_gather", dtype, count)
            whole = torch.empty(count * world_size, dtype=dtype)
            dist.all_gather_single(whole, parts[rank])
            _assert_all(whole.split(count) if count else outputs, parts, "all_gather_single", dtype, count)
            outputs = [torch.empty(count, dtype=dtype) for _ in range(world_size)] if rank == root else None
            dist.gather(parts[rank], outputs, root)
            _assert_all(outputs or [], parts, "gather", dtype, count)
            output = torch.empty(count, dtype=dtype)
            dist.scatter(output, [p.clone() for p in parts] if rank == root else None, root)
            assert_same(output, parts[rank], "scatter", dtype, count)
        uneven = [brings(r, 3 * r, dtype) for r in range(world_size)]
        outputs = [torch.empty(3 * r, dtype=dtype) for r in range(world_size)]
        dist.all_gather(outputs, uneven[rank])
        _assert_all(outputs, uneven, "all_gather of uneven sizes", dtype)
        rows = [[brings(r, (r + part) % 3, dtype, part) for part in range(world_size)] for r in range(world_size)]
        outputs = [torch.empty((r + rank) % 3, dtype=dtype) for r in range(world_size)]
        dist.all_to_all(outputs, rows[rank])
        _assert_all(outputs, [row[rank] for row in rows], "all_to_all", dtype)
        equal = [brings(r, 2 * world_size, dtype) for r in range(world_size)]
        output = torch.empty(2 * world_size, dtype=dtype)
        dist.all_to_all_single(output, equal[rank])
        _assert_all(output.split(2), [part[2 * rank : 2 * rank + 2] for part in equal], "all_to_all_single", dtype)
    sent, awaited = [rank + part for part in range(world_size)], [r + rank for r in range(world_size)]
    tables = [
        brings(r, 2 * sum(r + part for part in range(world_size)), torch.int64).view(-1, 2) for r in range(world_size)
    ]
    output = torch.empty(sum(awaited), 2, dtype=torch.int64)
    dist.all_to_all_single(output, tables[rank], awaited, sent)
    begins = [sum(r + part for part in range(rank)) for r in range(world_size)]
    want = [table[begin : begin + n] for table, begin, n in zip(tables, begins, awaited, strict=True)]
    assert_same(output, torch.cat(want), "all_to_all_single with splits")
    dist.barrier()


def _assert_all(got, want, *what):
    for one, other in zip(got, want, strict=bool(got)):
        assert_same(one, other, *what)


def messages(rank, world_size):
    """Order per pair and tag, tags in any order, messages from anybody, empty and large ones."""
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    for count in (0, 1, LARGE):
        sends = [dist.isend(brings(rank, count, torch.float32, tag), after, tag=tag) for tag in range(4)]
        for tag in (2, 0, 3, 1):  # as sent only per tag
            got = torch.empty(count)
            dist.recv(got, before, tag=tag)
            assert_same(got, brings(before, count, torch.float32, tag), "tags", count, tag)
        for send in sends:
            send.wait()
    sends = [dist.isend(torch.tensor([rank, i]), 0, tag=9) for i in range(3)] if rank else []
    if rank == 0:
        came = [torch.empty(2, dtype=torch.int64) for _ in range(3 * (world_size - 1))]
        sources = [dist.recv(one, tag=9) for one in came]
        assert sources == [int(one[0]) for one in came]
        for r in range(1, world_size):
            assert [int(one[1]) for one in came if one[0] == r] == [0, 1, 2]
    for send in sends:
        send.wait()


def order(rank, world_size):
    """Asynchronous calls are carried out in the order in which they were made, in two groups at a time."""
    groups = [dist.group.WORLD, dist.new_group()]
    tensor, works = torch.ones(1), []
    for i, group in itertools.product(range(12), groups):
        works.append(dist.all_reduce(torch.full((i,), float(rank)), group=group, async_op=True))
        if group is groups[0]:
            works.append(dist.all_reduce(tensor, async_op=True))
            works.append(dist.broadcast(tensor, src=i % world_size, async_op=True))
        if i == 5:
            dist.barrier(group)
    values = [work.get_future() for work in works]
    for work, value in zip(works, values, strict=True):
        work.wait()
        value.wait()
    assert tensor.item() == float(world_size**12)
    dist.destroy_process_group(groups[1])


# -- failures ----------------------------------------------------------------------------------------------------------


def _raised(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def _group(seconds=30.0):
    group = dist.new_group()
    dist.barrier(group)
    group.set_timeout(timedelta(seconds=seconds))  # for what is to fail, not for what leads to it
    return group


def mismatches(rank, world_size):
    """Ranks that call different things all hear what each called, and no tensor has changed."""
    odd = rank == world_size - 1
    ones = torch.ones(4)

    def cases(group):
        yield "all_reduce", "barrier", lambda: dist.barrier(group) if odd else dist.all_reduce(ones, group=group)
        yield "float32", "float64", lambda: dist.all_reduce(ones.double() if odd else ones, group=group)
        yield "(4,)", "(2, 3)", lambda: dist.all_reduce(torch.ones(2, 3) if odd else ones, group=group)
        yield "SUM", "MAX", lambda: dist.all_reduce(ones, OP.MAX if odd else OP.SUM, group)
        yield "src=0", "src=1", lambda: dist.broadcast(ones, 1 if odd else 0, group=group)
        yield (
            "",
            "",
            lambda: dist.all_gather([torch.ones(4 + odd) for _ in range(world_size)], torch.ones(4 + odd), group),
        )

    for number in range(6):
        group = _group()
        said, other, call = list(cases(group))[number]
        error = _raised(MismatchError, call)
        calls = list(error.calls.values())
        assert sorted(error.calls) == list(range(world_size)), error
        assert all(said in text for text in calls[:-1]), error
        assert other in calls[-1], error
        assert "contract.py:" in calls[0], error
        assert torch.equal(ones, torch.ones(4))
        _raised(MismatchError, lambda group=group: dist.barrier(group))  # the group is over
        dist.destroy_process_group(group)
    group = _group()
    sizes = [2 if part == 1 and rank == 0 else 1 for part in range(world_size)]
    output = torch.zeros(world_size)
    error = _raised(
        MismatchError,
        lambda: dist.all_to_all_single(output, torch.ones(sum(sizes)), [1] * world_size, sizes, group=group),
    )
    assert {0, 1} <= error.calls.keys(), error
    assert not output.any()
    dist.destroy_process_group(group)
    group = _group()
    if rank == 0:
        work = dist.isend(torch.ones(5), 1, group=group)
        try:
            work.wait()  # told, or gone into a buffer
        except MismatchError:
            pass
    elif rank == 1:
        got = torch.zeros(3)
        error = _raised(MismatchError, lambda: dist.recv(got, 0, group=group))
        assert {0, 1} == error.calls.keys(), error
        assert not got.any() or "may hold the beginning of it" in str(error), error
    dist.barrier()
    dist.destroy_process_group(group)


def late_and_lost(rank, world_size):
    """A rank that does not come, and one that leaves, are named on every other; after that the group is over."""
    last = world_size - 1
    group = _group(1.0)
    if rank != last:
        error = _raised(DeadlineError, lambda: dist.all_reduce(torch.ones(3), group=group))
        assert last in error.missing, error  # on a slow machine another may be late, too
        assert f"rank {last} (" in str(error).lower(), error
        _raised(DeadlineError, lambda: dist.barrier(group))
    dist.barrier()
    dist.destroy_process_group(group)
    group = _group(0.5)
    if rank == 0:
        error = _raised(DeadlineError, lambda: dist.recv(torch.ones(3), 1, group=group))
        assert error.missing == (1,), error
    dist.barrier()
    dist.destroy_process_group(group)
    group = _group()
    if rank == 0:
        dist.destroy_process_group(group)
        _raised(ClosedError, lambda: group.allreduce([torch.ones(3)]).wait())
    else:
        error = _raised(PeerLostError, lambda: dist.all_reduce(torch.ones(3), group=group))
        assert error.ranks == (0,), error
        assert "destroy_process_group" in str(error), error
        dist.destroy_process_group(group)
    dist.barrier()


def interrupted(rank, world_size):
    """Ctrl-C ends the wait of the rank that it reaches, and the others hear who was interrupted."""
    group = _group()
    if rank == 1:
        begun = group.transport.seq

        def press():
            while group.transport.seq == begun:
                pass
            os.kill(os.getpid(), signal.SIGUSR1)

        before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
        thread = threading.Thread(target=press)
        thread.start()
        _raised(KeyboardInterrupt, lambda: dist.barrier(group))
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    elif rank == 2:
        error = _raised(PeerLostError, lambda: dist.barrier(group))
        assert error.ranks == (1,), error
        assert "interrupted" in str(error), error
    dist.barrier()
    if rank == 0:  # who comes later hears it too
        error = _raised(PeerLostError, lambda: (dist.barrier(group), dist.barrier(group)))
        assert error.ranks == (1,), error
    dist.barrier()
    dist.destroy_process_group(group)


def killed(rank, world_size, kill):
    """A rank whose process is killed is named by all others, whatever they wait for; the last check of a job."""
    group = _group()
    last = world_size - 1
    dist.barrier()
    if rank == last:
        kill()
    error = _raised(PeerLostError, lambda: dist.all_reduce(torch.ones(3), group=group))
    assert error.ranks == (last,), error
    assert f"rank {last}" in str(error), error
    error = _raised(PeerLostError, lambda: dist.all_reduce(torch.ones(LARGE)))
    assert error.ranks == (last,), error


def whole_contract(rank, world_size):
    """All but the end of a process, in one group."""
    for check in (reductions, moves, messages, order, mismatches, late_and_lost, interrupted):
        check(rank, world_size)
    return True
