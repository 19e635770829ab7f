"""Which rank each process of an elastic job has after losses and gains: drawn stories, and the cases that matter."""

from __future__ import annotations

import random

from phalanx._job.agent.generation import ArrivedHost, HostSlots, Limits, SlotPlan, choose_candidates, plan_generation


def slot(*sizes: int) -> SlotPlan:
    """Hosts 0, 1, … with so many ranks, all alive."""
    hosts, first = [], 0
    for member, size in enumerate(sizes):
        hosts.append(HostSlots(member, first, size, frozenset(range(first, first + size)), name=f"n{member}"))
        first += size
    return SlotPlan.begin(hosts)


def test_in_the_beginning_a_rank_is_its_slot() -> None:
    generation = plan_generation(0, slot(2, 1, 3))
    assert generation.slots == (0, 1, 2, 3, 4, 5)
    assert generation.survivors == (0, 1, 2, 3, 4, 5)
    assert generation.replacements == ()
    assert [list(part.place.ranks) for part in generation.parts] == [[0, 1], [2], [3, 4, 5]]


def test_a_process_that_died_is_forked_anew_in_its_slot() -> None:
    slot_plan = slot(2, 2).with_living({1: frozenset({3})})
    generation = plan_generation(1, slot_plan)
    assert generation.world_size == 4
    assert generation.replacements == (2,)
    assert generation.parts[1].forked == (2,)


def test_without_a_replacement_the_others_close_up_and_keep_their_order() -> None:
    slot_plan = slot(2, 2).with_living({0: frozenset({1})}, {0: False})  # the first rank of a host, its leader, is gone
    generation = plan_generation(1, slot_plan)
    assert generation.slots == (1, 2, 3)
    assert generation.replacements == ()
    assert [(part.place.first_rank, part.place.num_ranks) for part in generation.parts] == [(0, 1), (1, 2)]


def test_a_host_without_any_process_has_no_part_and_its_agent_may_be_there() -> None:
    slot_plan = slot(1, 1, 1).with_living({1: frozenset()}, {1: False})
    generation = plan_generation(1, slot_plan)
    assert generation.part_of(1) is None
    assert [part.place.node for part in generation.parts] == [0, 1]
    assert slot_plan.find_missing(Limits(3, 3, 2)) == "2 of at least 3 hosts"
    assert slot_plan.find_missing(Limits(3, 3, 3)) == "2 of at least 3 hosts and 2 of at least 3 ranks"


def test_a_host_that_comes_back_has_its_slots_again_and_every_rank_is_what_it_was() -> None:
    slot_plan = slot(2, 2, 2).lose(1)
    assert plan_generation(1, slot_plan).slots == (0, 1, 4, 5)
    back = slot_plan.lose(2).accept(ArrivedHost(7, 2, "n2")).accept(ArrivedHost(8, 2, "n1"))
    generation = plan_generation(2, back)
    assert generation.slots == (0, 1, 2, 3, 4, 5)
    assert [part.member for part in generation.parts] == [0, 8, 7]
    assert generation.replacements == (2, 3, 4, 5)


def test_a_spare_takes_the_slots_of_the_lost_host_if_it_has_as_many_ranks() -> None:
    lost = slot(2, 2, 2).lose(1)
    assert plan_generation(1, lost.accept(ArrivedHost(3, 2, "spare"))).part_of(3).slots == (2, 3)  # type: ignore[union-attr]
    bigger = plan_generation(1, lost.accept(ArrivedHost(3, 3, "spare")))
    assert bigger.slots == (0, 1, 4, 5, 6, 7, 8)
    assert bigger.survivors == (0, 1, 2, 3)


def test_there_is_room_for_so_many_hosts_and_those_that_come_back_go_first() -> None:
    lost = slot(1, 1).lose(1)
    comers = [ArrivedHost(2, 1, "new"), ArrivedHost(3, 1, "n1")]
    assert [each.member for each in choose_candidates(lost, comers, Limits(1, 2))] == [3]
    assert [each.member for each in choose_candidates(lost, comers, Limits(1, 3))] == [3, 2]
    assert choose_candidates(slot(1, 1), comers, Limits(1, 2)) == []


def test_any_story_of_losses_and_gains_keeps_order_and_numbers_everybody_once() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        slot_plan = slot(*(draw.randint(1, 3) for _ in range(draw.randint(1, 4))))
        limits = Limits(1, 5, 1)
        born = {each: host.member for host in slot_plan.hosts for each in host.slots}
        ranks = dict.fromkeys(born, 0)  # who lives, by slot
        member = len(slot_plan.hosts)
        for number in range(1, 12):
            story = f"seed {seed}, generation {number}"
            if slot_plan.hosts and draw.random() < 0.3:
                gone = draw.choice(slot_plan.hosts)
                ranks = {each: rank for each, rank in ranks.items() if each not in gone.slots}
                slot_plan = slot_plan.lose(gone.member)
            killed = {each for each in ranks if draw.random() < 0.2}
            ranks = {each: rank for each, rank in ranks.items() if each not in killed}
            refills = {host.member: draw.random() < 0.6 for host in slot_plan.hosts}
            slot_plan = slot_plan.with_living(
                {host.member: frozenset(ranks) & frozenset(host.slots) for host in slot_plan.hosts}, refills
            )
            comers = [
                ArrivedHost(
                    member + i, draw.randint(1, 3), draw.choice(["", *(each.name for each in slot_plan.vacated)])
                )
                for i in range(draw.randint(0, 2))
            ]
            member += len(comers)
            for comer in choose_candidates(slot_plan, comers, limits):
                slot_plan = slot_plan.accept(comer)
            generation = plan_generation(number, slot_plan)

            slots = generation.slots
            assert len(set(slots)) == len(slots) == generation.world_size, story
            assert set(ranks) <= set(slots), f"{story}: a survivor has no rank"
            assert sorted(slots) == list(slots), f"{story}: survivors do not keep their order"
            assert {slots[rank] for rank in generation.survivors} == set(ranks), story
            assert sorted((*generation.survivors, *generation.replacements)) == list(range(generation.world_size)), (
                story
            )
            at = 0
            for node, part in enumerate(generation.parts):
                assert (part.place.node, part.place.num_nodes) == (node, len(generation.parts)), story
                assert (part.place.first_rank, part.place.num_ranks) == (at, len(part.slots)), story
                assert [part.rank_of(each) for each in part.slots] == list(part.place.ranks), story
                assert part.place.world_size == generation.world_size, story
                assert part.place.role_world_size == generation.world_size, story
                at += part.place.num_ranks
            hosts = [host for host in slot_plan.hosts if host.occupied]
            assert len(hosts) == len(generation.parts) <= limits.max_hosts, story
            assert (slot_plan.find_missing(Limits(len(hosts), 9, generation.world_size))) == "", story
            placed = [each for host in slot_plan.hosts for each in host.slots]
            assert len(set(placed)) == len(placed), f"{story}: two hosts have one slot"
            ranks = dict.fromkeys(slots, 0)
            slot_plan = slot_plan.with_living({part.member: frozenset(part.slots) for part in generation.parts})
