"""Assign ranks to this host's processes in the current generation, and create the store for their rendezvous."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from phalanx._job.agent import error_files
from phalanx._job.agent.elastic_actions import BeginGeneration, plan_message
from phalanx._job.agent.environment import plan_rank_environment
from phalanx._job.agent.generation import HostAssignment, SlotPlan, plan_generation
from phalanx._job.agent.host_link import HostLink
from phalanx._job.agent.host_resources import HostResources
from phalanx._job.agent.plan import JobPlan, find_free_port


class RankNumbers:
    """`RankNumbers` maps the slots of this host to ranks in the current generation.

    A slot is the rank that a process was started with; parameters named `rank` are slots.
    """

    def __init__(self, plan: JobPlan, host: HostResources, restart_count: int, link: HostLink) -> None:
        self._plan = plan
        self._host = host
        self._restart_count = restart_count
        self._link = link
        self._begun = link.first  # the current generation; None in the first one
        self.generation = 0 if link.first is None else link.first.generation.number
        part = None if link.first is None else link.first.generation.part_of(link.member)
        self.part = part or self._plan_first_part()
        self.store: int | None = None
        self._old_stores: dict[int, int] = {}  # by generation; ranks may still open them
        self._store_path = ""
        self._master_port = 0

    def exchange_link(self, link: HostLink) -> None:
        """Use another link for the stores of later generations."""
        self._link = link

    def set_master(self, address: str, port: int) -> None:
        """Use another MASTER_ADDR and MASTER_PORT for the ranks of later generations."""
        self._plan = replace(self._plan, master_addr=address, master_port=port)

    def _plan_first_part(self) -> HostAssignment:
        (part,) = plan_generation(0, SlotPlan.begin([self._link.own_slots()])).parts
        return HostAssignment(part.member, part.slots, (), self._link.place)

    def open(self) -> None:
        """Create the store for the rendezvous of a generation, and choose MASTER_PORT."""
        self.store, self._store_path = self._link.create_store()
        self._master_port = self._plan.master_port or find_free_port()

    def begin(self, begun: BeginGeneration) -> HostAssignment | None:
        """Begin another generation; return this host's part in it, or None if it has none."""
        self._begun = begun
        self.generation = begun.generation.number
        part = begun.generation.part_of(self.part.member)
        if part is None:
            return None
        self.part = part
        if self.store is not None:
            self._old_stores[begun.generation.number - 1] = self.store
        self.open()
        return part

    def plan_environment(self, rank: int) -> dict[str, str]:
        """Return the environment variables of the process in slot `rank`; its error file never changes."""
        variables = plan_rank_environment(
            self._plan,
            self.part.place,
            self.part.rank_of(rank),
            master_port=self._master_port,
            restart_count=self._restart_count,
            generation=self.generation,
            store=self._store_path,
            agent=self._host.agent_socket.address,
        )
        path = self._host.errors.path_of(rank - self._link.place.first_rank)
        return {**variables, error_files.VARIABLE: path}

    def plan_message(self, rank: int) -> dict[str, Any] | None:
        """Return the message that announces the current generation to an elastic rank.

        Return None in the first generation, or if the rank has no part in the current one.
        """
        if self._begun is None or rank not in self.part.slots:
            return None
        return plan_message(self._begun.generation, rank, self._begun, self.plan_environment(rank))

    @property
    def has_old_stores(self) -> bool:
        """Return whether stores of earlier generations are open."""
        return bool(self._old_stores)

    def close_stores_before(self, generation: int) -> None:
        """Close the stores of generations before `generation`, which no rank will open any longer."""
        for number in [number for number in self._old_stores if number < generation]:
            os.close(self._old_stores.pop(number))

    def close(self) -> None:
        for fd in (*self._old_stores.values(), *([] if self.store is None else [self.store])):
            os.close(fd)
        self._old_stores.clear()
        self.store = None
