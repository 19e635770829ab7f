"""`Arrivals` are the ranks that have come to a group's start, in the order in which they came, as a store has them.

The keys of start number `n` begin with `n`; `bootstrap` has the present start's number, and how the last one ended.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from phalanx._comm.control.wire import WRITE_ONCE
from phalanx._comm.rendezvous.rank_info import Arrival, find_dead
from phalanx._comm.rendezvous.torch_store import Store, base_of, file_of

# The key of every rank's information, or of the failure; ranks of one host fetch it once.
OUTCOME = f"ranks{WRITE_ONCE}"


class Arrivals:
    """They are those of the start that is going on at `store`, where `me` has come, or will.

    `known` has who has been read, by place: whoever has said who it is stays that.
    """

    def __init__(self, store: Store, me: Arrival) -> None:
        self._store = store
        self.me = me
        self.number = 0  # the number of the start
        self.index = 0  # the place of `me`
        self.before: dict[str, Any] = {}  # how the start before ended, and with which members
        self.known: dict[int, Arrival] = {}
        self._num_sought = 1  # places among which this rank looks for the first
        self._in_file = file_of(store)

    def key(self, name: str) -> str:
        """Return the name that a key of this start has in the store."""
        return f"{self.number}/{name}"

    @property
    def first(self) -> Arrival:
        """Return the one that came first of those that are known."""
        return self.known[min(self.known)]

    def current(self) -> tuple[str, int, dict[str, Any]]:
        """Return the key `bootstrap`: as it stands, the number of the start, and how the one before ended."""
        text = self._store.compare_set("bootstrap", "", "").decode()  # check and get, at once
        return text, *_read_state(text)

    def end(self, how: str, members: Sequence[Any] = ()) -> None:
        """End this start: whoever comes now begins the next."""
        text, number, _ = self.current()
        if number == self.number:
            before = {"how": how, "members": list(members)}
            self._store.compare_set("bootstrap", text, json.dumps({"number": number + 1, "before": before}))

    def is_superseded(self) -> bool:
        """Return whether another start goes on, and this one has no outcome."""
        return self.current()[1] != self.number and not self._store.check([self.key(OUTCOME)])

    def delete(self) -> None:
        """Delete the keys of this start, as far as the store can."""
        base = base_of(self._store)
        if hasattr(base, "delete_prefix"):
            base.delete_prefix(base.name_through(self._store, self.key("")))
            return
        for key in [*(f"rank/{i}" for i in list(self.read_all())), "came", OUTCOME]:
            with contextlib.suppress(Exception):  # a store that cannot delete keeps a few bytes
                self._store.delete_key(self.key(key))

    # -- coming --------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Take a place in the start that is going on, or in a new one."""
        while True:
            has_outcome = self._find_start()
            self.known = {}
            if how := self._is_left_behind(has_outcome):
                self.end(how)
                continue
            self.take_place()
            self.known[self.index] = self.me
            if self.current()[1] == self.number:
                return

    def _find_start(self) -> bool:
        """Find out which start is going on, and return whether it has an outcome.

        Cost: one round trip where the store can and the start is the one that was expected; otherwise two.
        """
        base, expected = base_of(self._store), self.number
        if not hasattr(base, "read_and_check"):
            _, self.number, self.before = self.current()
            return self._store.check([self.key(OUTCOME)])
        names = (base.name_through(self._store, name) for name in ("bootstrap", self.key(OUTCOME)))
        text, has_outcome = base.read_and_check(*names)
        self.number, self.before = _read_state(text.decode())
        return has_outcome if self.number == expected else self._store.check([self.key(OUTCOME)])

    def take_place(self) -> None:
        """Take the next place and say who has it; at once, and with others of this host, where the store can."""
        words = json.dumps(self.me.to_json())
        base = base_of(self._store)
        if hasattr(base, "add_item"):
            counter, prefix = (base.name_through(self._store, self.key(name)) for name in ("came", "rank/"))
            self.index = int(base.add_item(counter, prefix, words))
            return
        self.index = self._store.add(self.key("came"), 1) - 1
        self._store.set(self.key(f"rank/{self.index}"), words)

    def _is_left_behind(self, has_outcome: bool) -> str:
        """Return how this start has ended, if it has and concerns nobody who comes now; else nothing."""
        if has_outcome:
            failure = json.loads(self._store.get(self.key(OUTCOME))).get("failure")
            if failure is None:
                return ""
            # A late rank of that job should hear why it failed. Of a file nobody knows which job wrote it: as long as
            # one of its processes runs, it is that one. Who was told already means to try again.
            processes = [one.info.process for one in self.read_all().values()]
            is_told = self.me.info.process in processes
            is_old = bool(self._in_file) and not any(process.is_running() for process in processes)
            if not (is_told or is_old):
                return ""
            return f"an earlier start ended at {failure['at']}: {failure['text'].splitlines()[0]}"
        if self._in_file and (dead := find_dead(list(self.read_all().values()), self.me.info)):
            # A file outlives its job: they ended in an earlier one, and nobody will ever answer for them.
            who = ", ".join(f"rank {r} ({info})" for r, info in dead.ranks.items())
            return f"an earlier start was left behind in {self._in_file}: {who} has ended"
        return ""

    # -- who has come --------------------------------------------------------------------------------------------

    def count(self) -> int:
        """Return how many have taken a place; the ranks of one host ask for it together."""
        came = self.key("came")
        return int(self._store.compare_set(came, "", "") or 0) if self._store.check([came]) else 0

    def read_all(self) -> dict[int, Arrival]:
        """Return all who have come, by place."""
        self._read([i for i in range(self.count()) if i not in self.known])
        return self.known

    def missing(self) -> list[int]:
        came = {one.rank for one in self.read_all().values()}
        return [r for r in range(self.me.world_size) if r not in came]

    def seek_first(self) -> bool:
        """Look for the first, among twice as many as before as long as it is not found; return whether it is `me`.

        It is where all before it have taken a place and not said who they are: they may have died there. Nobody else is
        read: thousands of ranks would read each other's words.
        """
        num_sought = min(self._num_sought, min(self.known))
        self._read(list(range(num_sought)))
        if min(self.known) != self.index:
            return False
        self._num_sought *= 2
        return self.index == num_sought

    def _read(self, places: list[int]) -> None:
        """Read who took these places, all at once; in halves where a process is between the calls, or died there."""
        keys = [self.key(f"rank/{i}") for i in places]
        if keys and self._store.check(keys):
            for i, text in zip(places, self._store.multi_get(keys), strict=True):
                self.known[i] = Arrival.from_json(json.loads(text))
        elif len(places) > 1:
            middle = len(places) // 2
            self._read(places[:middle])
            self._read(places[middle:])


def _read_state(text: str) -> tuple[int, dict[str, Any]]:
    """Return what the key `bootstrap` says: the number of the start, and how the one before ended."""
    data: dict[str, Any] = json.loads(text) if text else {"number": 0, "before": {}}
    return data["number"], data["before"]
