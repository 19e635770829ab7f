"""Create the process group for torch: the ranks rendezvous and share memory, or use Gloo if they cannot."""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

from torch.distributed import PrefixStore

from phalanx._base.deadline import Deadline
from phalanx._base.host_addresses import interface_addresses, is_public
from phalanx._base.ipc.local_listener import new_token
from phalanx._base.log import get_logger, warn_once
from phalanx._base.processes import observe_uncaught
from phalanx._base.torch_versions import describe_untested
from phalanx._comm.backend import device_backends
from phalanx._comm.backend.connect import RendezvousGroup, build_engine, open_gloo
from phalanx._comm.backend.open_memory import advice, open_symmetric_memory
from phalanx._comm.backend.process_group import PhalanxProcessGroup
from phalanx._comm.backend.process_group.group import leave_all, open_groups
from phalanx._comm.backend.reconfiguration import Reconfiguration, unconnected
from phalanx._comm.backend.rendezvous import find_lost_host, is_rehearsing, own_address
from phalanx._comm.backend.tcp_store import is_served_here
from phalanx._comm.control.wire import WRITE_ONCE
from phalanx._comm.diagnostics.failure_report import FailureReport
from phalanx._comm.diagnostics.failure_signals import FailureSignals
from phalanx._comm.diagnostics.failure_store import FailureStore
from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._comm.engines.gloo import local_address
from phalanx._comm.rendezvous.bootstrap import Bootstrap, exchange
from phalanx._comm.rendezvous.rank_info import RankInfo, host_identity
from phalanx._comm.rendezvous.torch_store import base_of
from phalanx._comm.symmetric_memory import memfd
from phalanx._comm.symmetric_memory.fd_server import FdServer
from phalanx._comm.symmetric_memory.liveness_pipe import why_unwatched
from phalanx._comm.symmetric_memory.watch import ProcessId
from phalanx._comm.transport.authentication import PickleAuthenticator
from phalanx._comm.transport.base import CallContext, Transport
from phalanx._comm.transport.gloo.session import GlooSession
from phalanx._comm.transport.gloo.transport import GlooTransport
from phalanx._comm.transport.hierarchical.layout import Layout
from phalanx._comm.transport.options import Options
from phalanx._comm.transport.rehearsal import RehearsalTransport
from phalanx.errors import PhalanxError

try:
    from phalanx import _core
except ImportError:  # there was no compiler at installation, or the platform has no futex
    _core = None  # type: ignore[assignment]

_logger = get_logger(__name__)
_NO_CORE = "the C core was not built (reinstall with a C compiler)"


def create_process_group(options: Any, backend_options: Any = None) -> Any:
    """Create the process group of `init_process_group("phalanx")` and `new_group`.

    All ranks of the group call this. `backend_options` is the user's `pg_options`: a `phalanx.Options`, or None. The
    group is a `PhalanxProcessGroup`, over the memory of one host or across several. If memory cannot be shared even
    inside a host (for example, without the C core), torch's Gloo runs all operations, which is logged once.

    Raises:
        ValueError: the timeout is not above zero, or the ranks were given different options.
        TypeError: `backend_options` has another type.
        DeadlineError: some rank did not join; the message names it, on every rank that did.
        PhalanxError: the hosts cannot reach each other, or the memory or the engine cannot be opened.
    """
    # For "cuda:nccl,cpu:phalanx" torch also passes us the options that it has filled in for NCCL.
    if backend_options is not None and getattr(backend_options, "group_name", None) == options.group_id:
        backend_options = None
    if backend_options is not None and not isinstance(backend_options, Options):
        raise TypeError(
            "init_process_group: backend 'phalanx' takes pg_options=phalanx.Options(...), "
            f"got {type(backend_options).__name__}"
        )
    if getattr(options, "enable_reconfigure", False) and not is_rehearsing():
        return _unconnected_group(options, backend_options)
    group = _new_group(options, open_transport(options, backend_options))
    group.backend_options = backend_options
    return group


def _new_group(options: Any, transport: Transport) -> Any:
    rank, size, name = options.group_rank, options.group_size, options.group_id
    group = _group_class()(options.store, transport, rank, size, options.timeout, name, options.global_ranks_in_group)
    group.create_group = create_process_group
    return group


def _unconnected_group(options: Any, backend_options: Any) -> Any:
    """Return a group without peers; `reconfigure` adds members."""
    if options.timeout <= timedelta(0):
        raise ValueError(f"init_process_group: timeout must be above zero, got {options.timeout.total_seconds():g} s")
    group = _new_group(options, unconnected(options.group_id, options.group_rank, options.group_size))
    group.reconfiguration = Reconfiguration(
        options.store, options.group_rank, lambda changed: open_transport(changed, backend_options)
    )
    return group


def open_transport(options: Any, backend_options: Options | None) -> Transport:
    """Find the group's ranks, and return the transport to them. Collective; raise as `create_process_group` does."""
    settings = _with_variables(backend_options if backend_options is not None else Options())
    timeout: timedelta = options.timeout
    if timeout <= timedelta(0):
        raise ValueError(f"init_process_group: timeout must be above zero, got {timeout.total_seconds():g} s")
    deadline = Deadline.after(timeout)
    store, rank, size = options.store, options.group_rank, options.group_size
    name = options.group_id
    if rank == 0 and (untested := describe_untested(sys.modules["torch"].__version__)):
        warn_once(_logger, f"{untested}. If something does not work, run `phalanx doctor`")
    if is_rehearsing():
        return RehearsalTransport(name, rank, size)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_explained_shortage(f"init_process_group of group {name!r} on rank {rank}"))
        server, obstacle = _open_fd_server() if _core is not None else (None, _NO_CORE)
        if server is not None:
            stack.enter_context(server)
        mine = _rank_info(server, obstacle, store, settings)
        bootstrap = exchange(store, rank, size, mine, name, deadline, is_further=bool(open_groups()))
        infos = bootstrap.infos
        if problem := _differing_options(infos):
            bootstrap.acknowledge_failure()
            raise ValueError(f"init_process_group of group {name!r}: {problem}")
        reason = _cannot_share(infos)
        if reason:
            settings = replace(settings, engine="gloo")
        one_host = len({info.host for info in infos}) == 1
        needs_engine = not one_host or bool(reason)
        if needs_engine and (problem := _wrong_interface(infos, settings) or _public_address_problem(infos, settings)):
            bootstrap.acknowledge_failure()
            raise PhalanxError(f"init_process_group of group {name!r} on rank {rank}: {problem}")
        if reason:
            warn_once(_logger, f"backend 'phalanx': {reason}; using Gloo for group {name!r}")
            transport = _over_gloo(bootstrap, options, settings, deadline)
        elif one_host:
            assert server is not None
            transport = _share(server, bootstrap, options, deadline)
        else:
            assert server is not None
            transport = _connect(server, bootstrap, options, settings, deadline)
    _leave_at_exit()
    return transport


def _with_variables(settings: Options) -> Options:
    """Return `settings` with unset options filled from environment variables."""
    interface = settings.interface or os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0] or None
    allowed = settings.allow_public_address or os.environ.get("PHALANX_ALLOW_PUBLIC_ADDRESS", "") == "1"
    return replace(settings, interface=interface, allow_public_address=allowed)


def _interface_problem(settings: Options) -> str:
    """Return why the configured network interface cannot be used, with its source and the alternatives; or ""."""
    here = interface_addresses()  # empty if the system does not list them
    if settings.interface is None or settings.interface in here or not here:
        return ""
    variable = os.environ.get("GLOO_SOCKET_IFNAME", "")
    named = f"Options(interface={settings.interface!r})"
    if variable.partition(",")[0] == settings.interface:
        named = f"GLOO_SOCKET_IFNAME={variable}"
    known = settings.interface in (name for _, name in socket.if_nameindex())
    fact = "has no address" if known else "does not exist"
    there = ", ".join(f"{name} ({addresses[0]})" for name, addresses in here.items())
    return f"{named}: interface {settings.interface!r} {fact} on {os.uname().nodename}, which has {there}"


def _wrong_interface(infos: Sequence[RankInfo], settings: Options) -> str:
    """Return which ranks lack their configured interface, or ""; the result is the same on every rank."""
    if settings.engine != "gloo":
        return ""
    problems: dict[str, list[int]] = {}
    for r, info in enumerate(infos):
        if info.interface_problem:
            problems.setdefault(info.interface_problem, []).append(r)
    if not problems:
        return ""
    lines = "\n".join(f"  {name_ranks(which)}: {problem}" for problem, which in problems.items())
    advice = "Name an interface listed here, exactly as written, or none: the default is the route to the job's store."
    return f"no such network interface.\n{lines}\n{advice}"


def _public_address_problem(infos: Sequence[RankInfo], settings: Options) -> str:
    """Return why an engine must not send tensors between these ranks, or ""; the result is the same on every rank."""
    if settings.allow_public_address or settings.engine != "gloo":
        return ""
    public = {info.address: info.hostname for info in infos if is_public(info.address)}
    if not public:
        return ""
    where = ", ".join(f"{address} on {hostname}" for address, hostname in public.items())
    return (
        f"tensors would be sent to and from {where}: {'public addresses' if len(public) > 1 else 'a public address'}, "
        "which anyone on the internet can reach. Between hosts, tensors are neither encrypted nor authenticated.\n"
        "Use a private network or a VPN such as WireGuard; select it with MASTER_ADDR or the address of the "
        "coordinator, with pg_options=phalanx.Options(interface=...), or with GLOO_SOCKET_IFNAME. If a firewall admits "
        "only these hosts, pass Options(allow_public_address=True), or set PHALANX_ALLOW_PUBLIC_ADDRESS=1 on every "
        "rank. `phalanx docs security` prints the address of the explanation."
    )


def _open_fd_server() -> tuple[FdServer | None, str]:
    """Return the server from which this host's ranks fetch memory, or why this process cannot share memory."""
    if reason := memfd.obstacle():
        return None, reason
    try:
        return FdServer(new_token()), ""
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None, f"Unix sockets are not available ({error.strerror})"


def _rank_info(server: FdServer | None, obstacle: str, store: Any, settings: Options) -> RankInfo:
    return RankInfo(
        host=host_identity(),
        hostname=os.uname().nodename,
        token=str(server.address) if server else "",
        process=ProcessId.of_self(),
        cpus=frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset(),
        core=_core.VERSION if _core is not None else 0,
        address=_my_address(store, settings),
        agreed=settings.agreed(),
        obstacle=obstacle,
        keeps_store=is_served_here(base_of(store)),
        interface_problem=_interface_problem(settings),
        secret=new_token(),
    )


def _my_address(store: Any, settings: Options) -> str:
    """Return the address at which other hosts reach this rank; "" for a store in a file.

    It is the address of the configured interface; else the agents' address; else that of the route to the job's store.
    """
    if settings.interface and (addresses := interface_addresses().get(settings.interface)):
        return next(filter(is_public, addresses), addresses[0])  # the engine may use any of them
    if address := own_address():
        return address
    host = getattr(base_of(store), "host", "")
    with contextlib.suppress(OSError):
        return local_address(host) if host else ""
    return ""


def _differing_options(infos: Sequence[RankInfo]) -> str:
    if len({info.agreed for info in infos}) == 1:
        return ""
    return "the ranks were given different options.\n" + "\n".join(
        f"  rank {r}: {info.agreed}" for r, info in enumerate(infos)
    )


def _cannot_share(infos: Sequence[RankInfo]) -> str:
    """Return why these ranks cannot share memory, or ""; the result is the same on every rank."""
    hindered: dict[str, list[int]] = {}
    for r, info in enumerate(infos):
        if info.obstacle:
            hindered.setdefault(info.obstacle, []).append(r)
    if hindered:
        return "; ".join(f"on {name_ranks(which)} {obstacle}" for obstacle, which in hindered.items())
    if len({info.core for info in infos}) > 1:
        return "the ranks run different versions of Phalanx"
    hosts = {info.host for info in infos}
    return next(filter(None, (why_unwatched([s.process for s in infos if s.host == host]) for host in hosts)), "")


def _share(server: FdServer, bootstrap: Bootstrap, options: Any, deadline: Deadline) -> Transport:
    # imported here, because it needs the C core
    from phalanx._comm.transport.shared_memory import SharedMemoryTransport

    infos = bootstrap.infos
    transport = SharedMemoryTransport(options.group_id)
    symm_mem = open_symmetric_memory(server, infos, range(len(infos)), options, deadline, transport.idle)
    transport.attach(symm_mem)
    return _complete(transport, bootstrap, options, deadline)


def _group_class() -> Any:
    """Return the class of new groups: only a process with an engine for another device must check tensors' devices."""
    if device_backends.available():
        from phalanx._comm.backend.process_group.devices import RoutedProcessGroup

        return RoutedProcessGroup
    return PhalanxProcessGroup


@contextlib.contextmanager
def _explained_shortage(here: str) -> Iterator[None]:
    """Add the limit and advice to an error in the block that reports a lack of descriptors or memory.

    Raises:
        PhalanxError: descriptors or memory ran out in the block.
    """
    try:
        yield
    except MemoryError:  # Python's own, which has no text
        raise PhalanxError(f"{here}: {os.strerror(errno.ENOMEM)}.\n{advice(errno.ENOMEM)}") from None
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        raise PhalanxError(f"{here}: {error.strerror}.\n{advice(error.errno)}") from None


def _connect(server: FdServer, bootstrap: Bootstrap, options: Any, settings: Options, deadline: Deadline) -> Transport:
    """Share memory on each host, and build the engine between all ranks."""
    # imported here, since it needs the C core
    from phalanx._comm.transport.hierarchical.session import HierarchicalSession
    from phalanx._comm.transport.hierarchical.transport import HierarchicalTransport

    rank, name, infos = options.group_rank, options.group_id, bootstrap.infos
    layout = Layout.of([info.host for info in infos], rank)
    token = infos[0].token
    processes = [f"pid {s.process.pid} on {s.hostname} {s.address}" for s in infos]
    session = HierarchicalSession(name, layout, settings, processes, options.global_ranks_in_group)
    transport = HierarchicalTransport(session)
    symm_mem = open_symmetric_memory(server, infos, layout.local_ranks, options, deadline, session.idle)
    failure_store = _open_failure_store(options, token, infos, processes)
    try:
        group = RendezvousGroup(name, token, options.store, infos, layout)
        engine = build_engine(group, settings, deadline, failure_store)
    except BaseException:
        symm_mem.close()
        raise
    transport.pickles = PickleAuthenticator(infos[0].secret, name)
    transport.attach(symm_mem, engine, failure_store)
    return _complete(transport, bootstrap, options, deadline)


def _complete(transport: Transport, bootstrap: Bootstrap, options: Any, deadline: Deadline) -> Transport:
    """Return the transport once all ranks have it: from then on, a failure is reported on every rank."""
    try:
        if options.group_rank == 0:
            bootstrap.forget()
        transport.barrier(CallContext(max(deadline.left_s, 0.001), transport.call_site(("", 0))))
    except BaseException:
        transport.close()
        raise
    return transport


def _report_lost_host(global_ranks: Sequence[int], processes: Sequence[str]) -> FailureReport | None:
    """Return the agent's report of a lost host as a report for this group; None if no rank of the group is lost."""
    lost = find_lost_host()
    lost_ranks = [r for r, global_rank in enumerate(global_ranks) if lost is not None and global_rank in lost.ranks]
    if lost is None or not lost_ranks:
        return None
    return FailureReport(
        "lost", ranks=tuple(lost_ranks), processes={r: processes[r] for r in lost_ranks}, reason=lost.reason
    )


def _open_failure_store(
    options: Any, group_key: str, infos: Sequence[RankInfo], processes: Sequence[str]
) -> FailureStore:
    """Open the group's failure store; groups share a connection, and `group_key` distinguishes this one."""
    store, size = base_of(options.store), len(infos)
    signals = _signals_of(store)
    return FailureStore(
        PrefixStore("phalanx", signals.connection),
        group_key,
        options.group_rank,
        size,
        signals,
        server_rank=next((r for r, info in enumerate(infos) if info.keeps_store), -1),
        address=(store.host, store.port) if getattr(store, "host", "") else None,
        find_lost_host=lambda: _report_lost_host(options.global_ranks_in_group or range(size), processes),
        waits_in_store=getattr(store, "wait_is_interruptible", False),
    )


_signals: WeakValueDictionary[tuple[int, int], FailureSignals] = WeakValueDictionary()  # keyed by process and store


def _signals_of(store: Any) -> FailureSignals:
    """Return the failure signals in `store`; all groups of this process with that store share the object."""
    key = (os.getpid(), id(store))
    signals = _signals.get(key)
    if signals is None:
        signals = _signals[key] = FailureSignals(store, WRITE_ONCE)  # a signal never changes
    return signals


def _over_gloo(bootstrap: Bootstrap, options: Any, settings: Options, deadline: Deadline) -> Transport:
    """Connect the ranks through Gloo, even on one host, because they cannot share memory."""
    rank, name, infos = options.group_rank, options.group_id, bootstrap.infos
    layout = Layout.of([info.host for info in infos], rank)
    processes = [f"{info} {info.address}".rstrip() for info in infos]
    key = hashlib.blake2b(infos[0].secret.encode(), digest_size=16).hexdigest()
    failure_store = _open_failure_store(options, key, infos, processes)
    group = RendezvousGroup(name, key, options.store, infos, layout)
    # one thread, because the transport runs one collective at a time
    engine = open_gloo(group, settings, deadline, failure_store, num_threads=1)
    session = GlooSession(name, engine, failure_store, processes, lambda r: infos[r].has_ended(infos[rank]))
    transport = GlooTransport(session)
    transport.pickles = PickleAuthenticator(infos[0].secret, name)
    return _complete(transport, bootstrap, options, deadline)


_exit_watched = False
_exit_reason = ""


def _leave_at_exit() -> None:
    """Leave all open groups at exit, before MPI waits for all ranks, and notify their peers of the reason.

    A group is open if the program has not called `destroy_process_group`.
    """
    global _exit_watched
    atexit.unregister(_leave)
    atexit.register(_leave)  # the last function registered is the first to run
    if _exit_watched:
        return
    _exit_watched = True
    observe_uncaught(_remember)


def _remember(error: BaseException) -> None:
    global _exit_reason
    _exit_reason = f"it ended with {type(error).__name__}: {error}"


def _leave() -> None:
    from phalanx._comm.diagnostics.failure_report import QUIET_END

    leave_all(_exit_reason or QUIET_END)
