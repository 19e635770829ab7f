"""`ParameterServer` behind the calls of one process's loop, so that drawn trainings can be compared with it."""

from functools import partial

import torch

import phalanx
from phalanx.strategies.servers import ServedOptimizer


class Served(ServedOptimizer):
    """With dense parameters; it clips on the servers."""

    _max_norm = None

    def clip(self, limit):
        """In the next step."""
        self._max_norm = limit

    def step(self, closure=None):
        """With the norm to which `clip` was called."""
        limit, self._max_norm = self._max_norm, None
        return super().step(closure, max_norm=limit)


class _Rows:
    """A server of tables, with the calls that `ServedOptimizer` makes to one of dense parameters."""

    def __init__(self, server, tables):
        self.server, self.optimizer, self._tables = server, server.row_optimizer, tables
        self.state_dict, self.load_state_dict = server.state_dict, server.load_state_dict
        self.close = server.close

    def pull(self):
        names = [name for each in self.optimizer.names for name in each]
        pulled = self.server.pull({name: torch.arange(len(self._tables[name])) for name in names})
        return {name: value.detach() for name, value in pulled.items()}


class ServedRows(ServedOptimizer):
    """With tables, all rows of which are pulled."""

    @torch.no_grad()
    def step(self, closure=None):
        """Push the rows that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = {name: one.grad.coalesce() for name, one in self._served_parameters().items() if one.grad is not None}
        self._send_options()
        rows = {name: (grad.indices()[0], grad.values()) for name, grad in grads.items()}
        self._server.server.push_gradients(None, rows)
        self._pull()
        return loss


def serve(weights, groups, servers, trainers, optimizer_class, options, *, name, sparse=False, **more):
    """A `ParameterServer` of these groups of weights, as an optimizer of all of the model's."""
    names = {id(weight): f"w{number}" for number, weight in enumerate(weights)}
    parameters = {names[id(weight)]: weight for weight in weights}
    groups = [{**group, "params": [(names[id(p)], p) for p in group["params"]]} for group in groups]
    make = partial(optimizer_class, **options)
    kind = "tables" if sparse else "dense"
    server = phalanx.ParameterServer(servers, trainers, **{kind: groups}, optimizer=make, name=name, **more)
    if sparse:
        return ServedRows(parameters, _Rows(server, parameters))
    return Served(parameters, server)
