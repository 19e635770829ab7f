"""The roles of a server for a shard follow each other as their table says, in drawn lives of servers and trainers."""

import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo  # every optimizer loads it, and it leaves a variable behind

from phalanx.parameter_server import hosted_shard
from phalanx.parameter_server.hosted_shard import TRANSITIONS, HostedShard, ShardRole
from phalanx.parameter_server.shard import NoCopyError, PushedGradients, Spec


def test_the_table_in_the_docstring_is_this_one():
    drawn, role = {}, None
    for line in hosted_shard.__doc__.split("    role  ")[1].splitlines()[1:]:
        if name := line[4:14].strip():
            role = ShardRole[name]
        drawn.setdefault(role, set()).add(ShardRole[line[70:].partition(":")[0]])
    assert drawn == TRANSITIONS


class Agent:
    """The worker of a server, with the servers that are lost."""

    def __init__(self, number, lost):
        self.me = SimpleNamespace(info=SimpleNamespace(name=f"s{number}", id=number), uid=number)
        self.lost = lost
        self.membership = SimpleNamespace(find=self.find, find_lost=lambda name: None, host_of=lambda name: "here")

    def find(self, name):
        number = int(name[1:])
        return SimpleNamespace(info=SimpleNamespace(name=name, id=number), uid=number)

    def peer(self, member):
        return SimpleNamespace(lost=self.why_lost(member.uid), connection="open")

    def watch(self, members):
        """All are watched."""

    def why_lost(self, uid):
        return "it was killed." if uid in self.lost else ""


class Servers:
    """Servers that call each other without a network, and the transitions of their roles."""

    def __init__(self, number):
        self.lost, self.taken = set(), set()
        self.places = [self._make(Agent(index, self.lost)) for index in range(number)]
        self.names = tuple(one._agent.me.info.name for one in self.places)

    def _make(self, agent):
        place = HostedShard(agent, "p", 0)
        become, place._send = place._become, self._send

        def record(role):
            before = place.role
            become(role)
            self.taken.add((before, role))

        place._become = record
        return place

    def _send(self, to, function, arguments):
        done = getattr(self.places[int(to[1:])], function.__name__)(*arguments[2:])
        if done is None:
            done = torch.futures.Future()
            done.set_result(None)
        return done

    def living(self):
        return [one for one in self.places if one._agent.me.uid not in self.lost]

    def lose(self, place):
        self.lost.add(place._agent.me.uid)
        for one in self.living():
            one.on_lost(place._agent.me)


def test_drawn_servers_go_through_the_roles_of_the_table(effort):
    taken = set()
    for seed in range(20 * effort):
        draw, servers = random.Random(seed), Servers(4)
        make = partial(torch.optim.SGD, lr=1.0)
        spec = Spec("p", servers.names, ("s9",), True, None, make, make, "sum", True, "")
        start = {"step": 0, "dense": {"d": torch.zeros(1)}, "tables": {}, "optimizer": {}}
        primary, clock, is_created = servers.places[0], 0, False
        for _ in range(12):
            what = draw.choice(["push", "lose", "leave"]) if is_created else "create"
            if what == "create":
                primary, clock, is_created = servers.living()[0], 0, True
                primary.request(partial(primary.create, spec, start)).value()
            elif what == "push":
                gradients = PushedGradients({"d": torch.ones(1)}, {})
                primary.request(partial(primary.push, "s9", clock, gradients)).value()
                clock += 1
            elif what == "leave":
                primary.request(partial(primary.write, ("leave", "s9"))).value()
                is_created = False
            elif len(servers.living()) > 2:
                servers.lose(draw.choice(servers.living()))
                primary = next(one for one in servers.living() if one.role is ShardRole.PRIMARY)
            roles = [one.role for one in servers.living()]
            assert roles.count(ShardRole.PRIMARY) == roles.count(ShardRole.REPLICA) == is_created, (seed, roles)
            for one in servers.living():
                if one.role is ShardRole.EMPTY:
                    with pytest.raises(NoCopyError):
                        one.request(partial(one.pull, "s9", clock, ["d"], {})).value()
        taken |= servers.taken
    every = {(role, other) for role, others in TRANSITIONS.items() for other in others}
    assert taken == every - {(ShardRole.REPLICA, ShardRole.REPLICA)}  # a second copy comes only where servers are late
