"""A trainer pulls parameters from a `ParameterServer` before a step, and pushes gradients after it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from phalanx._base.param_groups import MakeOptimizer
from phalanx._comm.diagnostics.step_notes import waiting_for
from phalanx.checkpoint.optimizer_fit import find_misfits
from phalanx.errors import DeadlineError, PeerLostError, PhalanxError, summary_of
from phalanx.parameter_server import requests
from phalanx.parameter_server.clipping import Clip, make_clip
from phalanx.parameter_server.groups import KINDS, Group, Options, read_groups
from phalanx.parameter_server.layout import State, join_states, plan_dense, ring, split_state
from phalanx.parameter_server.parameters import Parameters, describe
from phalanx.parameter_server.server_optimizer import ServerOptimizer, make_server_optimizer
from phalanx.parameter_server.shard import NoCopyError, PushedGradients, Spec, TrainerLostError
from phalanx.rpc import current, rpc_async


@dataclass
class Pulled(Mapping[str, Tensor]):
    """`Pulled` maps names to the values for one step; for a table, the rows of the requested ids, in the ids' shape.

    The values require grad, unless the parameter was frozen at construction; `ParameterServer.push` sends their
    gradients. `staleness` is the number of steps that the slowest trainer is behind this trainer.
    """

    staleness: int
    _values: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _dense: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _rows: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> Tensor:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class ParameterServer:
    """Keep parameters on one or several server workers of `phalanx.rpc`, for this trainer to pull and push.

    Every trainer constructs it with the same arguments; the first trainer's values are used. The servers need no code
    of their own: they only call `rpc.init_rpc` and `rpc.shutdown`. A step is a `pull` and a `push`, each with one call
    per server.

    Synchronous: a step's gradients are averaged over the trainers, in the order of `trainers`, and applied once.
    Asynchronous: each push is applied when it arrives, and `max_staleness` limits how many steps a trainer may be ahead
    of the slowest.

    Numerics: with optimizers that update each element, or each dense tensor, independently, the results are bitwise
    identical to those of one process with the same gradients. Synchronous training does not depend on timing.

    Arguments:
        servers: names of the workers that keep the parameters. Each dense tensor is on one server; the rows of a table
            are distributed round-robin over all servers.
        trainers: names of the workers that push.
        dense: tensors by name, for instance `dict(module.named_parameters())`; or groups of them with their own
            options, as torch's optimizers take them: `[{"params": base.named_parameters(), "lr": 1e-4}, ...]`.
        tables: matrices by name of which a step needs only some rows (embeddings); or groups of them.
        optimizer: makes the servers' optimizer for dense parameters: a class of `torch.optim` or a `functools.partial`.
        row_optimizer: makes the servers' optimizer for tables, which must accept sparse gradients (SparseAdam, SGD,
            Adagrad). Default: `optimizer`.
        synchronous: see above.
        max_staleness: the limit for asynchronous training, in steps; None: no limit.
        reduction: "mean" or "sum" over the trainers of a synchronous step.
        replicate: keep a replica of each shard on the next server, preferably on another host. The replica takes over
            if the shard's server is lost. Default: True if there are several servers.
        name: distinguishes several ParameterServers on the same workers. A second ParameterServer of the same name
            shares the first one's parameters if this trainer has not closed the first; otherwise the constructor waits
            until all trainers have closed it.

    Raises:
        ValueError, TypeError: an argument is invalid, or an optimizer cannot be used.
        MismatchError: another trainer has passed different arguments.
        PeerLostError: all servers of a shard are lost.
        PhalanxError: a shard was lost earlier and has been created again.
        DeadlineError: a trainer has not closed the previous ParameterServer of this name (the message names the
            trainer), or the first trainer has not constructed this one.
    """

    def __init__(
        self,
        servers: Sequence[str],
        trainers: Sequence[str],
        *,
        dense: Mapping[str, Tensor] | Sequence[Mapping[str, Any]] | None = None,
        tables: Mapping[str, Tensor] | Sequence[Mapping[str, Any]] | None = None,
        optimizer: MakeOptimizer,
        row_optimizer: MakeOptimizer | None = None,
        synchronous: bool = True,
        max_staleness: int | None = None,
        reduction: str = "mean",
        replicate: bool | None = None,
        name: str = "parameters",
    ) -> None:
        given = {kind: read_groups(kind, each) for kind, each in (("dense", dense), ("tables", tables))}
        self._frozen = {
            key
            for each in given.values()
            for values, _ in each
            for key, one in values.items()
            if isinstance(one, torch.nn.Parameter) and not one.requires_grad
        }
        groups = {
            kind: [({key: one.detach() for key, one in values.items()}, options) for values, options in each]
            for kind, each in given.items()
        }
        tensors = [{k: t for values, _ in groups[kind] for k, t in values.items()} for kind in KINDS]
        self._parameters = Parameters(name, *tensors)
        me = current.agent().me
        self._trainer = me.info.name
        self._servers = tuple(servers)
        problems = find_problems(self._servers, tuple(trainers), self._trainer, groups)
        if max_staleness is not None and (synchronous or max_staleness < 0):
            problems.append("max_staleness is for synchronous=False, and not below 0")
        if reduction not in ("mean", "sum"):
            problems.append(f"reduction must be 'mean' or 'sum', got {reduction!r}")
        if replicate and len(self._servers) < 2:
            problems.append("replicate=True needs a second server")
        row_optimizer = row_optimizer or optimizer
        problems += try_optimizer("optimizer", optimizer, sparse=False) if self._parameters.dense else []
        problems += try_optimizer("row_optimizer", row_optimizer, sparse=True) if self._parameters.tables else []
        if problems:
            raise ValueError(f"ParameterServer {name!r}: " + "; ".join(problems))
        makes = (("optimizer", optimizer), ("row_optimizer", row_optimizer))
        self._optimizers = {
            kind: make_server_optimizer(kind, *make, groups[kind], self._add_group)
            for kind, make in zip(KINDS, makes, strict=True)
            if groups[kind]
        }
        described = f"{self._servers}, {tuple(trainers)}, {synchronous=}, {max_staleness=}, {reduction=}"
        for kind in self._optimizers:
            for group in self._groups_of(kind):
                described += f", {kind}: {describe(group, self._parameters.of_kind(kind))}"
        self._spec = Spec(
            name,
            self._servers,
            tuple(trainers),
            synchronous,
            max_staleness,
            optimizer,
            row_optimizer,
            reduction,
            len(self._servers) > 1 if replicate is None else replicate,
            described,
        )
        self._load = [0] * len(self._servers)  # the bytes of dense parameters on each server
        self._place = plan_dense(
            {key: one.nbytes for key, one in self._parameters.dense.items()}, len(self._servers), self._load
        )
        self._num_added = 0
        self._calls = ShardCalls(name, self._servers, self._trainer, self._spec.trainers[0])
        self._closed = False
        self.step: int = 0
        if self._trainer == self._spec.trainers[0]:
            state: State = {
                "step": 0,
                "dense": self._parameters.dense,
                "tables": self._parameters.tables,
                "optimizer": {},
            }
            state["groups"] = {kind: self._groups_of(kind) for kind in KINDS}
            shards = split_state(state, self._place, len(self._servers))
            self._on_all(requests.create, [(self._spec, one) for one in shards])
        attached = self._on_all(requests.attach, [(self._trainer, me.uid, described)] * len(self._servers))
        # The replacement of a lost trainer repeats a step that only some servers have received; they ignore the repeat.
        clocks = [clock for clock, _ in attached]
        if max(clocks) > min(clocks) + 1:  # a push is sent to all shards, so their steps differ by at most one
            raise PhalanxError(  # not a PeerLostError: elastic.run would restart and fail here again
                f"ParameterServer {name!r}: trainer {self._trainer!r} has pushed {max(clocks)} steps, and shard "
                f"{clocks.index(min(clocks))} has {min(clocks)} of them: {_describe_loss(self._spec.replicate)}"
            )
        self.step = min(clocks)
        self._loads: int = max(number for _, number in attached)

    @property
    def optimizer(self) -> ServerOptimizer:
        """Return the servers' optimizer for dense parameters; schedulers and users may change its `param_groups`.

        The next push sends the new options. Synchronous trainers must set the same options; each asynchronous push is
        applied with its trainer's options.

        Raises:
            ValueError: there is no dense parameter.
        """
        return self._optimizer_of("dense")

    @property
    def row_optimizer(self) -> ServerOptimizer:
        """Return the servers' optimizer for tables; see `optimizer`.

        Raises:
            ValueError: there is no table.
        """
        return self._optimizer_of("tables")

    def _optimizer_of(self, kind: str) -> ServerOptimizer:
        if kind not in self._optimizers:
            raise ValueError(
                f"ParameterServer {self._spec.name!r} was made without {kind}, and has no optimizer for it"
            )
        return self._optimizers[kind]

    def _groups_of(self, kind: str) -> list[Group]:
        one = self._optimizers.get(kind)
        if one is None:
            return []
        return [{"params": names, **options} for names, options in zip(one.names, one.options(), strict=True)]

    def _options(self) -> dict[str, list[Options]]:
        return {kind: one.options() for kind, one in self._optimizers.items()}

    def _add_group(self, kind: str, group: Group, values: dict[str, Tensor]) -> None:
        """Add a parameter group on the servers. All trainers call it; the first trainer's values are used."""
        self._check_open()
        caller = f"ParameterServer {self._spec.name!r}, add_param_group"
        if problems := find_wrong_tensors(kind, values, {**self._parameters.dense, **self._parameters.tables}):
            raise ValueError(f"{caller}: " + "; ".join(problems))
        argument, make = (
            ("optimizer", self._spec.optimizer) if kind == "dense" else ("row_optimizer", self._spec.row_optimizer)
        )
        make_server_optimizer(
            kind, argument, make, [(values, {k: v for k, v in group.items() if k != "params"})], _add_nothing
        )
        num, load = len(self._servers), list(self._load)
        is_dense = kind == "dense"
        place = plan_dense({key: one.nbytes for key, one in values.items()}, num, load) if is_dense else {}
        state = {"step": 0, "dense": {}, "tables": {}, "optimizer": {}, kind: values}
        parts = [one[kind] for one in split_state(state, place, num)]
        fixed = self._trainer, self.step, self._num_added, kind, group
        self._on_all(requests.add, [(*fixed, part, f"{kind}: {describe(group, values)}") for part in parts])
        self._num_added += 1
        self._load, self._place = load, {**self._place, **place}
        self._parameters.of_kind(kind).update(values)

    # -- a step --------------------------------------------------------------------------------------------------------

    def pull(self, rows: Mapping[str, Tensor] | None = None, dense: Sequence[str] | None = None) -> Pulled:
        """Return the values for this trainer's next step, once the step may begin: one call to each server.

        `rows` has the ids to pull, by table; `dense` has the names to pull, by default all.

        Shape: for a table with rows of length D and ids of shape (*): (*, D).

        Raises:
            ValueError, TypeError: a name is unknown, or ids are not integers or out of range.
            PeerLostError: a trainer whose gradients a synchronous step needs is lost (the message names the trainer),
                or all servers of a shard are lost.
            DeadlineError: a trainer (the message names it) or a server is too slow.
        """
        self._check_open()
        rows = rows or {}
        names = list(self._parameters.dense if dense is None else dense)
        self._parameters.check_names(names, rows)
        unique = {key: torch.unique(ids.reshape(-1), return_inverse=True) for key, ids in rows.items()}
        num = len(self._servers)
        owners = {key: ids % num for key, (ids, _) in unique.items()}
        arguments = []
        for index in range(num):
            local = {key: ids[owners[key] == index] // num for key, (ids, _) in unique.items()}
            arguments.append((self._trainer, self.step, [one for one in names if self._place[one] == index], local))
        answers = self._on_all(requests.pull, arguments)
        pulled = Pulled(max(answer[2] for answer in answers))
        for whole, _, _ in answers:
            # Clone for torch's own memory alignment: with another alignment, matrix products differ in the last bits.
            for key, value in whole.items():
                pulled._dense[key] = value.clone().requires_grad_(key not in self._frozen)
        pulled._values |= {key: pulled._dense[key] for key in names}
        for key, (ids, inverse) in unique.items():
            leaf = self._parameters.tables[key].new_empty((len(ids), self._parameters.tables[key].shape[1]))
            for index, (_, parts, _) in enumerate(answers):
                leaf[owners[key] == index] = parts[key]
            pulled._rows[key] = (ids, leaf.requires_grad_(key not in self._frozen))
            pulled._values[key] = torch.nn.functional.embedding(inverse.reshape(rows[key].shape), leaf)
        return pulled

    def push(self, pulled: Pulled, *, max_norm: float | None = None, norm_type: float = 2.0) -> Tensor | None:
        """Send the gradients of the pulled values, and end the step: one call to each server.

        Values without a gradient are skipped, as in an optimizer. When this returns, each server and its replica have
        the gradients. After an exception, `push` can be repeated: nothing is applied twice.

        Arguments:
            max_norm: clip the gradients that the servers apply, dense ones and rows together, as
                `torch.nn.utils.clip_grad_norm_` does: in a synchronous step the sum or mean of all trainers' gradients,
                otherwise the gradients of this push. All trainers of a synchronous step must pass the same value.
            norm_type: the order of the norm.

        Return the norm before clipping if `max_norm` is given, else None.

        Shape: the gradients have the shapes of the pulled values; the norm is ().
        Cost: clipping a synchronous step of several trainers takes two more calls to each server, after the last
        trainer's push.

        Raises:
            ValueError: `max_norm` or `norm_type` is invalid.
            MismatchError: the trainers of a synchronous step have set different options, or clip differently.
            PeerLostError: all servers of a shard are lost.
            DeadlineError: a server does not answer.
        """
        dense = {key: value.grad for key, value in pulled._dense.items() if value.grad is not None}
        rows = {key: (ids, leaf.grad) for key, (ids, leaf) in pulled._rows.items() if leaf.grad is not None}
        return self._push(dense, rows, make_clip(max_norm, norm_type))

    def push_gradients(
        self,
        dense: Mapping[str, Tensor] | None = None,
        rows: Mapping[str, tuple[Tensor, Tensor]] | None = None,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
    ) -> Tensor | None:
        """Push as `push` does, but with gradients by name; for a table, (ids, rows). Rows with equal ids are summed.

        Shape: `dense`: as the parameter; `rows`: ids (N), gradients (N, D).

        Raises:
            ValueError, TypeError: a name is unknown, or a shape or dtype does not match.
            PeerLostError: all servers of a shard are lost.
            DeadlineError: a server does not answer.
        """
        summed = self._parameters.sum_gradients(dense or {}, rows or {})
        return self._push(dense or {}, summed, make_clip(max_norm, norm_type))

    def _push(
        self, dense: Mapping[str, Tensor], rows: Mapping[str, tuple[Tensor, Tensor]], clip: Clip | None
    ) -> Tensor | None:
        self._check_open()
        num = len(self._servers)
        dense = {key: grad.detach() for key, grad in dense.items()}
        rows = {key: (ids, grads.detach()) for key, (ids, grads) in rows.items()}
        total, for_servers = None, None
        if clip is not None and self._spec.synchronous and len(self._spec.trainers) > 1:
            for_servers = clip  # only the servers have the sum or mean over trainers
        elif clip is not None:
            norms = {key: clip.norm_of(grad) for key, grad in dense.items()}
            total = self._total_norm(clip, [norms], [{key: clip.norm_of(grads) for key, (_, grads) in rows.items()}])
            factor = clip.factor(total)
            dense = {key: grad * factor for key, grad in dense.items()}
            rows = {key: (ids, grads * factor) for key, (ids, grads) in rows.items()}
        options = self._options()
        arguments = []
        for index in range(num):
            mine = {key: grad for key, grad in dense.items() if self._place[key] == index}
            # Every server receives every table, even without rows, because an optimizer counts its steps.
            local = {}
            for key, (ids, grads) in rows.items():
                here = ids % num == index
                local[key] = (ids[here] // num, grads[here])
            arguments.append((self._trainer, self.step, PushedGradients(mine, local, options, for_servers)))
        self._on_all(requests.push, arguments)
        if for_servers is not None:
            found = self._on_all(requests.norms, [(self._trainer, self.step)] * num)
            total = self._total_norm(for_servers, [one["dense"] for one in found], [one["tables"] for one in found])
            self._on_all(requests.clip, [(self.step, total)] * num)
        self.step += 1
        for one in self._optimizers.values():
            one.notify_push()
        return total

    def _total_norm(
        self, clip: Clip, dense: Sequence[Mapping[str, Tensor]], rows: Sequence[Mapping[str, Tensor]]
    ) -> Tensor:
        """Combine the norms of all servers in the order that the parameters have in a single process."""
        norms = [part[key] for key in self._parameters.dense for part in dense if key in part]
        parts = [[part[key] for part in rows if key in part] for key in self._parameters.tables]
        return clip.total(norms, [one for one in parts if one])

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Return all values, optimizer states, and the groups' options, independent of the number of servers.

        In synchronous training this is the state after this trainer's last step, otherwise each server's current state.
        """
        self._check_open()
        request = self._trainer, self.step, self._options()
        shards = self._on_all(requests.state, [request] * len(self._servers))
        return {**join_states(shards), "step": self.step}

    def load_state_dict(self, state_dict: State) -> None:
        """Load a state. Every trainer must call this; once all have, the first trainer's state is loaded.

        All trainers then have the state's group options, as after an optimizer's `load_state_dict`.

        Raises:
            ValueError: the state has other parameters, groups or optimizer classes; nothing was changed.
            PeerLostError: the first trainer is lost, or all servers of a shard are lost.
            DeadlineError: some trainer did not call this in time.
        """
        self._check_open()
        self._parameters.check_state(state_dict)
        for kind, groups in state_dict.get("groups", {}).items():
            theirs_in, mine_in = ([one["params"] for one in each] for each in (groups, self._groups_of(kind)))
            if theirs_in != mine_in:
                raise ValueError(
                    f"ParameterServer.load_state_dict: the groups of {kind} are {theirs_in} in the state, and "
                    f"{mine_in} here"
                )
            if groups and (misfits := find_misfits(kind, self._optimizers[kind], {"param_groups": groups})):
                raise ValueError(f"ParameterServer.load_state_dict: {misfits[0]}")
        number = self._loads + 1
        shards: Sequence[State | None] = [None] * len(self._servers)
        if self._trainer == self._spec.trainers[0]:
            shards = split_state(state_dict, self._place, len(self._servers))
        answers = self._on_all(requests.load, [(self._trainer, number, one) for one in shards])
        self._loads = number
        self.step = min(clock for clock, _ in answers)
        for kind, one in self._optimizers.items():
            one.set_options(answers[0][1][kind])

    def close(self) -> None:
        """Leave, so that the other trainers no longer wait for this trainer.

        When all trainers have left, the servers free the parameters.
        """
        if not self._closed:
            self._closed = True
            try:
                self._on_all(requests.leave, [(self._trainer,)] * len(self._servers))
            except PeerLostError:
                pass  # no server is left to notify

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:  # after an exception, the servers detect the exit of this process
            self.close()

    def _on_all(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._calls.on_all(function, arguments, self.step)

    def _check_open(self) -> None:
        if self._closed:
            raise PhalanxError(f"ParameterServer {self._spec.name!r} was closed by this trainer.")


def _add_nothing(*_: Any) -> None:
    """Do nothing: the optimizer is only constructed to test it."""


def _describe_loss(replicate: bool) -> str:
    """Return why a shard was created again, and what to do."""
    if replicate:
        return (
            "the shard's server and its replica's server are both lost, and the shard was created again.\nResume from "
            "a checkpoint. Servers on more hosts are less likely to be lost together."
        )
    return (
        "the shard's server is lost, and the shard was created again.\nResume from a checkpoint. With replicate=True, "
        "another server has a copy of each shard."
    )


Given = Mapping[str, Sequence[tuple[Mapping[str, Tensor], Options]]]  # by "dense" and "tables"


def find_problems(servers: tuple[str, ...], trainers: tuple[str, ...], me: str, groups: Given) -> list[str]:
    """Return descriptions of the problems in the arguments."""
    problems = []
    for what, workers in (("servers", servers), ("trainers", trainers)):
        if not workers or len(set(workers)) != len(workers):
            problems.append(f"{what} must be one or more different names of workers, got {workers}")
    if me not in trainers:
        problems.append(f"this worker is {me!r}, which is not among the trainers {trainers}")
    if not any(groups.values()):
        problems.append("there is neither a dense parameter nor a table")
    known: dict[str, Tensor] = {}
    for kind, each in groups.items():
        for values, _ in each:
            problems += find_wrong_tensors(kind, values, known)
            known |= values
    return problems


def find_wrong_tensors(kind: str, values: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> list[str]:
    """Return descriptions of the problems with one group's tensors; `known` are the tensors of the other groups."""
    problems = []
    if twice := sorted(values.keys() & known.keys()):
        problems.append(f"{twice} are names of several dense parameters or tables")
    if kind == "tables":
        odd = {key: tuple(one.shape) for key, one in values.items() if one.dim() != 2}
        problems += [f"table {key!r} must be a matrix, got {shape}" for key, shape in odd.items()]
    odd_ones = [key for key, one in values.items() if not one.is_floating_point() or one.device.type != "cpu"]
    return problems + ([f"{odd_ones} must be floating point tensors on the CPU"] if odd_ones else [])


def try_optimizer(what: str, make: MakeOptimizer, *, sparse: bool) -> list[str]:
    """Return the problem of an optimizer that fails in a trial step here, before a server runs it; [] if none."""
    parameter = torch.nn.Parameter(torch.ones(2, 2, device="cpu"))
    grad = torch.ones(2, 2, device="cpu")
    parameter.grad = grad.to_sparse(1) if sparse else grad
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make([parameter]).step()
    except Exception as error:  # any error of a user's optimizer
        kind = "gradients of rows" if sparse else "gradients"
        return [f"{what} {make!r} cannot step with {kind}: {summary_of(error)}"]
    return []


_DETAILS_S = 5.0  # the timeout of calls that only add details to an error message


class ShardCalls:
    """`ShardCalls` makes the calls of `trainer` to the `servers` of parameter server `name`.

    `first` is the first trainer.
    """

    def __init__(self, name: str, servers: Sequence[str], trainer: str, first: str) -> None:
        self._name = name
        self._servers = servers
        self._trainer = trainer
        self._first = first
        self._hosts = [self._ring(index) for index in range(len(servers))]  # each shard's servers, without lost ones

    def _ring(self, index: int) -> list[str]:
        return ring(self._servers, index, current.agent().membership.host_of)

    def on_all(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], step: int) -> list[Any]:
        """Call `function` for every shard at once, on the shard's server; `step` is this trainer's current step.

        Raises:
            PeerLostError: no server of a shard is left, or a trainer that the answer depends on is lost.
            DeadlineError: an answer is late; the message names the trainers that delayed it.
        """
        sent = [self._send(index, function, request) for index, request in enumerate(arguments)]
        answers, problems = [], []
        with waiting_for("servers"):
            for index, (request, future) in enumerate(zip(arguments, sent, strict=True)):
                try:
                    answers.append(self._wait(index, function, request, future, step))
                except PhalanxError as error:  # read the other answers first: they may have arrived
                    problems.append(error)
        if problems:
            raise problems[0]
        return answers

    def _send(self, index: int, function: Callable[..., Any], request: tuple[Any, ...]) -> Future[Any] | PeerLostError:
        if not self._hosts[index]:
            return PeerLostError("")
        try:
            return rpc_async(self._hosts[index][0], function, (self._name, index, *request))
        except PeerLostError as error:
            return error

    def _wait(
        self,
        index: int,
        function: Callable[..., Any],
        request: tuple[Any, ...],
        future: Future[Any] | PeerLostError,
        step: int,
    ) -> Any:
        """Return the answer; if the server is lost, the answer of its successor."""
        cause: PhalanxError | None = None
        without: set[str] = set()  # the servers that have reported that they have no copy
        while not without.issuperset(self._hosts[index]):
            host = self._hosts[index][0]
            try:
                if isinstance(future, PeerLostError):
                    raise future
                return future.wait()
            except TrainerLostError:
                raise
            except DeadlineError as error:
                raise self._explain_late(index, function, error, step) from error
            except (PeerLostError, NoCopyError) as error:
                cause = error
                hosts = self._hosts[index]
                if hosts and hosts[0] == host:
                    hosts.pop(0)
                if isinstance(error, NoCopyError):
                    without.add(host)
                    if host not in hosts:
                        hosts.append(host)  # the server may get a copy later, once all servers before it are lost
                future = self._send(index, function, request)
        tried = self._ring(index)
        members = (current.agent().membership.find(one) for one in tried)
        raise PeerLostError(
            f"ParameterServer {self._name!r}: shard {index} is lost: none of its servers, {', '.join(tried)}, has "
            "a copy.\nResume from a checkpoint.",
            ranks=tuple(one.info.id for one in members if one is not None),
        ) from cause

    def _explain_late(self, index: int, function: Callable[..., Any], error: DeadlineError, step: int) -> DeadlineError:
        """Return an error that names the trainers that delayed this trainer, if the server answers in time."""
        place = self._name, index
        try:
            host = self._hosts[index][0]
            if function is requests.create:
                users = rpc_async(host, requests.cancel_creation, place, timeout=_DETAILS_S).wait()
                return self._explain_missing(users, error)
            clocks = rpc_async(host, requests.clocks, place, timeout=_DETAILS_S).wait()
        except PhalanxError:
            return error
        if function is requests.attach:
            return self._explain_missing(list(clocks), error)
        if function is requests.add and self._trainer != (first := next(iter(clocks), self._trainer)):
            return DeadlineError(
                f"ParameterServer {self._name!r}: {self._trainer!r} waits for {first!r} to add the same group. "
                f"Call add_param_group on all trainers.\n{error}"
            )
        mine = step + (function is requests.norms)
        behind = {name: clock for name, clock in clocks.items() if clock < mine}
        if not behind:
            return error
        facts = ", ".join(f"trainer {name!r} has pushed {clock} steps" for name, clock in behind.items())
        text = f"ParameterServer {self._name!r}: {self._trainer!r} has pushed {mine} and waits for the others: "
        return DeadlineError(f"{text}{facts}.\n{error}")

    def _explain_missing(self, users: list[str], error: DeadlineError) -> DeadlineError:
        """Return an error that says why there is no shard; `users` have not closed the previous shard of this name."""
        if not users:
            fact = f"trainer {self._first!r}, which provides the initial values, has not constructed it."
        elif self._trainer in users:
            return error
        else:
            fact = (
                f"{self._trainer!r} has closed the previous ParameterServer of this name, but "
                f"{', '.join(map(repr, users))} {'has' if len(users) == 1 else 'have'} not. Close it in all trainers, "
                "or give the new one another name."
            )
        return DeadlineError(f"ParameterServer {self._name!r}: {fact}\n{error}")
