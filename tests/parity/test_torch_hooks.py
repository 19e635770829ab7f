"""Hooks that users register with a group are called at our groups' operations as at Gloo's (torch 2.14 and on)."""

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from torch._C import _distributed_c10d as c10d

from phalanx.testing import run_ranks

pytestmark = [
    pytest.mark.skipif(not hasattr(c10d, "NanCheckHook"), reason="before torch 2.14 groups have no hooks"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
]


def _operations(rank, world_size):
    """Every operation that torch dispatches, and what came of each."""
    n = world_size
    x = torch.arange(4.0) + rank
    parts, whole = [torch.empty(4) for _ in range(n)], torch.empty(4 * n)
    results = []
    dist.all_reduce(x)
    results.append(x.clone())
    dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True).wait()
    dist.broadcast(x, 1)
    y = x.clone()  # which Gloo leaves in disorder elsewhere than on the root
    dist.reduce(y, 0)
    results.append(y if rank == 0 else x)
    dist.all_gather(parts, x)
    dist.all_gather_into_tensor(whole, x)
    results += [x.clone(), *parts, whole.clone()]
    dist.gather(x, parts if rank == 1 else None, 1)
    dist.scatter(x, parts if rank == 1 else None, 1)
    dist.reduce_scatter(x, parts)
    results += [x.clone(), *parts]
    dist.reduce_scatter_tensor(x, whole)
    dist.all_to_all_single(whole, torch.cat([x + r for r in range(n)]))
    dist.barrier()
    results += [x.clone(), whole.clone()]
    if rank == 0:
        dist.send(x, 1, tag=3)
    elif rank == 1:
        assert dist.recv(x, tag=3) == 0
        results.append(x.clone())
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert work.is_completed()
    results.append(x.clone())
    return [r.tolist() for r in results]


def _hooked(rank, world_size, backend):
    seen, group = [], dist.group.WORLD

    def before(call):
        shapes = [list(t.shape) for t in (*call.input_tensors, *call.output_tensors)]
        seen.append(("before", call.name.name, call.async_op, call.root, call.op_id, shapes))

    def after(call):
        seen.append(("after", call.name.name, call.async_op, call.op_id, call.work is not None))

    plain = type(group)
    group.register_pre_hook(11, before)
    group.register_post_hook(12, after)
    results = _operations(rank, world_size)
    group.unregister_pre_hook(11)
    group.unregister_post_hook(12)
    num_seen = len(seen)
    dist.barrier()
    assert (len(seen), type(group)) == (num_seen, plain)
    first = min(entry[4] for entry in seen if entry[0] == "before")
    numbered = [(*e[:4], e[4] - first, *e[5:]) if e[0] == "before" else (*e[:3], e[3] - first, e[4]) for e in seen]
    return numbered, results


@pytest.mark.parametrize("world_size", [2, 3])
def test_hooks_hear_of_each_operation_what_gloos_hear(world_size):
    theirs, ours = (run_ranks(_hooked, world_size, name, backend=name) for name in ("gloo", "phalanx"))
    for (gloos_calls, gloos), (our_calls, results) in zip(theirs, ours, strict=True):
        assert our_calls == gloos_calls
        assert results == gloos
        assert len(our_calls) >= 2 * 13


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_nan_is_found_before_it_is_sent(backend, monkeypatch):
    """torch 2.15 attaches the check itself when TORCH_DIST_NAN_CHECK=1; before it has to be attached."""
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")

    def body(rank, world_size):
        if not hasattr(c10d, "HealthCheckHook"):
            c10d.NanCheckHook.attach(dist.group.WORLD)
        sub = dist.new_group([0, 1])
        if not hasattr(c10d, "HealthCheckHook"):
            c10d.NanCheckHook.attach(sub)
        good = torch.ones(3)
        dist.all_reduce(good)
        bad = torch.tensor([1.0, float("nan")])
        messages = []
        for group in (dist.group.WORLD, sub):
            with pytest.raises(RuntimeError) as caught:
                dist.all_reduce(bad, group=group)
            messages.append(str(caught.value).partition("\n")[0])
        dist.all_reduce(good)
        received = torch.full((2,), float("nan"))
        dist.broadcast(torch.ones(2) if rank == 0 else received, 0)  # which only the source's check reads
        return messages, good.tolist(), received.tolist() if rank else [1.0, 1.0]

    for messages, good, received in run_ranks(body, 2, backend=backend):
        assert all("NaN" in message for message in messages), messages
        assert (good, received) == ([4.0] * 3, [1.0, 1.0])


@on_ranks(2)
def test_errors_keep_their_class_and_words_under_a_hook(rank):
    from phalanx.errors import MismatchError

    group = dist.group.WORLD
    messages = []
    for hooked in (False, True):
        sub = dist.new_group([0, 1])
        if hooked:
            sub.register_pre_hook(1, lambda call: None)
        with pytest.raises(MismatchError) as caught:
            dist.all_reduce(torch.ones(2 + rank), group=sub)
        messages.append(str(caught.value).replace(repr(sub.group_name), "NAME").partition(" at ")[0])
    _ = group.size()
    assert messages[0] == messages[1]
