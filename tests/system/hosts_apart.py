"""Hosts that share no folder: each has one of its own."""

from __future__ import annotations

import subprocess
import sys

from tests.system.elastic_hosts import Cluster


class HostsApart(Cluster):
    """Hosts with names of their own, which run everything in a folder `disk` of their own: it is FOLDER/node-NUMBER."""

    def command_on(self, number: int) -> tuple[str, ...]:
        name, disk = f"node-{number}", self._folder / "disk"
        for folder in (disk, self._folder / name):
            folder.mkdir(exist_ok=True)
        words = 'hostname "$1"; mount --bind "$2/$1" "$2/disk"; cd "$2/disk"; shift 2; exec "$@"'
        own = ("unshare", "--uts", "--mount", "sh", "-c", words, "sh", name, str(self._folder))
        return (*super().command_on(number), *own)

    def ask(self, number: int, *words: str) -> str:
        """What `phalanx` with these words says on a host."""
        line = [*self.command_on(number), sys.executable, "-m", "phalanx.cli", *words]
        return subprocess.run(line, capture_output=True, text=True, check=True, timeout=600).stdout

    def scrape(self, number: int) -> str:
        """What a host's command serves at the address that it has said."""
        (address,) = [line.split()[-1] for line in self.jobs[number].lines if "metrics at" in line]
        words = (
            sys.executable,
            "-c",
            f"import urllib.request as r; print(r.urlopen({address!r}, timeout=60).read().decode())",
        )
        return subprocess.run([*self.command_on(number), *words], capture_output=True, text=True, check=True).stdout

    def pid(self, number: int) -> int:
        return self.jobs[number].running.process.pid
