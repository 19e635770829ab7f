"""Run the backward pass across remote calls, with the API of `torch.distributed.autograd`.

    with rpc.autograd.context() as context_id:
        y = rpc.rpc_sync("server", embed, (ids, w))
        rpc.autograd.backward(context_id, [loss(y)])
        gradients = rpc.autograd.get_gradients(context_id)  # of this worker's own tensors; no .grad changes

graph.py       the connections between the local graphs of workers
leaf_hooks.py  hooks of the nodes that would add to `.grad`
contexts.py    a context on one worker
passes.py      a backward pass on one worker, with a drawing
orders.py      the messages of a pass, in bytes
serve.py       the messages between workers, and the note of each call
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.profiler import record_function

from phalanx._base.torch_names import find
from phalanx.rpc.autograd.graph import reach
from phalanx.rpc.autograd.passes import BackwardError as BackwardError
from phalanx.rpc.autograd.serve import worker

_profiler_enabled: Any = find(
    "torch.autograd._profiler_enabled", loses="a profile does not show calls of phalanx.rpc", instead=bool
)

__all__ = ["BackwardError", "backward", "context", "get_gradients"]


@contextmanager
def context() -> Iterator[int]:
    """Record the graph of this thread's calls, and of the calls that they make; yield the context's id for `backward`.

    At the end all workers release the recorded graph and the gradients.

    Raises:
        RuntimeError: this thread is in a context already.
    """
    me = worker()
    inside = me.contexts.current
    if inside is not None:
        raise RuntimeError(f"Already have an autograd context id for this thread: {inside.id}")
    made = me.contexts.open()
    try:
        with me.contexts.enter(made):
            yield made.id
    finally:
        me.release(made.id)


def backward(context_id: int, roots: Sequence[Tensor], retain_graph: bool = False) -> None:
    """Run the backward pass from `roots` through all workers of the context, and gather gradients in the context.

    It returns when the pass has ended on all workers. Gradients accumulate over all passes of the context. Any worker
    of the context can call it, also several workers at the same time.

    Numerics: as in one process, but the gradients of a tensor with several uses may be added in another order.

    Raises:
        TypeError: an argument has the wrong type.
        RuntimeError: this worker has no such context, or a root is not a scalar, or has no graph.
        BackwardError: some worker's part raised; the message names the worker and the error.
        PeerLostError: a worker of the pass is lost. After this or `BackwardError` the gradients are undefined.
    """
    if not isinstance(context_id, int) or not isinstance(roots, list | tuple):
        raise TypeError(
            "backward(): incompatible function arguments: it takes context_id (int), roots (a list of tensors) and "
            f"retain_graph (bool), got {type(context_id).__name__} and {type(roots).__name__}"
        )
    me = worker()
    found = me.contexts.find(context_id)
    _check_roots(roots)
    reached = reach((root.grad_fn, root.output_nr) for root in roots)
    if not _profiler_enabled():
        me.backward(found, roots, reached, retain_graph)
        return
    with record_function("torch::distributed::autograd::backward"):  # as PyTorch calls it in its profiles
        me.backward(found, roots, reached, retain_graph)


def _check_roots(roots: Sequence[Tensor]) -> None:
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for number, root in enumerate(roots):
        if not isinstance(root, Tensor):
            raise TypeError(f"backward(): incompatible function arguments: root {number} is a {type(root).__name__}")
        if not root.requires_grad:
            raise RuntimeError(f"backward(): requires_grad not set on root {number}")
        if root.numel() != 1:
            raise RuntimeError(
                f"backward(): root {number} of shape {tuple(root.shape)} is not a scalar, all roots need to be scalar"
            )
        if root.grad_fn is None:
            raise RuntimeError(f"backward(): root {number} does not have a valid gradient function: it is a leaf")


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """Return the gradients that the context has gathered on this worker, by tensor.

    Raises:
        RuntimeError: there is no such context here.
    """
    found = worker().contexts.find(context_id)
    with found.lock:
        return dict(found.gradients)
