"""What is decided when ranks of an elastic job are lost: drawn stories, without a process."""

from __future__ import annotations

import signal

from phalanx._base.loss_detection import DYING_S, ENDING_S, SILENT_RANK_S, STARTING_S
from phalanx._job.agent.elastic import BELOW_MINIMUM_EXIT_CODE, Elastic
from phalanx._job.agent.elastic_actions import (
    Abandon,
    BeginGeneration,
    Continue,
    ElasticAction,
    Evict,
    GiveUp,
    Print,
    Retire,
    SendGeneration,
    SendToRank,
    plan_message,
)
from phalanx._job.agent.failure import ExceptionReport, Exit
from phalanx._job.agent.generation import HostSlots, SlotPlan

KILLED = -signal.SIGKILL


def job(num_ranks: int = 3, max_replacements: int | None = None, *, joined: int | None = None) -> Elastic:
    """A job whose ranks run, of which the first `joined` (all) have said that they are elastic; pids are 100 + slot."""
    slots = HostSlots(0, 0, num_ranks, frozenset(range(num_ranks)))
    elastic = Elastic(SlotPlan.begin([slots]), max_replacements)
    for slot in range(num_ranks):
        elastic.on_started(slot, 100 + slot)
    for slot in range(num_ranks if joined is None else joined):
        assert say(elastic, slot, "elastic") == []
    return elastic


def say(elastic: Elastic, slot: int, kind: str, now: float = 1.0, **message: object) -> list[ElasticAction]:
    member = elastic.members[slot]
    return elastic.on_message(slot, member.pid, {"kind": kind, **message}, now)


def lose(elastic: Elastic, slot: int, status: int = KILLED, now: float = 1.0) -> list[ElasticAction] | None:
    return elastic.on_exit(Exit(slot, elastic.members[slot].pid, status, now), now)


def raise_in(elastic: Elastic, slot: int, place: str = "train.py:7") -> None:
    report = ExceptionReport(
        slot, elastic.members[slot].pid, 1.0, ("ValueError", "Exception"), "ValueError: bad", place, "Trace"
    )
    assert elastic.on_report(report, 1.0) == []


def begun(actions: list[ElasticAction] | None) -> BeginGeneration:
    (action,) = [action for action in actions or () if isinstance(action, BeginGeneration)]
    return action


def words(actions: list[ElasticAction] | None) -> str:
    return " ".join(action.text for action in actions or () if isinstance(action, Print))


def recover(elastic: Elastic, slot: int, pid: int, step: int = -1) -> str:
    """The replacement comes, and all are in the new generation."""
    elastic.on_started(slot, pid)
    assert say(elastic, slot, "elastic") == [SendGeneration(slot)]
    said = ""
    for other in elastic.members:
        said += words(say(elastic, other, "regrouped", 1.5, generation=elastic.generation.number))
    if step >= 0:
        elastic.on_commit(step)
    return said


def test_a_lost_rank_is_replaced_and_keeps_its_number() -> None:
    elastic = job(3)
    actions = lose(elastic, 1)
    generation = begun(actions).generation
    assert (generation.number, generation.slots, generation.replacements) == (1, (0, 1, 2), (1,))
    assert begun(actions).holders == (0, 2)
    assert words(actions).startswith("phalanx run: rank 1 (pid 101) is lost: SIGKILL")
    assert words(actions).endswith("Starting a replacement")
    assert recover(elastic, 1, 201) == "phalanx run: 3 ranks continue, 0.50 s after the loss"
    assert elastic.members[1].holds_state
    assert [(loss.rank, loss.pid, loss.replaced) for loss in elastic.losses] == [(1, 101, True)]


def test_the_message_of_a_generation_says_what_a_rank_started_now_would_see() -> None:
    elastic = job(3)
    begin = begun(lose(elastic, 0))
    message = plan_message(begin.generation, 2, begin, {"RANK": "2", "PHALANX_STORE": "/store", "LOCAL_RANK": "2"})
    assert (message["generation"], message["rank"], message["world_size"]) == (1, 2, 3)
    assert (message["survivors"], message["replacements"], message["store"]) == ([1, 2], [0], "/store")
    assert message["lost"][0]["pid"] == 100
    assert message["environment"]["RANK"] == "2"


def test_a_job_that_is_not_elastic_in_all_its_ranks_ends_as_ever() -> None:
    assert lose(job(3, joined=0), 1) is None
    assert lose(job(3, joined=2), 2) is None
    assert lose(job(3, joined=2), 1) is None


def test_who_ends_well_makes_the_job_an_ordinary_one() -> None:
    elastic = job(3)
    assert lose(elastic, 0, 0) is None
    assert lose(elastic, 1) is None
    elastic = job(2)
    say(elastic, 0, "finished")
    assert lose(elastic, 1) is None


def test_one_more_lost_while_the_others_regroup_begins_the_next_generation() -> None:
    elastic = job(3)
    lose(elastic, 1)
    actions = lose(elastic, 2)  # the first replacement is still on its way
    assert begun(actions).generation.number == 2
    assert begun(actions).generation.parts[0].forked == (2,)  # and is not forked twice
    assert begun(actions).holders == (0,)
    elastic.on_started(1, 201)
    assert say(elastic, 1, "elastic", generation=1) == [SendGeneration(1)]
    assert say(elastic, 1, "regrouped", generation=1) == []
    assert recover(elastic, 2, 202).startswith("phalanx run: 3 ranks continue")


def test_a_replacement_that_dies_before_it_holds_the_state_is_replaced() -> None:
    elastic = job(2)
    lose(elastic, 1)
    elastic.on_started(1, 201)
    actions = lose(elastic, 1)
    assert begun(actions).generation.number == 2
    assert begun(actions).holders == (0,)


def test_when_nobody_is_left_who_holds_the_state_the_job_fails_of_all_that_was_lost() -> None:
    elastic = job(2)
    lose(elastic, 1)
    elastic.on_started(1, 201)
    actions = lose(elastic, 0)  # the replacement has nothing yet
    assert words(actions) == (
        "phalanx run: the job ends: no remaining rank has the training state. Start again from a checkpoint."
    )
    (given_up,) = [action for action in actions or () if not isinstance(action, Print)]
    assert isinstance(given_up, GiveUp)
    assert [exit.rank for exit in given_up.exits] == [0]
    assert lose(elastic, 1) is None


def test_an_exception_of_one_rank_is_a_loss_and_is_waited_for() -> None:
    elastic = job(3)
    raise_in(elastic, 1)
    assert elastic.next_due == 1.0 + ENDING_S
    assert lose(elastic, 2) == []  # decided together
    actions = lose(elastic, 1, 1)
    assert begun(actions).generation.parts[0].forked == (1, 2)
    assert "ValueError: bad at train.py:7 (exit code 1)" in words(actions)
    assert elastic.next_due is None


def test_a_process_that_does_not_end_after_its_exception_is_killed() -> None:
    elastic = job(2)
    raise_in(elastic, 1)
    (evict,) = elastic.on_time(1.0 + ENDING_S)
    assert isinstance(evict, Evict)
    assert evict.slot == 1
    assert begun(lose(elastic, 1)).generation.replacements == (1,)


def test_what_every_rank_raises_alike_fails_the_job() -> None:
    elastic = job(3)
    for slot in range(3):
        raise_in(elastic, slot)
    assert lose(elastic, 0, 1) == []
    assert lose(elastic, 1, 1) == []
    (given_up,) = lose(elastic, 2, 1) or ()
    assert isinstance(given_up, GiveUp)
    assert len(given_up.exits) == len(given_up.reports) == 3


def test_what_a_replacement_raises_again_at_the_same_step_fails_the_job() -> None:
    elastic = job(2)
    say(elastic, 1, "failed", step=4)
    raise_in(elastic, 1)
    assert begun(lose(elastic, 1, 1))
    recover(elastic, 1, 201)
    say(elastic, 1, "failed", step=4)
    raise_in(elastic, 1)
    said, given_up = lose(elastic, 1, 1) or ()
    assert isinstance(said, Print)
    assert "has raised the same exception at the same step again" in said.text
    assert isinstance(given_up, GiveUp)


def test_what_is_raised_again_many_steps_later_is_one_more_loss() -> None:
    elastic = job(2)
    for attempt in range(5):
        say(elastic, 1, "failed", step=attempt)
        raise_in(elastic, 1)
        assert begun(lose(elastic, 1, 1))
        recover(elastic, 1, 201 + attempt, step=attempt)


def test_losses_in_a_row_without_a_step_in_between_end_the_job() -> None:
    elastic = job(2)
    for attempt in range(20):
        begun(lose(elastic, 1))
        recover(elastic, 1, 201 + attempt)
    said, given_up = lose(elastic, 1) or ()
    assert isinstance(said, Print)
    assert "ranks were lost without a completed step between" in said.text
    assert isinstance(given_up, GiveUp)
    elastic = job(2)
    for attempt in range(100):
        begun(lose(elastic, 1))
        recover(elastic, 1, 201 + attempt, step=attempt)


def test_without_replacements_the_others_go_on_as_fewer_ranks() -> None:
    elastic = job(4, max_replacements=1)
    assert "Starting a replacement (1 of 1)" in words(lose(elastic, 2))
    recover(elastic, 2, 202)
    actions = lose(elastic, 1)
    assert Retire((1,)) in (actions or ())
    generation = begun(actions).generation
    assert (generation.slots, generation.world_size, generation.replacements) == ((0, 2, 3), 3, ())
    assert words(actions).endswith("3 ranks continue without it")
    assert elastic.rank_of(3) == 2
    for slot in (0, 2, 3):
        say(elastic, slot, "regrouped", generation=2)
    assert "rank 2 (pid 103) is lost" in words(lose(elastic, 3))


def test_below_the_minimum_those_that_are_left_are_told_to_save_and_end() -> None:
    elastic = job(2, max_replacements=0)
    say(elastic, 0, "elastic", min_ranks=2)
    actions = lose(elastic, 1) or []
    assert Retire((1,)) in actions
    (told,) = [action for action in actions if isinstance(action, SendToRank)]
    assert told.slot == 0
    assert told.message["kind"] == "end"
    assert told.message["code"] == BELOW_MINIMUM_EXIT_CODE
    assert "1 of at least 2 ranks" in told.message["why"]
    assert lose(elastic, 0, BELOW_MINIMUM_EXIT_CODE) is None


def test_a_replacement_that_the_system_refuses_is_done_without() -> None:
    elastic = job(3)
    lose(elastic, 1)
    actions = elastic.on_unforked(1, "Resource temporarily unavailable", 1.0)
    assert begun(actions).generation.slots == (0, 2)
    assert Retire((1,)) in (actions or ())
    assert "rank 1 could not be replaced: Resource" in words(actions)
    assert job(3).on_unforked(1, "no", 1.0) is None


def test_when_all_have_left_their_group_and_nobody_died_the_same_ranks_form_it_again() -> None:
    elastic = job(2)
    assert say(elastic, 0, "lost", generation=0, step=3) == []
    assert elastic.next_due == 1.0 + SILENT_RANK_S
    actions = say(elastic, 1, "lost", generation=0, step=3)
    assert begun(actions).generation.parts[0].forked == ()
    assert begun(actions).generation.number == 1
    assert elastic.next_due is None


def test_who_is_silent_when_the_others_have_given_up_on_it_is_replaced() -> None:
    elastic = job(3)
    say(elastic, 0, "lost", generation=0, step=3)
    say(elastic, 2, "lost", generation=0, step=3)
    (evict,) = elastic.on_time(1.0 + SILENT_RANK_S)
    assert isinstance(evict, Evict)
    assert evict.slot == 1
    actions = lose(elastic, 1, now=12.0)
    assert "rank 1 (pid 101) is lost: killed: rank 0 left their group" in words(actions)
    assert begun(actions).generation.replacements == (1,)


def test_a_rank_that_is_killed_before_all_have_come_costs_nobody_anything() -> None:
    elastic = job(3, joined=2)
    assert lose(elastic, 2) is None
    assert elastic.lost_early
    elastic = job(3, joined=2)
    assert lose(elastic, 2, 1) is None  # a script that does not start is not started for ever
    assert not elastic.lost_early
    elastic = job(3, joined=0)
    assert lose(elastic, 2) is None
    assert not elastic.lost_early  # the script may not be elastic
    elastic.is_script_elastic = True
    assert elastic.lost_early
    elastic.began_at = -STARTING_S  # it mentions what it does not call
    assert not elastic.lost_early
    elastic = job(3, joined=0)
    elastic.record_early_loss(Exit(2, 102, -9, 1.0))  # another rank has told of its own end before
    say(elastic, 0, "elastic")
    assert elastic.lost_early
    elastic = job(3, joined=2)
    elastic.on_commit(1)  # the third rank trains without having joined
    assert lose(elastic, 2) is None
    assert not elastic.lost_early
    elastic = job(3)
    say(elastic, 0, "finished")
    assert lose(elastic, 2) is None
    assert not elastic.lost_early


def test_a_rank_that_waits_in_elastic_run_and_reports_the_loss_first_does_not_make_it_a_later_one() -> None:
    """The job ended: the step in the report, 0 or that of a checkpoint, counted as a step of this job."""
    for step in (0, 500):
        elastic = job(2, joined=1)
        assert refused(say(elastic, 0, "lost", generation=0, step=step)) == {0}
        assert lose(elastic, 1) is None
        assert elastic.lost_early
        elastic = job(2, joined=1)
        say(elastic, 0, "failed", step=step)
        elastic.record_early_loss(Exit(1, 101, KILLED, 1.0))  # rank 0's failure is already known
        assert elastic.lost_early


def test_the_only_rank_that_holds_the_state_is_let_go_on_before_it_is_killed() -> None:
    elastic = job(2)
    lose(elastic, 0)
    elastic.on_started(0, 200)
    actions = elastic.evict(1, "it is stopped", 1.0)
    assert Continue(1) in actions
    assert "no other rank has the training state" in words(actions)
    assert elastic.next_due is None
    assert elastic.evict(0, "it is stopped", 1.0) == [Evict(0, "it is stopped")]
    assert elastic.evict(1, "it is stopped", 9.0) == [Evict(1, "it is stopped")]


def test_a_process_that_does_not_die_when_it_is_killed_is_done_without() -> None:
    elastic = job(2)
    assert elastic.evict(1, "it is in a system call", 1.0) == [Evict(1, "it is in a system call")]
    assert elastic.next_due == 1.0 + DYING_S
    assert elastic.on_time(1.0) == []
    assert elastic.on_time(1.0 + DYING_S) == [Abandon(1)]
    assert "rank 1 (pid 101) is lost: killed: it is in a system call" in words(lose(elastic, 1))
    assert elastic.next_due is None
    elastic = job(2)
    elastic.evict(1, "it is stopped", 1.0)
    lose(elastic, 1)
    assert elastic.on_time(100.0) == []


def test_what_comes_late_from_a_process_that_was_replaced_counts_for_nothing() -> None:
    elastic = job(2)
    lose(elastic, 1)
    elastic.on_started(1, 201)
    assert elastic.on_message(1, 101, {"kind": "finished"}, 1.0) == []
    assert elastic.on_exit(Exit(1, 101, 0, 1.0), 1.0) is None
    assert not elastic.finished
    assert elastic.on_message(1, 201, {"kind": ["?"], "generation": "x", "step": None}, 1.0) == []


def refused(actions: list[ElasticAction] | None) -> set[int]:
    """The slots that are told that there is no other generation."""
    told = [action for action in actions or () if isinstance(action, SendToRank)]
    return {action.slot for action in told if action.message["kind"] == "no generation"}


def disagree(elastic: Elastic, step: int, **message: object) -> list[ElasticAction]:
    """Both ranks of two leave their group, of which none is lost."""
    number = elastic.generation.number
    fields = {"generation": number, "step": step, "error": "MismatchError: they differ", "disagrees": True, **message}
    assert say(elastic, 0, "lost", **fields) == []
    actions = say(elastic, 1, "lost", **fields)
    for slot in (0, 1) if elastic.generation.number > number else ():
        say(elastic, slot, "regrouped", generation=elastic.generation.number)
    return actions


def test_ranks_that_disagree_at_a_step_again_and_again_each_fail_of_their_own_error() -> None:
    """All waited for a generation that nobody began, until one was killed for silence: "out of memory?", it said."""
    elastic = job(2)
    for _ in range(2):
        assert "(rank 0: MismatchError: they differ): the ranks form a new group" in words(disagree(elastic, 3))
    said = disagree(elastic, 3)
    assert "the ranks have disagreed 3 times at the same step: MismatchError: they differ" in words(said)
    assert refused(said) == {0, 1}
    assert isinstance(said[-1], GiveUp)
    assert elastic.next_due is None  # nobody is killed


def test_ranks_that_disagree_at_another_step_or_are_slow_form_their_group_again() -> None:
    elastic = job(2)
    for step in range(30):
        assert begun(disagree(elastic, step))
    elastic = job(2)
    for _ in range(20):
        assert begun(disagree(elastic, 3, disagrees=False, error="DeadlineError: slow"))
    actions = disagree(elastic, 3, disagrees=False)
    assert refused(actions) == {0, 1}


def test_who_leaves_the_group_when_another_has_ended_its_training_is_told_that_there_is_none() -> None:
    """It waited for ever: from then on the job is an ordinary one, and nothing was decided for it any more."""
    elastic = job(3)
    say(elastic, 0, "finished")
    assert refused(say(elastic, 1, "lost", generation=0)) == {1}
    elastic = job(3)
    assert say(elastic, 1, "lost", generation=0) == []
    assert refused(say(elastic, 0, "finished")) == {1}
    assert elastic.next_due is None  # nor is the one that has ended killed for its silence
    elastic = job(3)
    assert say(elastic, 1, "lost", generation=0) == []
    assert lose(elastic, 0, 0) is None
    assert elastic.next_due is None
    assert refused(say(elastic, 1, "waiting", generation=0)) == {1}


def test_who_asks_is_told_that_it_is_worth_waiting_or_that_it_is_not() -> None:
    elastic = job(2, joined=1)
    assert refused(say(elastic, 0, "lost", generation=0)) == {0}  # the other one trains nothing
    elastic = job(2)
    say(elastic, 0, "lost", generation=0)
    assert say(elastic, 0, "waiting", generation=0) == [SendToRank(0, {"kind": "wait"})]
    lose(elastic, 1)
    assert say(elastic, 0, "waiting", generation=0) == [SendGeneration(0)]


def test_who_was_spared_and_is_still_silent_is_killed_when_the_others_ask_again() -> None:
    elastic = job(2)
    lose(elastic, 0)
    elastic.on_started(0, 200)
    say(elastic, 0, "elastic", generation=1)
    say(elastic, 0, "lost", generation=1)
    assert Continue(1) in elastic.on_time(1.0 + SILENT_RANK_S)  # it alone holds the state
    assert elastic.next_due is None
    say(elastic, 0, "waiting", 20.0, generation=1)
    (evict,) = elastic.on_time(20.0 + SILENT_RANK_S)
    assert isinstance(evict, Evict)
    say(elastic, 0, "waiting", 31.0, generation=1)
    assert elastic.next_due == 20.0 + SILENT_RANK_S + DYING_S


def test_a_replacement_that_comes_when_the_others_were_told_to_end_is_told_as_well() -> None:
    elastic = job(3, max_replacements=1)
    say(elastic, 0, "elastic", min_ranks=3)
    lose(elastic, 1)
    elastic.on_started(1, 201)
    lose(elastic, 2)
    (told,) = say(elastic, 1, "elastic", generation=1)
    assert isinstance(told, SendToRank)
    assert (told.slot, told.message["kind"]) == (1, "end")
