"""Real sshd's for the tests: one in each network namespace, with an address, a host key and an account of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import Host, hosts

_SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
_PORT = 2222  # the client's configuration knows it, and nobody else
_USER = "trainer"


def why_no_sshd() -> str:
    """Why no host can be reached over ssh here, or "": for `pytest.mark.skipif`."""
    if reason := why_no_hosts():
        return reason
    if _SSHD is None or shutil.which("ssh") is None:
        return "OpenSSH's server or client is not there (openssh-server, openssh-client)"
    return ""


@dataclass(frozen=True)
class SshHost:
    """A host with an sshd: `server` is its process, `folder` has its files."""

    machine: Host
    server: subprocess.Popen[bytes]
    folder: Path

    @property
    def address(self) -> str:
        return self.machine.address

    def pids(self) -> list[int]:
        """The processes on this host, without sshd."""
        return [pid for pid, name in find_processes(self.machine) if name != "sshd"]

    def sessions(self) -> list[int]:
        """The processes of sshd that each serve a connection."""
        children = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children")
        return [int(pid) for pid in children.read_text().split()]


def find_processes(machine: Host) -> list[tuple[int, str]]:
    """The processes of a network namespace, with their names."""
    network = os.stat(f"/run/netns/{machine.name}").st_ino
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            if os.stat(f"/proc/{entry}/ns/net").st_ino == network:
                found.append((int(entry), Path(f"/proc/{entry}/comm").read_text().strip()))
    return found


@dataclass(frozen=True)
class SshHosts:
    """Hosts with sshd's, and `terminal`, which is none of them and reaches them."""

    hosts: Sequence[SshHost]
    terminal: Host
    folder: Path

    @property
    def names(self) -> str:
        return ",".join(host.address for host in self.hosts)

    @property
    def ssh(self) -> str:
        """The ssh command with this test's configuration, and nobody else's."""
        return f"ssh -F {self.folder}/config"

    def words(self, *words: str, hosts: str = "") -> tuple[str, ...]:
        """A command line that starts a job on `hosts`, by default all of them."""
        return ("run", "--hosts", hosts or self.names, "--ssh", self.ssh, *words)

    def configure(self, *lines: str) -> None:
        """Put lines in front of the client's configuration: the first value of an option counts."""
        path = self.folder / "config"
        path.write_text("\n".join(lines) + "\n" + path.read_text())

    def left(self) -> list[list[int]]:
        return [host.pids() for host in self.hosts]


@contextlib.contextmanager
def ssh_hosts(
    count: int,
    folder: Path,
    *,
    shell: str = "/bin/bash",
    home: Mapping[str, str] | None = None,
    uid: int = 0,
    mounts: Mapping[int, str] | None = None,
    dead_end: bool = False,
    banner: str = "",
) -> Iterator[SshHosts]:
    """Yield `count` hosts with an sshd each, in `folder`; nothing of them is left on the way out.

    Arguments:
        shell: the login shell of the account.
        home: files of its home folder, by name.
        uid: the number of its user.
        mounts: commands of sh that mount something for one host alone, by the host's number.
        dead_end: as in `hosts`.
        banner: what sshd tells everybody before the login.
    """
    assert _SSHD is not None
    keys = folder / "ssh"
    keys.mkdir(mode=0o755)
    _make_key(keys / "id")
    os.makedirs("/run/sshd", exist_ok=True)
    account = keys / "home"
    account.mkdir()
    for name, text in (home or {}).items():
        (account / name).parent.mkdir(parents=True, exist_ok=True)
        (account / name).write_text(text)
    (keys / "banner").write_text(banner)
    (keys / "passwd").write_text(
        Path("/etc/passwd").read_text() + f"{_USER}:x:{uid}:{uid}:a test's:{account}:{shell}\n"
    )
    with contextlib.ExitStack() as stack:
        machines = stack.enter_context(hosts(count + 1, dead_end=dead_end))
        made, known = [], ""
        for number, machine in enumerate(machines[:count]):
            own = keys / f"host-{number}"
            own.mkdir()
            _make_key(own / "key")
            known += f"[{machine.address}]:{_PORT} {(own / 'key.pub').read_text()}"
            (own / "config").write_text(
                f"Port {_PORT}\nHostKey {own}/key\nPidFile {own}/pid\nAuthorizedKeysFile {keys}/id.pub\nUsePAM no\n"
                "StrictModes no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nMaxStartups 100\n"
                f"Banner {keys}/banner\n"
            )
            words = f'mount --bind "$1" /etc/passwd; {(mounts or {}).get(number, "true")}; shift; exec "$@"'
            line = ["unshare", "--mount", "sh", "-c", words, "sh", str(keys / "passwd"), _SSHD, "-D", "-e", "-f",
                    f"{own}/config"]  # fmt: skip
            server = subprocess.Popen([*machine.command, *line], stderr=subprocess.PIPE)
            made.append(SshHost(machine, server, own))
            stack.callback(_stop, server)
        (keys / "known").write_text(known)
        (keys / "config").write_text(
            f"Host *\n  Port {_PORT}\n  User {_USER}\n  IdentityFile {keys}/id\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {keys}/known\n  StrictHostKeyChecking yes\n"
        )
        for host in made:
            _wait_listening(host.server)
        yield SshHosts(made, machines[count], keys)


def _make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def _wait_listening(server: subprocess.Popen[bytes]) -> None:
    assert server.stderr is not None
    for line in server.stderr:
        if b"listening" in line:
            return
    raise AssertionError("sshd does not start")


def _stop(server: subprocess.Popen[bytes]) -> None:
    with server:
        server.terminate()
