"""`Strategy` is the interface of all strategies: what each does with the five parts of a training script.

    model       setup()            wrapped, cut or left as it is; on this rank's device
    optimizer   setup()            kept, or created again over this rank's parameters
    data        loader()           the global batch, divided among the replicas
    step        step()             forward, backward, update: compute_gradients() and update() are its halves
    checkpoint  parts()            the objects that `phalanx.CheckpointManager` saves and loads

Create the strategy first (it joins or starts the job), then the model, then call `setup`. Names and meanings follow
`tf.distribute.Strategy` where it has them.
"""

from __future__ import annotations

import contextlib
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from phalanx._base.param_groups import MakeOptimizer
from phalanx._comm.backend import Job, rendezvous
from phalanx._comm.backend.shared import is_joining
from phalanx.ddp.replicate import broadcast_tensors
from phalanx.nn.sync_batchnorm import uncounted_batch
from phalanx.strategies.current import ReplicaContext, entered
from phalanx.strategies.iterable_loader import IterableLoader
from phalanx.strategies.loader import (
    InputContext,
    check_loader,
    divide_batch,
    make_iterable_loader,
    make_loader,
    options_of,
    require_divided,
)
from phalanx.strategies.loss import LossFn, LossOf, loss_of_model, not_a_loss
from phalanx.strategies.reduction import Reduce, gather_over, reduce_over

T = TypeVar("T")
Precision = Literal["32-true", "bf16-mixed", "16-mixed"]


class Strategy(ABC):
    """A `Strategy` distributes a training job over ranks; `phalanx.strategies.get` makes one by its name.

        strategy = phalanx.strategies.get("mirrored")
        with strategy.scope():
            model = Model()
        model, optimizer = strategy.setup(model, torch.optim.AdamW(model.parameters()), F.cross_entropy)
        for x, y in strategy.loader(dataset, batch_size=64):       # 64 over all replicas
            loss = strategy.step(x, y)

    A replica is a copy of the model that trains on its part of each global batch: on one rank, or cut over several.
    """

    name: str

    is_elastic = True
    """Whether training continues when a rank is lost, in `phalanx.elastic.run`."""

    ranks_differ = False
    """Whether ranks hold different models: parts of one model, or copies that train apart."""

    is_in_step = True
    """Whether all ranks take each step together."""

    evaluates_together = False
    """Whether `evaluate` is collective over replicas: all must call it equally often."""

    def __init__(
        self, job: Job, *, num_replicas: int, replica: int, process_group: dist.ProcessGroup | None = None
    ) -> None:
        self.job = job
        self.device: torch.device = job.device
        self._num_replicas, self._replica, self._process_group = num_replicas, replica, process_group
        self.reason = ""
        """Why "auto" chose this strategy."""
        self.scaler: GradScaler | None = None
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._loss_fn: LossFn | None = None
        self._loss_of: LossOf | None = None
        self._autocast: torch.dtype | None = None
        self._num_setups = 0
        self._stream: IterableLoader | None = None  # the iterable dataset's loader that is being iterated, if any

    @property
    def num_replicas_in_sync(self) -> int:
        """Return the number of model copies in training; in an elastic job, the current number."""
        return self._num_replicas

    @property
    def replica_id_in_sync_group(self) -> int:
        return self._replica

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Return the group over which values of replicas are reduced; None if there is one replica."""
        return self._process_group

    @property
    def training_group(self) -> dist.ProcessGroup | None:
        """Return the group of all training ranks, including the ranks of one replica; None if there is one rank."""
        return world()

    @property
    def checkpoint_group(self) -> dist.ProcessGroup | None:
        """Return the group that saves and loads checkpoints together; None means the job's current group."""
        return None

    @property
    def is_main(self) -> bool:
        """Return whether this is the process that prints and writes."""
        group = self.training_group
        return group is None or group.rank() == 0

    # -- data ----------------------------------------------------------------------------------------------------------

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        padding: bool = True,
        **options: Any,
    ) -> DataLoader[Any]:
        """Return a DataLoader over this replica's part of each batch of `batch_size` samples.

        The k-th batches of all replicas together have the same samples under every strategy. The loader's sampler is a
        `phalanx.DistributedSampler`; without `set_epoch` the epoch advances by itself.

        Arguments:
            batch_size: samples of all replicas together.
            padding: repeat some samples if they don't divide evenly; False for evaluation, where each sample counts
                once.
            options: of `torch.utils.data.DataLoader`: num_workers, collate_fn, ...

        Each replica reads an IterableDataset completely and takes its part of each batch (`shuffle` and `padding` have
        no effect); the last batch may be divided unevenly. `seed` and the epoch, set by `loader.set_epoch(e)`, seed the
        dataset's draws from the global generators: all replicas read it in the same order.

        Raises:
            ValueError: the replicas can't share the batch evenly.
            TypeError: the dataset has no length and is not an IterableDataset, or divides itself; or an option sets a
                value that the strategy decides.
        """
        check_loader(dataset, options)
        group = world()
        if isinstance(dataset, IterableDataset):
            place = self.num_replicas_in_sync, self.replica_id_in_sync_group
            made = make_iterable_loader(dataset, batch_size, *place, drop_last, options, seed=seed)
            made.on_batch = self._note_stream
            return made
        if group is not None and is_joining(group):
            # A rank that joins later divides by more replicas than the first ranks did; the Trainer sets their share.
            own = max(1, batch_size // self.num_replicas_in_sync)
        else:
            own = divide_batch(batch_size, self.num_replicas_in_sync)
        return make_loader(
            dataset,
            own,
            num_replicas=self.num_replicas_in_sync,
            replica=self.replica_id_in_sync_group,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            padding=padding,
            options=options,
        )

    def distribute(self, loader: DataLoader[Any], *, padding: bool = True) -> DataLoader[Any]:
        """Return a loader that divides the global batches of `loader` among the replicas, as `loader()` does.

        A loader whose sampler is a `phalanx.DistributedSampler` for these replicas is already divided, and returned
        unchanged.

        Raises:
            ValueError, TypeError: `loader` has a custom sampler, or a sampler for other replicas, or no batch size.
        """
        options = options_of(loader)
        if options is None:
            place = self.num_replicas_in_sync, self.replica_id_in_sync_group
            if isinstance(loader, IterableLoader):
                loader.regroup(*place)
                loader.on_batch = self._note_stream
                return loader
            require_divided(loader, place, padding=padding)
            return loader
        return self.loader(loader.dataset, padding=padding, **options)

    def experimental_distribute_dataset(self, dataset: DataLoader[Any]) -> DataLoader[Any]:
        """Call `distribute`, which has this name in tf.distribute."""
        return self.distribute(dataset)

    def distribute_datasets_from_function(self, dataset_fn: Callable[[InputContext], T]) -> T:
        """Return the dataset that `dataset_fn` makes for this replica; use this for streams, which have no indices.

        `dataset_fn` is called once, with the `InputContext` of this replica.
        """
        return dataset_fn(InputContext(self.num_replicas_in_sync, self.replica_id_in_sync_group))

    def _note_stream(self, loader: IterableLoader | None) -> None:
        self._stream = loader

    def _weigh(self, weight: float | None) -> float:
        if weight is not None:
            return weight
        return 1.0 if self._stream is None else self._stream.weight

    # -- model and optimizer -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Build models inside this context: with equal values on all ranks, on this rank's device. All ranks enter it.

        Inside, `get_strategy()` returns this strategy.
        """
        with entered(self), same_random_state(self.training_group), self.device:
            yield

    def setup(
        self,
        model: nn.Module,
        optimizer: Optimizer | MakeOptimizer,
        loss_fn: LossFn | None = None,
        *,
        loss_of: LossOf | None = None,
        precision: Precision = "32-true",
    ) -> tuple[nn.Module, Optimizer]:
        """Return the model and the optimizer to train with; use only these from now on. All ranks call it, once.

        Arguments:
            optimizer: a new optimizer over the model's parameters, or a function that makes one from parameters.
            loss_fn: a function of the model's result and the target, which returns the mean over the samples.
            loss_of: instead, a function of the model and a batch, for other losses.
            precision: "bf16-mixed" and "16-mixed" (Lightning's names) run the forward under autocast; "16-mixed" also
                scales the loss.

        Raises:
            ValueError: the strategy can't train this model, or not with this optimizer; the message has the reason.
        """
        if loss_fn is not None and loss_of is not None:
            raise ValueError(f"{self._called}.setup: pass loss_fn or loss_of, not both")
        self._autocast = _autocast_dtype(precision, self.device)
        if precision == "16-mixed":
            if not self._skips_together:
                raise ValueError(
                    f"{self._called}.setup: with precision '16-mixed' a rank whose gradients overflow skips its step, "
                    "and the others would wait for it: use 'bf16-mixed'"
                )
            self.scaler = GradScaler(self.device.type)
        model = model.to(self.device) if self._moves_model else model
        self._num_setups += 1
        self._loss_fn = loss_fn
        self._loss_of = loss_of or (None if loss_fn is None else loss_of_model(loss_fn))
        self._model, self._optimizer = self._set_up(model, optimizer)
        return self._model, self._optimizer

    _moves_model = True
    _skips_together = True  # all ranks see an overflow: their gradients are averaged before the step

    def _set_up(self, model: nn.Module, optimizer: Optimizer | MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        return model, optimizer if isinstance(optimizer, Optimizer) else optimizer(model.parameters())

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self, *batch: Any) -> Tensor:
        """Take one step on this replica's batch, whose last element is the target; return the mean loss of its samples.

        Shape: the loss is (). If several ranks hold parts of one replica, all of them return the same loss.
        """
        loss = self.compute_gradients(batch)
        self.update()
        return loss

    def compute_gradients(
        self, batch: Any, *, share: float = 1.0, weight: float | None = None, is_last: bool = True
    ) -> Tensor:
        """Run forward and backward of one batch: add `share` times its gradients, and return its detached loss.

        With `is_last=False` more batches follow before the update, and gradients are not exchanged yet. `weight` is the
        weight of this replica's part in the mean over replicas. The default is the loader's weight for its latest batch
        of an IterableDataset, else 1.
        """
        model, loss_of = self._require_ready()
        share *= self._weigh(weight)
        counting = contextlib.nullcontext() if share else uncounted_batch()
        with counting, contextlib.nullcontext() if is_last else self.no_sync():
            with self.autocasting():
                loss = loss_of(model, batch)
            if not (isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1):
                raise not_a_loss(loss)
            scaled = loss if share == 1.0 else loss * share
            if self.scaler is not None:
                scaled = self.scaler.scale(scaled)
            torch.autograd.backward(scaled)
        return loss.detach()

    def update(self, max_norm: float | None = None) -> Tensor | None:
        """Step the optimizer with the accumulated gradients, and then clear them.

        Arguments:
            max_norm: first clip all gradients together to this 2-norm.

        Return the norm before clipping if `max_norm` is given, else None.
        """
        assert self._optimizer is not None
        norm = None
        if max_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self._optimizer)
            norm = self._clip(max_norm)
        if self.scaler is None:
            self._optimizer.step()
        else:
            self.scaler.step(self._optimizer)
            self.scaler.update()
        self._optimizer.zero_grad()
        return norm

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients inside this context locally on the replica, without exchanging them."""
        sync_off = getattr(self._model, "no_sync", None)
        with contextlib.nullcontext() if sync_off is None else sync_off():
            yield

    def _clip(self, max_norm: float) -> Tensor:
        assert self._model is not None
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def autocasting(self) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast context of the forward, for the precision that was passed to `setup`."""
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)

    def sync_buffers(self) -> None:
        """Broadcast the first replica's buffers, such as BatchNorm's, before an evaluation. All ranks call it."""
        if self._broadcasts_buffers and self.process_group is not None:
            model = self.bare_model
            ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
            buffers = [buffer for name, buffer in model.named_buffers() if name not in ignored]
            broadcast_tensors(buffers, self.process_group)

    @property
    def _broadcasts_buffers(self) -> bool:
        return False

    def evaluate(self, *inputs: Any) -> Any:
        """Return the model's result without gradients, if this rank has it; None if another rank of the replica has it.

        Replicas need not call it together or equally often, unless `evaluates_together`.
        """
        assert self._model is not None
        with torch.no_grad(), self.autocasting():
            return self.bare_model(*inputs)

    @property
    def is_set_up(self) -> bool:
        """Return whether `setup` was called."""
        return self._num_setups != 0

    @property
    def bare_model(self) -> nn.Module:
        """Return the model inside the strategy's wrapper."""
        model = self._model
        assert model is not None
        return model

    # -- values of all replicas ----------------------------------------------------------------------------------------

    def run(self, fn: Callable[..., T], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> T:
        """Call `fn` in this process's replica. The result is this replica's own; `reduce` combines results.

        Raises:
            ValueError: `args` is not a tuple or list: `args=(x)` is `x`, whose rows would be the arguments.
        """
        if not isinstance(args, list | tuple):
            raise ValueError(f"run: args must be a tuple or a list, as args=(x,), got a {type(args).__name__}")
        with entered(self):
            return fn(*args, **(kwargs or {}))

    def reduce(self, reduce_op: Reduce, value: Any, axis: int | tuple[int, ...] | None = None) -> Any:
        """Return the sum or the mean of all replicas' values, on every rank. All ranks call it.

        Arguments:
            reduce_op: "sum" or "mean", or torch.distributed.ReduceOp.SUM or AVG.
            value: a tensor or a number, or a list, tuple or dict of them.
            axis: also reduce over this axis, or these axes. Sizes may differ between replicas; each element counts
                once.

        Shape: a replica's value without `axis`.

        Raises:
            TypeError, ValueError: a value is not a number, or has no such axis; nothing was sent.
        """
        return reduce_over(self.process_group, reduce_op, value, axis)

    def gather(self, value: Tensor, axis: int = 0) -> Tensor:
        """Return the replicas' tensors concatenated along `axis`, on every rank. All ranks call it.

        Shape: sizes along `axis` may differ; all other sizes must be equal.
        """
        return gather_over(self.process_group, value, axis)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ReplicaContext], T]) -> T:
        """Return the result of `value_fn` for this replica."""
        return value_fn(ReplicaContext(self))

    def experimental_local_results(self, value: T) -> tuple[T]:
        """Return the values of the replicas in this process, which has one replica."""
        return (value,)

    # -- checkpoint ----------------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, Any]:
        """Return the model and optimizer as parts for `phalanx.CheckpointManager`.

        A model is saved under its own names, without wrapper, and can be loaded under another strategy.
        """
        return self.training_objects()

    def training_objects(self) -> dict[str, Any]:
        """Return this rank's training objects, for `phalanx.elastic.State`."""
        self._require_set_up()
        return {"model": self._model, "optimizer": self._optimizer, **({"scaler": self.scaler} if self.scaler else {})}

    def finish(self) -> None:
        """Finish the training: replicas that train apart run a last round, and then have equal models. Collective.

        Other strategies do nothing here. Call it before a last evaluation; `close` calls it, too.
        """
        return None

    def close(self) -> None:
        """Release the strategy's resources; the process group stays. All ranks call it."""
        self._model = self._optimizer = None

    def __enter__(self) -> Strategy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abandon()

    def _abandon(self) -> None:
        """Close after an error on this rank, without waiting for the other ranks."""
        Strategy.close(self)

    def __repr__(self) -> str:
        return f"{self._called}({self.num_replicas_in_sync} replicas, {self.device})"

    @property
    def _called(self) -> str:
        return type(self).__name__

    def _require_set_up(self) -> None:
        if self._num_setups != 1:
            problem = "has no model yet: call setup first" if not self._num_setups else "was set up several times"
            raise ValueError(f"{self._called} {problem}" + (": call the models' own steps" * (self._num_setups > 1)))

    def _require_ready(self) -> tuple[nn.Module, LossOf]:
        self._require_set_up()
        if self._loss_of is None:
            raise ValueError(f"{self._called}: a step needs a loss: give setup a loss_fn, or loss_of")
        assert self._model is not None
        return self._model, self._loss_of


def _autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast; None means no autocast.

    Raises:
        ValueError: the precision is unknown, or `device` does not support it.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision must be one of {', '.join(get_args(Precision))}, got {precision!r}")
    if precision == "16-mixed" and device.type == "cpu":
        raise ValueError("precision '16-mixed' is for GPUs; on a CPU use 'bf16-mixed', which needs no scaling")
    return {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}[precision]


def world() -> dist.ProcessGroup | None:
    """Return the group of all ranks of the job, or None for a single rank; in an elastic job, of the current ranks."""
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None


def may_have_others() -> bool:
    """Return whether there are several ranks, or more may join from other hosts."""
    return world() is not None or (dist.is_initialized() and rendezvous.agents_key() is not None)


@contextlib.contextmanager
def same_random_state(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Give all ranks of `group` the first rank's CPU random state inside this context. All ranks enter it.

    A rank that entered with the first rank's state keeps the state at the end of the context, so the ranks' draws stay
    equal; a rank that entered with another state restores that state.
    """
    if group is None:
        yield
        return
    own = torch.get_rng_state()
    shared = own.clone()
    dist.broadcast(shared, group=group, group_src=0)
    torch.set_rng_state(shared)
    try:
        yield
    finally:
        if not torch.equal(own, shared):
            torch.set_rng_state(own)
