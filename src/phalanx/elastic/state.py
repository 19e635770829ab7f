"""`State` names the objects and values to restore when ranks are lost; `Commits` records and restores them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phalanx.elastic.commits import Commits
from phalanx.elastic.frozen import is_trained
from phalanx.elastic.objects import has_state


class State:
    """Hold everything that a rank needs to resume where another rank stopped.

        state = phalanx.elastic.State(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, best=0.0)

    Each argument becomes an attribute of that name. Modules, optimizers, schedulers, gradient scalers, a
    `phalanx.DistributedSampler` and other objects with `state_dict` and `load_state_dict` are recognized; all other
    arguments, such as `epoch=0`, are plain values. After a loss, plain values return to the latest commit.

    The batches that the loader has yielded determine the sampler's position. A loop that fetches batches ahead of
    training (its own prefetcher) reports how many samples a step has used: `commit(samples=n)`.

    `commit()` marks a step as complete. Without `phalanx.elastic.run` it only counts steps.

    Raises:
        TypeError: a sampler that cannot report its position; a model, an optimizer, a scheduler, a scaler or a sampler
            inside a dict, a list or another plain value; a Pipeline inside another module.
        ValueError: a name that State itself uses, or several samplers.
    """

    _things: dict[str, Any]
    _values: dict[str, Any]

    def __init__(self, **things: Any) -> None:
        reserved = [name for name in things if name.startswith("_") or hasattr(type(self), name)]
        if reserved:
            raise ValueError(f"State: the name {reserved[0]!r} is reserved: rename the argument")
        object.__setattr__(self, "_values", {"epoch": 0, "step": 0})
        object.__setattr__(self, "_things", {})
        kept: dict[str, Any] = self._things
        for name, thing in things.items():
            if has_state(thing):
                kept[name] = thing
            else:
                setattr(self, name, thing)
        self._commits = Commits(kept, self._values)

    # -- attributes ----------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        for place in ("_things", "_values"):
            values = vars(self).get(place, {})
            if name in values:
                return values[name]
        raise AttributeError(f"State has no {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif hasattr(type(self), name):
            raise ValueError(f"State: the name {name!r} is reserved: rename the value")
        elif name in self._things:
            raise AttributeError(f"State: {name!r} cannot be replaced by another object; load into it instead")
        elif is_trained(value):
            raise TypeError(
                f"State: {name!r} is a {type(value).__name__}, which cannot be added later: create it first, and "
                f"pass it to the constructor: State({name}={name}). To keep a copy, assign its state_dict()"
            )
        else:
            self._values[name] = value

    # -- called by the loop ---------------------------------------------------------------------------------------

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs from `state.epoch` to `num_epochs - 1`; the first may be partly done already.

        Code after the last batch of an epoch (validation, a scheduler's step) belongs to the epoch, and is repeated if
        ranks are lost before the epoch ends. Code before the first batch (`rate *= 0.5`) is repeated as well, so
        compute such values from the epoch. Collective: all ranks end an epoch together, except those that train apart
        (LocalSGD, DiLoCo).
        """
        while self.epoch < num_epochs:
            if self._commits.position is not None:
                self._commits.position.sampler.set_epoch(self.epoch)
            yield self.epoch
            self._commits.commit(is_step=False)

    def commit(self, *, samples: int | None = None) -> None:
        """Commit a step that is complete on this rank: a later loss of ranks does not undo it.

        `samples` is how many of this rank's samples the step used, for a loop that fetches batches from its loader
        ahead of training. Pass it in each commit of an epoch, or in none. Without it, all samples that the loader has
        yielded count as used.

        Call `commit` after the optimizer's step, not in the middle of a gradient accumulation. Code between the commit
        and the next batch is not repeated after a loss; code before the commit belongs to the step.

        Cost: a copy of the models and of the optimizers' states in each step, with which the step can be undone, if
        ranks wait for each other between an update and its commit (in a second optimizer's backward, or to reduce a
        loss). The first 100 steps make this copy in any case.

        Raises:
            ValueError: `samples` are more than the loader has yielded, or not passed in each commit of an epoch; or
                there is no sampler; or State has LocalSGD, DiLoCo or a ZeroRedundancyOptimizer, whose step may count
                without its commit; or the loader has begun the next epoch.
        """
        position = self._commits.position
        if samples is not None:
            self._commits.count_samples(samples)
        elif position is not None and position.is_counted:
            raise ValueError(
                "State.commit(): samples= was passed earlier in this epoch; pass it in every commit of the epoch"
            )
        self._commits.commit(is_step=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the contents of a checkpoint: each object's state by name, plain values, and the position in the data.

        Call this right after a commit to get the state of that commit. A rank may call this alone, unless there is a
        Pipeline. A model's keys are those of the module inside its wrapper. The states of a sharded optimizer and of a
        Pipeline's stages are complete: they load into another split, and into a model without a Pipeline.
        """
        objects = self._commits.objects.state_dict()
        return {"objects": objects, "values": dict(self._values), "position": self.data_position()}

    def data_position(self) -> dict[str, Any] | None:
        """Return the position in the data at the latest commit, in the form of the sampler's `state_dict`, or None."""
        return self._commits.data_position()

    def load_data_position(self, position: dict[str, Any] | None) -> None:
        """Set the position in the data, before `phalanx.elastic.run`. `load_state_dict` calls this, too."""
        self._commits.load_data_position(position)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint, saved by any number of ranks. Call it on every rank, before `phalanx.elastic.run`.

        Raises:
            ValueError: the state belongs to other objects, or to an optimizer of other parameters.
        """
        self._commits.objects.load_state_dict(state_dict["objects"])
        for name, value in state_dict["values"].items():
            setattr(self, name, value)
        self.load_data_position(state_dict["position"])
        self._commits.save()


def commits_of(state: State) -> Commits:
    """Return the commits of `state`, for `elastic.run` and its group."""
    return state._commits
