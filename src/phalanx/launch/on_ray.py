"""Run a job on an existing Ray cluster: `phalanx run --on ray`, and `phalanx.launch.ray(fn)` from a driver.

    the driver ── a placement group, STRICT_SPREAD ──► one actor on each Ray node ──► an agent, as `phalanx run` there
               ◄── what the agents say, and what the ranks returned ──

Ray places, carries the job's key (in its object store, never on a command line) and tells of the end of a node; it does
nothing between the ranks. An agent dies with its actor, and Ray ends the actors with the driver.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.agent.settings import USAGE_EXIT_CODE
from phalanx.agent.verdict import Verdict
from phalanx.errors import LaunchError
from phalanx.launch.calls import call, payload
from phalanx.launch.calls.rank import payload_path, surroundings_path
from phalanx.launch.command_line import parse
from phalanx.launch.options import OPTIONS, find_names

_READ_BYTES = 1 << 16
_PLACED_S = 60.0
_CONNECT_S = 10.0
_CLOSED_S = 5.0
_KEY = "key"
_MODULE = ("-m", "phalanx.launch.calls")


class NodeAgent:
    """It is the actor: an agent on the Ray node where it is. Its methods run in threads of their own."""

    def __init__(self) -> None:
        self._agent: subprocess.Popen[bytes] | None = None
        self._open = contextlib.ExitStack()
        self._folder = self._open.enter_context(call.opened_folder())

    def find_place(self) -> tuple[str, int]:
        """Return an address of this node that the others reach, and a port that is free there."""
        import ray.util

        with socket.socket() as sock:
            sock.bind(("", 0))
            return ray.util.get_node_ip_address(), sock.getsockname()[1]

    def run(
        self, words: Sequence[str], key: str, folder: str, files: Mapping[str, bytes], told: bool
    ) -> Iterator[tuple[int, bytes]]:
        """Start the agent, and yield what it says: (1, stdout) and (2, stderr), at last (0, its exit code).

        `files` are put into a folder, whose name FOLDER in the words stands for. `told`: the driver has the last word.
        """
        own = self._folder
        if told:
            words = [own if word == "FOLDER" else word for word in words]
        for name, data in files.items():
            Path(own, name).write_bytes(data)
        # A file, and no variable: what ranks start would inherit that.
        key_file = os.open(os.path.join(own, _KEY), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(key_file, "w") as file:
            file.write(key)
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self._agent = agent = subprocess.Popen(
            [sys.executable, "-c", call.BOOT, str(os.getpid()), os.path.join(own, "verdict") if told else "",
             f"--key-file={own}/{_KEY}", *words],
            cwd=folder if os.path.isdir(folder) else None,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        yield from _read(agent)
        yield 0, str(agent.wait()).encode()

    def signal(self, signum: int) -> None:
        if self._agent is not None and self._agent.poll() is None:
            self._agent.send_signal(signum)

    def read_files(self) -> dict[str, bytes]:
        """Return what lies in the agent's folder at the end: outcomes and the verdict."""
        names = [name for name in os.listdir(self._folder) if name == "verdict" or name.startswith("outcome-")]
        return {name: Path(self._folder, name).read_bytes() for name in names if not name.endswith(".draft")}

    def close(self) -> None:
        self._open.close()


def _read(agent: subprocess.Popen[bytes]) -> Iterator[tuple[int, bytes]]:
    import selectors

    with selectors.DefaultSelector() as selector:
        for number, pipe in ((1, agent.stdout), (2, agent.stderr)):
            assert pipe is not None
            selector.register(pipe, selectors.EVENT_READ, number)
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, _READ_BYTES)
                if data:
                    yield key.data, data
                else:
                    selector.unregister(key.fileobj)


def run_on_ray(words: Sequence[str]) -> int:
    """Do `phalanx run --on ray` with the other words; return the exit code.

    Raises:
        LaunchError: Ray is not installed, there is no cluster, or it has no room for the job.
    """
    settings = parse(words)
    assert settings is not None, "the help does not come here"
    nnodes = settings.rendezvous.max_nodes if settings.rendezvous else 0
    write = {1: _writer(1), 2: _writer(2)}
    code, _ = _run(words, settings.nproc, nnodes, {}, write, told=False)
    return code


def launch_on_ray(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nproc_per_node: int | str = "auto",
    nnodes: int | None = None,
    **options: object,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in every rank on the Ray cluster of this driver; return what each returned.

    Arguments:
        nnodes: Ray nodes to use, one agent on each (default: all that have room).
        nproc_per_node, options: as of `phalanx.launch`. A rank gets one CPU of Ray's, or one GPU.

    Raises:
        LaunchError: Ray is not installed, there is no cluster, or it has no room for the job; and as `phalanx.launch`.
        Exception: as `phalanx.launch`.
    """
    name, data, words = call.prepare(fn, args, kwargs or {}, nproc_per_node=nproc_per_node, **options)
    files = {payload_path("").name: data, surroundings_path("").name: payload.encode_surroundings()}
    write = {1: _shown(sys.stdout), 2: _shown(sys.stderr)}
    code, results = _run([*words, *_MODULE, "FOLDER"], str(nproc_per_node), nnodes or 0, files, write, told=True)
    with call.opened_folder() as folder:
        for name_of_file, content in results.items():
            Path(folder, name_of_file).write_bytes(content)
        return call.collect(name, folder, Verdict.read(os.path.join(folder, "verdict")), code)


def _run(
    words: Sequence[str],
    nproc: str,
    nnodes: int,
    files: Mapping[str, bytes],
    write: Mapping[int, Callable[[bytes], None]],
    *,
    told: bool,
) -> tuple[int, dict[str, bytes]]:
    """Return the exit code of the first node's agent, and the files that all left; of equal names the first's."""
    from phalanx.coordination.key import Key

    with _cluster() as ray, _actors(ray, nproc, nnodes) as (actors, ranks):
        address, port = ray.get(actors[0].find_place.remote())
        key = str(Key.generate())
        generators = []
        for node, actor in enumerate(actors):
            place = [
                f"--nnodes={len(actors)}",
                f"--node-rank={node}",
                f"--master-addr={address}",
                f"--master-port={port}",
            ]
            where = place if len(actors) > 1 else []
            own = [f"--nproc-per-node={ranks}", *where, *_without_places(words)]
            run = actor.run.options(num_returns="streaming")
            generators.append(run.remote(own, key, os.getcwd(), dict(files), told))
        codes = _show_all(ray, actors, generators, write)
        left: dict[str, bytes] = {}
        if told:
            for one in ray.get([actor.read_files.remote() for actor in actors]):
                left = {**one, **left}
        return codes[0], left


def _show_all(
    ray: Any, actors: Sequence[Any], generators: Sequence[Any], write: Mapping[int, Callable[[bytes], None]]
) -> list[int]:
    """Show what the agents say until they have ended; their exit codes."""
    codes = [1] * len(generators)
    problems: list[BaseException] = []
    lock = threading.Lock()

    def follow(node: int) -> None:
        try:
            for item in generators[node]:
                stream, data = ray.get(item)
                with lock:
                    if stream == 0:
                        codes[node] = int(data)
                    else:
                        write[stream](data)
        except BaseException as error:  # the actor has gone, with its node
            problems.append(error)

    threads = [threading.Thread(target=follow, args=(node,), name=f"phalanx-ray-{node}") for node in range(len(actors))]
    for thread in threads:
        thread.start()
    interrupts = 0
    while True:
        try:
            for thread in threads:
                thread.join()
            break
        except KeyboardInterrupt:
            interrupts += 1
            for actor in actors[: 1 if interrupts == 1 else None]:  # the first node ends all
                actor.signal.remote(signal.SIGINT)
    if interrupts:
        raise KeyboardInterrupt
    if problems:
        raise LaunchError(f"phalanx run --on ray: a node of the job is gone: {problems[0]}") from problems[0]
    return codes


@contextlib.contextmanager
def _cluster() -> Iterator[Any]:
    """Connect Ray to its cluster; disconnect it again if nobody was connected before."""
    try:
        import ray
    except ImportError:
        raise LaunchError(
            "phalanx run --on ray: Ray is not installed in this Python. pip install ray, the cluster's version.",
            exit_code=USAGE_EXIT_CODE,
        ) from None
    if ray.is_initialized():
        yield ray
        return
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        _try(address)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except OSError as error:  # ConnectionError is one of them
        raise LaunchError(
            f"phalanx run --on ray: no Ray cluster answers: {str(error).splitlines()[0]}\n"
            "Run this on one of its nodes, or set RAY_ADDRESS; `ray start --head` starts one.",
            exit_code=USAGE_EXIT_CODE,
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _try(address: str) -> None:
    """Return whether anybody listens there, if it is HOST:PORT: else Ray ends this process after a while."""
    host, _, port = address.rpartition(":")
    if host and "/" not in address and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()


@contextlib.contextmanager
def _actors(ray: Any, nproc: str, nnodes: int) -> Iterator[tuple[list[Any], int]]:
    """Yield an actor on each of the nodes, and how many ranks each starts."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    count, ranks, bundle = plan_bundles(nodes, nproc, nnodes)
    group = placement_group([bundle] * count, strategy="STRICT_SPREAD")
    actors: list[Any] = []
    try:
        try:
            ray.get(group.ready(), timeout=_PLACED_S)
        except ray.exceptions.GetTimeoutError:
            raise LaunchError(
                f"phalanx run --on ray: {count} nodes with {_describe(bundle)} free on each could not be had within "
                f"{_PLACED_S:.0f} s. `ray status` shows who has them; ask for less: --nnodes, --nproc-per-node."
            ) from None
        remote = ray.remote(NodeAgent)
        for index in range(count):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            actors.append(
                remote.options(
                    num_cpus=bundle.get("CPU", 0),
                    num_gpus=bundle.get("GPU", 0),
                    max_concurrency=4,
                    scheduling_strategy=strategy,
                ).remote()
            )
        yield actors, ranks
    finally:
        with contextlib.suppress(Exception):  # a node that has gone
            ray.get([actor.close.remote() for actor in actors], timeout=_CLOSED_S)
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def plan_bundles(nodes: Sequence[Mapping[str, float]], nproc: str, nnodes: int) -> tuple[int, int, dict[str, float]]:
    """Return how many nodes there are, how many ranks on each, and what each needs of Ray.

    A rank takes a GPU where there are some (or "gpu" asks for them), else a CPU; as many on each node as on the
    smallest. `nnodes` is 0 for all nodes that Ray runs tasks on.

    Raises:
        LaunchError: the cluster has not so much.
    """
    usable = sorted((node for node in nodes if node.get("CPU", 0) >= 1), key=lambda node: -node.get("CPU", 0))
    wants_gpu = nproc == "gpu" or (nproc == "auto" and any(node.get("GPU", 0) >= 1 for node in usable))
    if wants_gpu:
        usable = sorted((node for node in usable if node.get("GPU", 0) >= 1), key=lambda node: -node["GPU"])
    count = nnodes or len(usable)
    kind = "GPU" if wants_gpu else "CPU"
    if count > len(usable) or not usable:
        raise LaunchError(
            f"phalanx run --on ray: {max(1, count)} nodes with {kind}s asked for, and the cluster has {len(usable)}.",
            exit_code=USAGE_EXIT_CODE,
        )
    chosen = usable[:count]
    most = int(min(node[kind] for node in chosen))
    ranks = int(nproc) if nproc.isdecimal() else most
    if wants_gpu:
        return count, ranks, {"GPU": float(ranks), "CPU": min(float(ranks), *(node["CPU"] for node in chosen))}
    if ranks > most:  # more ranks than cores is the user's choice: the nodes are theirs, whole
        return count, ranks, {"CPU": float(most)}
    return count, ranks, {"CPU": float(ranks)}


def _describe(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {kind}{'s' * (amount != 1)}" for kind, amount in bundle.items())


def _without_places(words: Sequence[str]) -> list[str]:
    """Return the words without --on, --nnodes and --nproc-per-node in front of the target: they have been followed."""
    rest, kept = list(words), []
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        name, separator, _ = word.partition("=")
        plain = name.lstrip("-").replace("_", "-")
        if len(names := find_names(plain)) == 1:
            plain = names[0]
        if plain in ("on", "nnodes", "nproc-per-node"):
            if not separator:
                rest.pop(0)
            continue
        kept.append(word)
        if not separator and rest and not rest[0].startswith("-") and _takes_value(plain):
            kept.append(rest.pop(0))
    return [*kept, *rest]


def _takes_value(name: str) -> bool:
    return any(option.value for option in OPTIONS if name in (option.name, option.short))


def _writer(fd: int) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        while data:
            data = data[os.write(fd, data) :]

    return write


def _shown(stream: Any) -> Callable[[bytes], None]:
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(data: bytes) -> None:
        stream.write(decoder.decode(data))
        stream.flush()

    return write
