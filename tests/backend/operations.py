"""Every operation of several tensors, with the sizes of its inputs and outputs, for generated cases."""

from __future__ import annotations

import torch.distributed as dist

OP = dist.ReduceOp


def of_rank_1():
    """Return the options of a broadcast of the second tensor of rank 1."""
    opts = dist.BroadcastOptions()
    opts.rootRank = opts.rootTensor = 1
    return opts


def p_of(group):
    return group.size()


def n_of(outputs, group):
    return outputs[0].numel() // group.size()


# name -> (elements of the inputs, of the outputs, the call). A tensor that is both is an output.
OPERATIONS = {
    "all_reduce_coalesced": (lambda n, p: ([], [n, n, n]), lambda g, i, o: dist.all_reduce_coalesced(o)),
    "all_reduce_coalesced MAX": (lambda n, p: ([], [n, n, n]), lambda g, i, o: dist.all_reduce_coalesced(o, OP.MAX)),
    "all_reduce of several": (lambda n, p: ([], [n, n]), lambda g, i, o: g.allreduce(o).wait()),
    "broadcast of several": (lambda n, p: ([], [n, n]), lambda g, i, o: g.broadcast(o, of_rank_1()).wait()),
    "all_gather": (lambda n, p: ([n], [n] * p), lambda g, i, o: dist.all_gather(o, i[0])),
    "all_gather of several": (
        lambda n, p: ([n, n], [n] * 4 * p),
        lambda g, i, o: g.allgather([o[: 2 * p_of(g)], o[2 * p_of(g) :]], i).wait(),
    ),
    "all_gather_coalesced": (
        lambda n, p: ([n, n], [n] * 2 * p),
        lambda g, i, o: dist.all_gather_coalesced([o[2 * r : 2 * r + 2] for r in range(p_of(g))], i),
    ),
    "all_gather_into_tensor": (lambda n, p: ([n], [n * p]), lambda g, i, o: g._allgather_base(o[0], i[0]).wait()),
    "all_gather_into_tensor coalesced": (
        lambda n, p: ([n, n], [n * p, n * p]),
        lambda g, i, o: g.allgather_into_tensor_coalesced(o, i).wait(),
    ),
    "gather": (lambda n, p: ([n], [n] * p), lambda g, i, o: dist.gather(i[0], o if g.rank() == 1 else None, 1)),
    "scatter": (lambda n, p: ([n] * p, [n]), lambda g, i, o: dist.scatter(o[0], i if g.rank() == 1 else None, 1)),
    "reduce_scatter": (lambda n, p: ([n] * p, [n]), lambda g, i, o: dist.reduce_scatter(o[0], i)),
    "reduce_scatter_tensor": (lambda n, p: ([n * p], [n]), lambda g, i, o: g._reduce_scatter_base(o[0], i[0]).wait()),
    "reduce_scatter_tensor coalesced": (
        lambda n, p: ([n * p, n * p], [n, n]),
        lambda g, i, o: g.reduce_scatter_tensor_coalesced(o, i).wait(),
    ),
    "all_to_all": (lambda n, p: ([n] * p, [n] * p), lambda g, i, o: g.alltoall(o, i).wait()),
    "all_to_all_single": (lambda n, p: ([n * p], [n * p]), lambda g, i, o: dist.all_to_all_single(o[0], i[0])),
    "all_to_all_single with splits": (
        lambda n, p: ([n * p], [n * p]),
        lambda g, i, o: dist.all_to_all_single(o[0], i[0], [n_of(o, g)] * p_of(g), [n_of(o, g)] * p_of(g)),
    ),
}
