"""A rank that speaks to its agent as an elastic one does, without torch: it says what it hears, and takes orders.

FOLDER/ORDER-RANK    a file that appears: raise, exit, stop (SIGSTOP), finish; the rank follows it once
FOLDER/finish        all ranks end well
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import types

import phalanx

# The package itself imports torch, which takes longer than all that is done here.
sys.modules["phalanx.elastic"] = package = types.ModuleType("phalanx.elastic")
package.__path__ = [os.path.join(os.path.dirname(phalanx.__file__), "elastic")]

from phalanx._base.ipc.agent import connect, split  # noqa: E402
from phalanx._comm.diagnostics.progress_page import open_page  # noqa: E402
from phalanx._comm.rendezvous.launchers import COORDINATOR  # noqa: E402
from phalanx.elastic.channel import outlive_zygote  # noqa: E402


class Rank:
    """This process's connection."""

    def __init__(self) -> None:
        self.name, self.token = split(os.environ["PHALANX_AGENT"])
        self.generation = int(os.environ.get("PHALANX_GENERATION", "0"))

    def say(self, kind: str, **fields: object) -> None:
        self.channel.send({"kind": kind, **fields})

    def join(self) -> None:
        minimum = int(os.environ.get("MIN_RANKS", "1"))
        wait_s = float(os.environ.get("WAIT_S", "0"))
        welcome = None
        while welcome is None:  # where so many knock at once that the agent has lost patience with us
            with contextlib.suppress(ConnectionError):
                self.channel = connect(self.name, 60.0)
                self.say(
                    "elastic",
                    token=self.token,
                    pid=os.getpid(),
                    generation=self.generation,
                    min_ranks=minimum,
                    wait_s=wait_s,
                )
                welcome = self.channel.receive()
        assert welcome.content["kind"] == "welcome"
        if outlive_zygote(welcome.fds[0]):
            self.say("outlives")
        if os.environ.get("CHILD"):  # as a DataLoader has workers: they are in the rank's process group
            self.shout("child", subprocess.Popen(["sleep", "600"]).pid, "of", os.environ["RANK"])
        self.page = open_page(os.environ["PHALANX_AGENT"])  # the agent reads it while this process lives
        self.shout("joined", self.generation, "as", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.getpid())

    def shout(self, *words: object) -> None:
        sys.stdout.write(" ".join(map(str, words)) + "\n")

    def hear(self) -> None:
        message = self.channel.receive().content
        if message["kind"] == "generation":
            os.environ.update(message["environment"])
            self.generation = message["generation"]
            assert os.path.exists(message["store"].removeprefix(COORDINATOR))
            self.say("regrouped", generation=self.generation)
            if not os.environ.get("NO_STEPS"):
                self.page.commit(self.generation)  # losses without a step in between are not survived for ever
            of = f"{message['rank']} of {message['world_size']}"
            assert of == f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
            self.shout("generation", self.generation, "as", of, "holders", message["survivors"])
        elif message["kind"] == "leave":
            sys.exit(0)
        elif message["kind"] == "end":
            self.shout("told to end:", message["why"])
            sys.exit(message["code"])

    def obey(self, folder: str) -> bool:
        """Follow the orders for this rank; False when it is to end."""
        for order in ("raise", "exit", "stop"):
            path = os.path.join(folder, f"{order}-{os.environ['RANK']}")
            if os.path.exists(path):
                os.unlink(path)
                if order == "raise":
                    self.say("failed", step=3)
                    raise ValueError("the sample is bad")
                if order == "exit":
                    os._exit(7)
                os.kill(os.getpid(), signal.SIGSTOP)
        return not os.path.exists(os.path.join(folder, "finish"))


def main() -> None:
    rank = Rank()
    rank.join()
    while rank.obey(sys.argv[1]):
        if select.select([rank.channel], [], [], 0.02)[0]:
            rank.hear()
    rank.say("finished")
    rank.shout("finished")
    if os.path.exists(os.path.join(sys.argv[1], "save")):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)  # longer than the others of a failed job are given to say what they saw
        rank.shout("saved")


main()
