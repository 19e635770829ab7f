"""What is decided when hosts of an elastic job are lost, come, and come back: cases, and drawn stories."""

from __future__ import annotations

import random
import signal

from phalanx._base.loss_detection import SILENT_RANK_S
from phalanx._job.agent.elastic import BELOW_MINIMUM_EXIT_CODE, TRANSITIONS, ElasticPhase
from phalanx._job.agent.elastic_actions import (
    LEAVE,
    BeginGeneration,
    DropHost,
    ElasticAction,
    PrepareHost,
    Print,
    SendToRank,
    refuse,
)
from phalanx._job.agent.failure import Exit
from phalanx._job.agent.generation import ArrivedHost, HostSlots, Limits, SlotPlan
from phalanx._job.hosts.elastic_hosts import ElasticHosts


class Job:
    """An elastic job whose ranks do as they are told; host 0 is the first, a host is called `n<number>`."""

    def __init__(self, *sizes: int, limits: Limits | None = None, wait_s: float = 60.0, joins: bool = True) -> None:
        hosts, first = [], 0
        for member, size in enumerate(sizes):
            hosts.append(HostSlots(member, first, size, frozenset(range(first, first + size)), name=f"n{member}"))
            first += size
        self.elastic = ElasticHosts(SlotPlan.begin(hosts), None, limits or Limits(1, len(sizes)), 0, 10.0)
        self.phase = self.elastic.phase
        self.wait_s = wait_s
        self.pid = 100
        self.now = 0.0
        self.begun: BeginGeneration | None = None
        self.prepared: dict[int, HostSlots] = {}
        self.told: list[ElasticAction] = []
        for slot in range(first):
            self.start(slot)
        if joins:
            self.join()

    def start(self, slot: int) -> None:
        self.pid += 1
        self.elastic.on_started(slot, self.pid)

    def join(self) -> None:
        """All ranks have come as far as training."""
        for slot in list(self.elastic.members):
            self.say(slot, "elastic")

    def say(self, slot: int, kind: str, **fields: object) -> None:
        pid = self.elastic.pid_of(slot)
        assert pid is not None
        message = {"kind": kind, "wait_s": self.wait_s, **fields}
        self.do(self.elastic.on_message(slot, pid, message, self.now))

    def do(self, actions: list[ElasticAction] | None) -> None:
        """Note what an event has led to; the phases follow each other as `TRANSITIONS` says."""
        before, self.phase = self.phase, self.elastic.phase
        assert self.phase is before or self.phase in TRANSITIONS[before], f"{before} -> {self.phase}"
        for action in actions or ():
            self.told.append(action)
            if isinstance(action, PrepareHost):
                self.prepared[action.slots.member] = action.slots
            if isinstance(action, BeginGeneration):
                assert BeginGeneration.from_json(action.to_json()) == action
                self.begun = action

    def fork(self) -> None:
        """The processes that the newest generation lacks are there, and say so."""
        assert self.begun is not None
        for part in self.begun.generation.parts:
            for slot in part.forked:
                self.start(slot)
                self.say(slot, "elastic", generation=self.begun.generation.number)

    def regroup(self) -> None:
        assert self.begun is not None
        for slot in self.begun.generation.slots:
            self.say(slot, "regrouped", generation=self.begun.generation.number)

    def arrive(self, member: int) -> None:
        """All ranks of a host that was prepared have come as far as training."""
        slots = self.prepared.pop(member)
        for slot in slots.slots:
            self.start(slot)
        for slot in slots.slots:
            self.say(slot, "elastic", generation=1)

    def come(self, member: int, num_ranks: int, name: str = "") -> None:
        self.do(self.elastic.on_host_joined(ArrivedHost(member, num_ranks, name or f"n{member}"), self.now))

    def lose(self, member: int) -> bool:
        """Whether the job survives it."""
        actions = self.elastic.on_host_lost(member, f"n{member}", "it was switched off", self.now)
        self.do(actions)
        return actions is not None

    def leave(self, member: int) -> bool:
        """Whether the host goes in order."""
        actions = self.elastic.on_host_leaves(member, f"n{member}", self.now)
        self.do(actions)
        return actions is not None

    def take(self, kind: type) -> list[ElasticAction]:
        """What was done since, of a kind."""
        found = [action for action in self.told if isinstance(action, kind)]
        self.told.clear()
        return found

    @property
    def said(self) -> str:
        return "\n".join(action.text for action in self.told if isinstance(action, Print))

    @property
    def has_begun(self) -> bool:
        return self.begun is not None

    @property
    def slots(self) -> list[int]:
        assert self.begun is not None
        return list(self.begun.generation.slots)


def test_the_others_go_on_without_a_lost_host() -> None:
    job = Job(2, 1, 2, limits=Limits(1, 3))
    assert job.lose(1)
    assert job.begun is not None
    assert job.slots == [0, 1, 3, 4]
    assert [(each.slot, each.rank, each.host) for each in job.begun.lost] == [(2, 2, "n1")]
    assert "4 ranks on 2 hosts continue" in job.said


def test_a_host_that_comes_keeps_nobody_waiting_and_is_taken_in_when_it_is_ready() -> None:
    job = Job(2, 2, limits=Limits(1, 3))
    job.come(2, 1)
    assert not job.has_begun
    assert job.prepared[2].slots == range(4, 5)
    job.lose(1)  # while it starts: the others go on without both
    assert job.slots == [0, 1]
    job.arrive(2)
    assert job.slots == [0, 1]  # those are still about to form their group
    job.regroup()
    assert job.slots == [0, 1, 4]
    joining = [each for each in job.told if isinstance(each, SendToRank) and each.message["kind"] == "joining"]
    assert [each.slot for each in joining] == [0, 1]
    assert job.begun is not None
    assert job.begun.generation.survivors == (0, 1, 2)  # nothing is forked for it: its process is there
    assert job.begun.holders == (0, 1)  # but it holds nothing


def test_who_is_taken_in_when_the_others_have_just_finished_leaves() -> None:
    """It waited for them until its group's timeout, half an hour by default."""
    job = Job(1, 1, limits=Limits(1, 3))
    job.come(2, 1)
    job.arrive(2)
    assert job.has_begun
    job.told.clear()
    job.say(0, "finished")
    job.say(1, "finished")
    assert job.said == "phalanx run: rank 2 leaves: it joined after the training had ended"
    assert job.take(SendToRank) == [SendToRank(2, LEAVE)]


def test_nobody_waits_for_ranks_that_have_finished() -> None:
    """Drawn: ranks are killed and hosts are taken in while the others leave the last barrier of their training."""
    for seed in range(200):
        draw = random.Random(seed)
        job = Job(2, 1, limits=Limits(1, 4))
        for member in range(2, 2 + draw.randint(0, 2)):
            job.come(member, draw.randint(1, 2))
        finishing = {slot: job.elastic.pid_of(slot) for slot in range(3)}
        events = [("finish", slot) for slot in finishing] + [("kill", 1)] * draw.randint(0, 1)
        events += [("arrive", member) for member in job.prepared] + [("fork", 0)] * 2
        draw.shuffle(events)
        for event, number in events:
            if event == "arrive":
                job.arrive(number)
            elif event == "fork" and job.begun is not None:
                for part in job.begun.generation.parts:
                    for slot in part.forked:
                        if job.elastic.pid_of(slot) is None:
                            job.start(slot)
                            job.say(slot, "elastic", generation=job.begun.generation.number)
            elif event == "finish" and job.elastic.pid_of(number) == finishing[number]:
                job.say(number, "finished")
            elif event == "kill":
                pid = job.elastic.pid_of(number)
                assert pid is not None
                job.do(job.elastic.on_exit(Exit(number, pid, -signal.SIGKILL, job.now), job.now))
        late = {
            slot
            for slot, member in job.elastic.members.items()
            if member.joined and member.pid not in finishing.values()
        }
        sent_away = [
            action.slot for action in job.told if isinstance(action, SendToRank) and action.message["kind"] != "joining"
        ]
        assert sorted(sent_away) == sorted(late), f"seed {seed}"


def test_a_replacement_of_a_rank_that_died_once_all_had_finished_fails() -> None:
    for joins_first in (True, False):
        job = Job(2, limits=Limits(1, 1))
        pid = job.elastic.pid_of(1)
        assert pid is not None
        job.do(job.elastic.on_exit(Exit(1, pid, -signal.SIGKILL, job.now), job.now))
        job.told.clear()
        if joins_first:
            job.fork()
        job.say(0, "finished")
        if not joins_first:
            job.fork()
        assert job.take(SendToRank) == [refuse(1, "another rank has finished training")]


def test_a_host_that_came_before_the_ranks_said_that_they_are_elastic_is_not_forgotten() -> None:
    """It came while the ranks imported: it was told to wait for the next start, and was no spare either."""
    for room, taken in ((3, [2]), (2, [])):
        job = Job(1, 1, limits=Limits(1, room), joins=False)
        job.come(2, 1)
        assert not job.prepared
        job.join()
        assert list(job.prepared) == taken
        assert list(job.elastic.spares) == [member for member in (2,) if member not in taken]


def test_a_host_whose_rank_fails_while_it_starts_is_sent_away() -> None:
    job = Job(1, 1, limits=Limits(1, 3))
    job.come(2, 2)
    job.start(2)
    job.do(job.elastic.on_exit(Exit(2, job.pid, 1, 0.0), 0.0))
    (dropped,) = job.take(DropHost)
    assert isinstance(dropped, DropHost)
    assert dropped.member == 2
    assert "exited before it could join the group: exit code 1" in dropped.why
    assert not job.has_begun
    assert not job.elastic.is_arriving(3)


def test_a_host_that_leaves_in_order_is_no_loss_and_its_slots_are_kept_for_it() -> None:
    job = Job(1, 2, 1, limits=Limits(1, 3))
    assert job.leave(1)
    assert job.slots == [0, 3]
    assert job.begun is not None
    assert job.begun.lost == ()
    assert job.begun.holders == (0, 3)
    assert "n1, with ranks 1, 2, leaves after this step (SIGTERM); 2 ranks on 2 hosts continue" in job.said
    job.regroup()
    job.come(7, 2, "n1")
    assert job.prepared[7].slots == range(1, 3)
    assert job.elastic.losses == []


def test_a_spare_takes_the_place_of_a_host_that_leaves_and_too_few_wait_for_one() -> None:
    job = Job(1, 1, limits=Limits(2, 2))
    job.come(5, 1)
    assert job.leave(1)
    assert job.slots == [0, 1]
    assert "leaves after this step (SIGTERM); 2 ranks on 2 hosts continue: rank 1 is restarted" in job.said
    job = Job(1, 1, limits=Limits(2, 2))
    assert job.leave(1)
    assert job.elastic.is_waiting
    assert "n1, with rank 1, leaves after this step (SIGTERM)" in job.said
    job.come(6, 1)
    assert job.slots == [0, 1]


def test_the_host_that_leads_leaves_as_others_do() -> None:
    job = Job(1, 1, 1, limits=Limits(1, 3))
    assert job.leave(0)
    assert job.slots == [1, 2]
    assert "n0, with rank 0, leaves after this step (SIGTERM); 2 ranks on 2 hosts continue" in job.said
    assert not job.elastic.is_regrouped
    job.regroup()
    assert job.elastic.is_regrouped


def test_a_host_does_not_leave_in_order_where_nobody_else_could_go_on() -> None:
    job = Job(1, 1, limits=Limits(1, 2))
    assert not Job(1, 1, limits=Limits(1, 2), joins=False).leave(1)  # nobody has said that it trains
    job.elastic.members[0].holds_state = False  # it has just been replaced
    assert not job.leave(1)
    assert not job.has_begun


def test_another_host_is_taken_in_when_one_that_was_to_be_is_lost_leaves_or_fails() -> None:
    """Its place stayed empty until the next change of the job, though another one waited for it."""
    for end in ("lost", "leaves", "fails"):
        job = Job(1, 1, limits=Limits(1, 3))
        job.come(2, 2)
        job.come(3, 2)
        assert list(job.prepared) == [2]
        job.start(2)
        if end == "fails":
            job.do(job.elastic.on_exit(Exit(2, job.pid, 1, 0.0), 0.0))
        else:
            assert job.lose(2) if end == "lost" else job.leave(2)
        assert list(job.prepared) == [2, 3]
        assert job.prepared[3].slots == range(2, 4)
        assert not job.has_begun


def test_a_spare_takes_the_slots_of_a_lost_host_at_once() -> None:
    job = Job(2, 2, limits=Limits(2, 2))
    job.come(5, 2)
    assert list(job.elastic.spares) == [5]
    assert job.lose(1)
    assert job.slots == [0, 1, 2, 3]
    assert job.begun is not None
    assert [(part.member, part.forked) for part in job.begun.generation.parts] == [(0, ()), (5, (2, 3))]
    job.fork()
    job.regroup()
    assert job.elastic.generation.survivors == (0, 1)


def test_with_too_few_hosts_the_ranks_wait_and_the_one_that_comes_back_has_its_slots_again() -> None:
    job = Job(1, 2, limits=Limits(2, 2))
    assert job.lose(1)
    assert not job.has_begun
    assert job.elastic.next_due == 60.0
    job.now = 59.0
    job.come(2, 2, "n1")
    assert job.slots == [0, 1, 2]
    assert job.begun is not None
    assert [each.rank for each in job.begun.lost] == [1, 2]
    job.fork()
    job.regroup()
    assert not job.elastic.is_waiting
    job.do(job.elastic.on_time(1000.0))
    assert job.elastic.phase is not ElasticPhase.ENDING


def test_after_the_stated_time_they_are_told_to_save_and_end_with_a_code_of_their_own() -> None:
    job = Job(2, 2, limits=Limits(2, 2), wait_s=5.0)
    job.lose(1)
    job.do(job.elastic.on_time(4.9))
    assert job.elastic.phase is not ElasticPhase.ENDING
    job.do(job.elastic.on_time(5.1))
    ends = [each for each in job.take(SendToRank) if isinstance(each, SendToRank)]
    assert [(each.slot, each.message["kind"], each.message["code"]) for each in ends] == [
        (0, "end", BELOW_MINIMUM_EXIT_CODE),
        (1, "end", BELOW_MINIMUM_EXIT_CODE),
    ]
    assert ends[0].message["why"] == "1 of at least 2 hosts left, and no host has joined within 5 s"


def test_a_rank_that_is_lost_while_hosts_are_awaited_is_replaced_when_one_comes() -> None:
    job = Job(2, 1, limits=Limits(2, 2))
    job.lose(1)
    pid = job.elastic.pid_of(1)
    assert pid is not None
    job.do(job.elastic.on_exit(Exit(1, pid, -signal.SIGKILL, 1.0), 1.0))
    assert not job.has_begun
    job.come(3, 1)
    assert job.begun is not None
    assert job.begun.generation.replacements == (1, 2)


def test_a_cut_that_nobody_died_of_gives_the_same_ranks_a_new_generation() -> None:
    """The ranks' time was up; those beyond the cut say so when the link is back, and are not evicted before."""
    job = Job(1, 2)
    job.say(0, "lost", generation=0)
    job.say(1, "lost", generation=0)
    assert not job.has_begun
    assert job.elastic.next_due == SILENT_RANK_S + 10.0  # its host may be cut off for so long
    job.say(2, "lost", generation=0)
    assert job.slots == [0, 1, 2]
    assert job.begun is not None
    assert job.begun.holders == (0, 1, 2)
    assert job.begun.generation.replacements == ()


def test_a_new_host_that_the_others_cannot_form_a_group_with_is_sent_away() -> None:
    """It had a network of its own, say: all would try for ever."""
    job = Job(1, 1, limits=Limits(1, 3))
    job.come(2, 1)
    job.arrive(2)
    for generation in (1, 2):  # the first time its ranks may have been late
        assert job.slots[2:] == [2]
        for slot in range(3):
            job.say(slot, "lost", generation=generation)
    (dropped,) = (each for each in job.told if isinstance(each, DropHost))
    assert dropped.member == 2
    assert job.slots == [0, 1]


def test_a_job_that_is_not_elastic_or_about_to_end_loses_a_host_as_ever() -> None:
    job = Job(1, 1)
    job.say(0, "finished")
    assert not job.lose(1)
    plain = ElasticHosts(SlotPlan.begin([HostSlots(0, 0, 1, frozenset({0}))]), None, Limits(), 0, 10.0)
    plain.on_started(0, 7)
    assert plain.on_host_lost(0, "n0", "gone", 0.0) is None


def test_any_story_ends_with_everybody_in_one_generation() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        sizes = [draw.randint(1, 3) for _ in range(draw.randint(2, 4))]
        job = Job(*sizes, limits=Limits(draw.randint(1, 2), draw.randint(len(sizes), len(sizes) + 1)))
        elastic = job.elastic
        member, there = len(sizes), set(range(1, len(sizes)))
        for _ in range(25):
            story = f"seed {seed}, generation {elastic.generation.number}"
            event = draw.choice(("lose", "come", "kill", "regroup", "arrive", "fork", "cut"))
            if event == "lose" and there:
                gone = draw.choice(sorted(there))
                there.discard(gone)
                job.prepared.pop(gone, None)
                job.lose(gone)
            elif event == "come":
                names = [host.name for host in elastic.slot_plan.vacated] or [f"n{member}"]
                there.add(member)
                job.come(member, draw.randint(1, 3), draw.choice(names))
                member += 1
            elif event == "kill" and elastic.members:
                slot = draw.choice(sorted(elastic.members))
                pid = elastic.pid_of(slot)
                assert pid is not None
                survivors = [s for s, m in elastic.members.items() if s != slot and m.holds_state]
                if survivors and elastic.active:
                    job.do(elastic.on_exit(Exit(slot, pid, 1, 0.0), 0.0))
            elif event == "arrive" and job.prepared:
                job.arrive(draw.choice(sorted(job.prepared)))
            elif event == "cut":
                for slot in list(elastic.members):
                    if slot in elastic.members:
                        job.say(slot, "lost", generation=elastic.generation.number)
            elif event in ("regroup", "fork") and job.begun is not None and job.begun.generation is elastic.generation:
                for part in elastic.generation.parts:
                    for slot in part.forked:
                        if elastic.pid_of(slot) is None and part.member in {h.member for h in elastic.slot_plan.hosts}:
                            job.start(slot)
                            job.say(slot, "elastic", generation=elastic.generation.number)
                if event == "regroup":
                    for slot in list(elastic.members):
                        job.say(slot, "regrouped", generation=elastic.generation.number)
            for dropped in job.take(DropHost):
                assert isinstance(dropped, DropHost)
                there.discard(dropped.member)
                job.prepared.pop(dropped.member, None)
            if not elastic.active:
                break
            members = {part.member for part in elastic.generation.parts}
            placed = {host.member for host in elastic.slot_plan.hosts}
            assert len(elastic.slot_plan.hosts) + len(elastic.arrivals) <= elastic.limits.max_hosts, story
            if not elastic.is_waiting:
                assert members == placed, f"{story}: {members} are told of, {placed} have slots"
                assert members <= there | {0}, f"{story}: a host that is gone has a part"
            everywhere = [s for host in elastic.slot_plan.hosts for s in host.slots]
            everywhere += [s for each in elastic.arrivals.values() for s in each.slots.slots]
            assert len(set(everywhere)) == len(everywhere), f"{story}: two hosts have one slot"
            assert set(elastic.members) <= set(elastic.generation.slots), story
