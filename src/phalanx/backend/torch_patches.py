"""Every change that Phalanx makes to PyTorch; no other file makes one.

A program that does not ask for us must see PyTorch as if Phalanx were not installed. So `import torch` only puts two
names where torch looks backends up, and the rest is applied at first use: when somebody asks for one of them by name.

    changed                              so that                                        applied when
    Backend.PHALANX, Backend.MPI         we hear that the backend is asked for          torch is imported
    init_process_group without a name    it means ours under `phalanx run`              in a rank of `phalanx run`
    env://                               it needs no port under `phalanx run`           in a rank of `phalanx run`
    FileStore's queues                   it has them, being the store of `phalanx run`  in a rank of `phalanx run`
    PrefixStore's queues, list of keys   it passes them on to a store in Python         as the two above, or for a group
    env://, tcp://                       they work under mpiexec, and say who is where  "phalanx" is asked for
    monitored_barrier                    it takes our groups, which torch refuses       "phalanx" is asked for
    _dist2's table of backends           its new_group("phalanx") works              as the two above, whichever first
    _new_process_group_helper            "mpi" works through mpi4py                     "mpi" is, and torch has no MPI
    DataLoader.__iter__                  we hear which iterator is at work              an elastic job has a sampler
    _MapDatasetFetcher.fetch             a batch has random numbers of its own          in its DataLoader's workers
    DataLoader's iterators' __next__     we hear when a batch was asked for, and came   a run report is asked for
    autograd.backward                    we hear when it begins and ends                a run report is asked for
    torch._C._collect_all                it fails with the first of our calls that does a worker of `phalanx.rpc` starts

    changed                              goes when torch (seen: 2.13)
    Backend.PHALANX, Backend.MPI         tells a backend that it is asked for, and compares names of groups in one case
    init_process_group without a name    lets the environment say which backend is the default
    env://, in a rank of `phalanx run`   takes a FileStore from its launcher
    FileStore's and PrefixStore's        has queues in FileStore, and passes them on from PrefixStore
    env://, tcp://                       tells a rendezvous handler for which backend it is called
    monitored_barrier                    asks the group instead of its name
    _dist2's table of backends           reads the backends that were registered with `Backend.register_backend`
    _new_process_group_helper            takes "mpi" from `Backend.register_backend`
    DataLoader.__iter__                  tells how many batches it has handed to the loop
    _MapDatasetFetcher.fetch             can seed each batch, and not only each worker
    __next__, autograd.backward          has hooks there, as optimizers have
    torch._C._collect_all                lets Python give a Future an error that C++ sees

(`csrc/interpose.c` reaches deeper, into libc10's allocation, when DDP asks for gradients in shared memory; and
`process_group/observed.py` adds kernels to c10d's operators once a mode of the dispatcher looks on at a call of ours.
docs/architecture.md tells both as decisions.)
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import os
import sys
import types
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

_applied: set[str] = set()


def offer_backend() -> None:
    """What `import torch` runs: make the names "phalanx" and "mpi" known; safe to call more than once."""
    import torch.distributed as dist

    if not dist.is_available() or "phalanx" in dist.Backend.backend_list:
        return
    # A list: torch reads a plain string as the devices 'c', 'p' and 'u'. CUDA tensors go to an NCCL group inside.
    devices = ["cpu", "cuda"] if dist.is_nccl_available() else ["cpu"]
    backend: Any = dist.Backend
    backend.register_backend("phalanx", _create, extended_api=True, devices=devices)
    # While any plugin is there, torch (2.13, `_new_process_group_helper`) does not tell a group "cpu:gloo" that it is
    # Gloo's. So ours is there only once it is asked for; ends when torch compares names in one case.
    plugin = backend._plugins.pop("PHALANX")
    backend.PHALANX = _Asked("phalanx", lambda: _serve_our_backend(plugin))
    if not _c10d().is_mpi_available():
        backend.MPI = _Asked("mpi", _serve_mpi)
    if _recorders:
        _observe_steps()
        _hook_optimizers()
    if os.environ.get("PHALANX_STORE"):
        launchers = importlib.import_module("phalanx.coordination.launchers")
        if launchers.find_agents_store(os.environ):  # else this is a process that a rank has started
            serve_launcher()


def _create(options: Any, backend_options: Any) -> Any:
    from phalanx.backend import create_process_group

    serve_prefixes()
    return create_process_group(options, backend_options)


class _Asked:
    """The name of a backend, as an attribute of `dist.Backend`, that calls `first` when torch resolves it.

    Everything that asks for a backend (`init_process_group`, `new_group`, a pair "cpu:phalanx") makes a `Backend` of
    its name. torch also reads `Backend.MPI` in order to compare; that is not asking.
    """

    def __init__(self, name: str, first: Callable[[], None]) -> None:
        self._name = name
        self._first = first

    def __get__(self, instance: object, owner: Any) -> str:
        if sys._getframe(1).f_code is owner.__new__.__code__:
            self._first()
        return self._name


def _once(patch: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(patch)
    def apply(*args: Any) -> None:
        if patch.__name__ not in _applied:
            _applied.add(patch.__name__)
            patch(*args)

    return apply


def _c10d() -> ModuleType:
    return importlib.import_module("torch.distributed.distributed_c10d")


# -- in a rank of `phalanx run` ----------------------------------------------------------------------------------------


@_once
def serve_launcher() -> None:
    """Let a start that names no backend mean ours, and `env://` use the agent's store, where the launcher says so.

    Called before the variables are known in the zygote of `phalanx run`, which imports torch for all ranks.
    """
    _extend_start()
    _serve_agents_store()
    _serve_queues()
    serve_prefixes()
    _serve_dist2()


@_once
def _serve_dist2() -> None:
    """Let `torch.distributed._dist2.new_group("phalanx", ...)` make groups; it has a table of backends of its own."""
    try:
        dist2 = importlib.import_module("torch.distributed._dist2")
    except ImportError:  # before torch 2.8
        return
    numbers = itertools.count()

    def create(store: Any, rank: int, world_size: int, timeout: timedelta, device: Any, **kwargs: Any) -> Any:
        module = importlib.import_module("phalanx.backend")
        options = types.SimpleNamespace(
            store=store,
            group_rank=rank,
            group_size=world_size,
            timeout=timeout,
            group_id=f"dist2-{next(numbers)}",
            global_ranks_in_group=[],
        )
        return module.create_process_group(options, module.Options(**kwargs))

    dist2.register_backend("phalanx", create)


@_once
def _serve_agents_store() -> None:
    _extend_scheme("env", "launched_rendezvous")


@_once
def _serve_queues() -> None:
    """Let a FileStore, by itself or behind prefixes, have queues; ends when torch's has them."""
    import torch.distributed as dist

    stores: Any = dist
    if not hasattr(stores.Store, "queue_push"):  # before torch 2.8
        return
    theirs = stores.Store

    def in_file(store: Any) -> bool:
        while isinstance(store, stores.PrefixStore):
            store = store.underlying_store
        return isinstance(store, stores.FileStore)

    def module() -> ModuleType:
        return importlib.import_module("phalanx.backend.store_queues")

    @functools.wraps(theirs.queue_push)
    def queue_push(self: Any, key: str, value: str) -> None:
        module().push(self, key, value) if in_file(self) else theirs.queue_push(self, key, value)

    @functools.wraps(theirs.queue_pop)
    def queue_pop(self: Any, key: str, block: bool = True) -> Any:
        return module().pop(self, key, self.timeout, block) if in_file(self) else theirs.queue_pop(self, key, block)

    @functools.wraps(theirs.queue_len)
    def queue_len(self: Any, key: str) -> Any:
        return module().length(self, key) if in_file(self) else theirs.queue_len(self, key)

    for store in (stores.FileStore, stores.PrefixStore):
        store.queue_push, store.queue_pop, store.queue_len = queue_push, queue_pop, queue_len


@_once
def serve_prefixes() -> None:
    """Let a PrefixStore around a store of ours (one that has `name_through`) have queues and a list of keys.

    torch's C++ passes neither on to a store that is written in Python; ends when it does.
    """
    prefixed: Any = _c10d().PrefixStore

    def extend(name: str, ours: Callable[..., Any]) -> None:
        theirs = getattr(prefixed, name, None)
        if theirs is None:  # before torch 2.8
            return

        @functools.wraps(theirs)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            store = self
            while isinstance(store, prefixed):
                store = store.underlying_store
            return (
                ours(store, self, *args, **kwargs) if hasattr(store, "name_through") else theirs(self, *args, **kwargs)
            )

        setattr(prefixed, name, call)

    def list_keys(store: Any, self: Any) -> list[str]:
        prefix = store.name_through(self, "")
        return [key[len(prefix) :] for key in store.list_keys(prefix)]

    extend("queue_push", lambda store, self, key, value: store.queue_push(store.name_through(self, key), value))
    extend("queue_pop", lambda store, self, key, block=True: store.queue_pop(store.name_through(self, key), block))
    extend("queue_len", lambda store, self, key: store.queue_len(store.name_through(self, key)))
    extend("list_keys", list_keys)


def _extend_start() -> None:
    c10d = _c10d()
    original = c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        if backend is not None:
            original(backend, *args, **kwargs)
            return
        module = importlib.import_module("phalanx.backend.start")
        module.init_process_group(original, backend, *args, **kwargs)

    # A device mesh starts the group itself where there is none.
    for name in ("distributed", "distributed.distributed_c10d", "distributed.device_mesh"):
        vars(importlib.import_module(f"torch.{name}"))["init_process_group"] = init_process_group


def _extend_scheme(scheme: str, name: str, *, ours_only: bool = False) -> None:
    """Let `phalanx.backend.rendezvous.<name>` handle the scheme; it is given the handler that did until now."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # the package shows a function of that name
    original = rendezvous._rendezvous_handlers[scheme]

    def handler(url: str, timeout: Any = rendezvous.default_pg_timeout, **kwargs: Any) -> Any:
        if ours_only and "phalanx" not in _asking_backend():
            return original(url, timeout=timeout, **kwargs)
        module = importlib.import_module("phalanx.backend.rendezvous")
        return getattr(module, name)(original, url, timeout, **kwargs)

    rendezvous._rendezvous_handlers[scheme] = handler


def _asking_backend() -> str:
    """For which backend `init_process_group` makes its ranks meet, which torch tells no handler; "" in RPC."""
    start = inspect.unwrap(_c10d().init_process_group).__code__
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not start:
        frame = frame.f_back
    return str(frame.f_locals.get("backend", "")).lower() if frame is not None else ""


# -- once backend "phalanx" is asked for -------------------------------------------------------------------------------


@_once
def _serve_our_backend(plugin: Any) -> None:
    import torch.distributed as dist

    backend: Any = dist.Backend
    backend._plugins["PHALANX"] = plugin
    _serve_agents_store()
    _serve_dist2()
    _extend_scheme("env", "env_rendezvous", ours_only=True)
    _extend_scheme("tcp", "address_rendezvous", ours_only=True)
    _extend_monitored_barrier()


def _extend_monitored_barrier() -> None:
    """torch's function refuses all groups but Gloo's, by name; ends when it asks the group.

    It is changed in place: a program may have imported it long before it asks for us.
    """
    function = inspect.unwrap(_c10d().monitored_barrier)
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__ = function.__kwdefaults__
    _originals["monitored_barrier"] = original

    def monitored_barrier(group=None, timeout=None, wait_all_ranks=False):  # type: ignore[no-untyped-def]
        from phalanx.backend.torch_patches import monitored_barrier as ours  # runs with torch's globals, not with ours

        return ours(group, timeout, wait_all_ranks)

    function.__code__ = monitored_barrier.__code__


_originals: dict[str, Callable[..., Any]] = {}


def monitored_barrier(group: Any, timeout: timedelta | float | None, wait_all_ranks: bool) -> None:
    """What `dist.monitored_barrier` does: ours for our groups, torch's for all others.

    Raises:
        DeadlineError: some rank did not come within `timeout` (by default the group's); `missing` says which.
    """
    ours = _c10d().group.WORLD if group is None else group
    if not isinstance(ours, importlib.import_module("phalanx.backend.process_group").PhalanxProcessGroup):
        _originals["monitored_barrier"](group, timeout, wait_all_ranks)
        return
    if isinstance(timeout, (int, float)):  # as torch's own takes it
        timeout = timedelta(seconds=timeout)
    ours.monitored_barrier(timeout, wait_all_ranks)


# -- once an elastic job has a sampler ---------------------------------------------------------------------------------

_LoaderListener = tuple[Callable[[Any, Any], None], Callable[[Any, Any, Any, bool], None]]
_loader_listeners: weakref.WeakKeyDictionary[Any, _LoaderListener] = weakref.WeakKeyDictionary()


def observe_loaders(
    owner: Any, before: Callable[[Any, Any], None], listener: Callable[[Any, Any, Any, bool], None]
) -> None:
    """Call `before(owner, loader)` and `listener(owner, loader, iterator, is_new)` whenever a DataLoader is iterated.

    As long as `owner` lives. Workers take indices already between the two.
    """
    _loader_listeners[owner] = before, listener
    _observe_loaders()


@_once
def _observe_loaders() -> None:
    from torch.utils.data import DataLoader

    original = DataLoader.__iter__

    @functools.wraps(original)
    def __iter__(self: Any) -> Any:
        kept = getattr(self, "_iterator", None)
        for owner, (before, _) in list(_loader_listeners.items()):
            before(owner, self)
        iterator = original(self)
        for owner, (_, listener) in list(_loader_listeners.items()):
            listener(owner, self, iterator, kept is None)
        return iterator

    vars_of: Any = DataLoader
    vars_of.__iter__ = __iter__


def call_before_fetch(function: Callable[[Any], None]) -> None:
    """Call `function(indices)` in this process, a DataLoader's worker, before a batch of them is read."""
    from torch.utils.data._utils import fetch

    fetcher: Any = fetch._MapDatasetFetcher
    original = fetcher.fetch

    @functools.wraps(original)
    def seeded(self: Any, indices: Any) -> Any:
        function(indices)
        return original(self, indices)

    fetcher.fetch = seeded


# -- once a run report is asked for ------------------------------------------------------------------------------------

_recorders: list[Any] = []  # one, or none
_marks: list[Any] = []  # its log's `mark`, by which a batch or a backward is told
_hooks: list[Any] = []  # of optimizers, which tell its log


def observe_steps(recorder: Any) -> None:
    """Tell `recorder` (a `phalanx.diagnostics.step_recorder.StepRecorder`) of batches, backwards and updates.

    Where torch has not been imported, from its import on; the one before hears nothing any more.
    """
    _recorders[:] = [recorder]
    _marks[:] = [recorder.log.mark]
    if "torch" in sys.modules:
        _observe_steps()
        _hook_optimizers()


def _hook_optimizers() -> None:
    """The log itself is what torch calls: a function of ours in between costs more than what it does."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    log = _recorders[0].log
    while _hooks:
        _hooks.pop().remove()
    _hooks.append(register_optimizer_step_pre_hook(log.begin_update))
    _hooks.append(register_optimizer_step_post_hook(log.end_update))


@_once
def _observe_steps() -> None:
    """Every line of these runs with cold caches, beside a step that streams its parameters through them: few lines."""
    import torch
    from torch.utils.data import dataloader

    from phalanx.diagnostics.interruptions import is_interruption
    from phalanx.diagnostics.step_machine import (
        BEGIN_BACKWARD,
        BEGIN_DATA,
        END_BACKWARD,
        END_BACKWARD_WITH_LOSS,
        END_DATA,
        NO_DATA,
        WORKERS,
    )

    tensor, marks = torch.Tensor, _marks
    iterators: Any = dataloader._BaseDataLoaderIter
    theirs = iterators.__next__

    @functools.wraps(theirs)
    def __next__(self: Any) -> Any:
        mark = marks[0]
        try:  # an exception of a signal's handler may come up in the first line, too
            mark(BEGIN_DATA)
            batch = theirs(self)
        except BaseException:
            mark(NO_DATA)
            raise
        try:
            first = batch[0] if type(batch) in (list, tuple) and batch else batch
            plain = type(first) is tensor and self._auto_collation and first.dim()
            samples = len(first) if plain else _samples_in(self, batch)
            mark(END_DATA + WORKERS * (1 + self._num_workers), samples)
        except AttributeError:  # an iterator that is none of torch's
            mark(END_DATA)
        return batch

    iterators.__next__ = __next__
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def observed_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        has_scaled, _has_scaled[0] = _has_scaled[0], False
        mark = marks[0]
        try:
            mark(BEGIN_BACKWARD)
            backward(tensors, *args, **kwargs)
        except BaseException:
            mark(END_BACKWARD)
            raise
        if type(tensors) is tensor and tensors.is_cpu and not has_scaled:
            try:
                loss = tensors.item()
            except BaseException as error:  # more than one number, or a tracer's tensor without any
                mark(END_BACKWARD)
                if is_interruption(error):
                    raise
            else:
                mark(END_BACKWARD_WITH_LOSS, loss) if type(loss) is float else mark(END_BACKWARD)
        elif not isinstance(tensors, tensor) or (has_scaled and not hasattr(tensors, "unscaled_loss")):
            mark(END_BACKWARD)  # of several, or of what was made of a scaled loss
        else:
            _recorders[0].end_backward(tensors)

    vars(torch.autograd)["backward"] = observed_backward
    _observe_scaler()


def _samples_in(iterator: Any, batch: Any) -> float:
    """What a DataLoader has given: 1 where it makes no batches (batch_size=None); 0.0 where that is not known."""
    from phalanx.diagnostics.sample_count import count_samples

    return (count_samples(batch) or 0.0) if getattr(iterator, "_auto_collation", True) else 1.0


_has_scaled = [False]  # a GradScaler has, since the last backward


def _observe_scaler() -> None:
    """Let what `GradScaler.scale` returns know the loss that it was: the backward begins from a scaled one.

    Those of subclasses, too: FSDP's ShardedGradScaler has a `scale` of its own. One that is imported later is seen when
    the first of its kind is made.
    """
    import torch

    base: Any = torch.amp.GradScaler
    begin = base.__init__

    @functools.wraps(begin)
    def observed_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        for kind in type(self).__mro__:
            _observe_scale(kind)
        begin(self, *args, **kwargs)

    base.__init__ = observed_begin
    kinds = [base]
    for kind in kinds:
        _observe_scale(kind)
        kinds += kind.__subclasses__()


def _observe_scale(kind: Any) -> None:
    """The `scale` that this class has itself."""
    import torch

    theirs = vars(kind).get("scale")
    if theirs is None or hasattr(theirs, "__wrapped__"):
        return

    @functools.wraps(theirs)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = theirs(self, outputs)
        if scaled is not outputs:
            _has_scaled[0] = True
            if isinstance(outputs, torch.Tensor) and isinstance(scaled, torch.Tensor):
                scaled.unscaled_loss = outputs.detach()  # type: ignore[attr-defined]
        return scaled

    kind.scale = scale


# -- once a worker of `phalanx.rpc` starts ----------------------------------------------------------------------------


def collect_calls(has_calls: Callable[[Any], bool], collect_all: Callable[[Any], Any]) -> None:
    """Let `torch.futures.collect_all` and `wait_all` go through `collect_all` for futures that `has_calls` knows."""
    _collectors[:] = [(has_calls, collect_all)]
    _collect_calls()


_collectors: list[tuple[Callable[[Any], bool], Callable[[Any], Any]]] = []


@_once
def _collect_calls() -> None:
    import torch

    functions: Any = torch._C
    original = functions._collect_all

    def collect(futures: Any) -> Any:
        has_calls, collect_all = _collectors[0]
        ours = isinstance(futures, list | tuple) and has_calls(futures)
        return (collect_all if ours else original)(futures)

    functions._collect_all = collect


# -- once backend "mpi" is asked for, and torch was built without MPI --------------------------------------------------


@_once
def _serve_mpi() -> None:
    """Let backend "mpi" work through mpi4py; `is_mpi_available()` says so only from then on: libraries choose by it."""
    c10d = _c10d()
    helper = c10d._new_process_group_helper
    signature = inspect.signature(helper)

    @functools.wraps(helper)
    def new_process_group(*args: Any, **kwargs: Any) -> Any:
        if "mpi" not in str(signature.bind(*args, **kwargs).arguments["backend"]):
            return helper(*args, **kwargs)
        module = importlib.import_module("phalanx.backend.mpi.torch_hook")
        return module.new_process_group(helper, _give_torch_mpi, *args, **kwargs)

    vars(c10d)["_new_process_group_helper"] = new_process_group


def _give_torch_mpi(create: Callable[[Any], Any]) -> None:
    """torch makes a group of backend "mpi" where this flag is set, and by that name."""
    vars(_c10d()).update(_MPI_AVAILABLE=True, ProcessGroupMPI=types.SimpleNamespace(create=create))
