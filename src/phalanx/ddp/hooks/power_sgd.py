"""PowerSGD sends a gradient matrix as two thin ones.

    M  (n x m)  ~  P Qᵀ        P = mean(M) Q, orthonormal        Q = mean(M)ᵀ P        n·r + m·r numbers in place of n·m

It differs from PyTorch's in the order of collectives (PyTorch's aborts over Gloo when there are several buckets), which
also lets two of the three collectives travel as one; in gradients that are zero (PyTorch's makes them NaN), scalar or
not finite; and in what is kept between steps, which belongs to parameters, not to buckets.
Source: Vogels et al. (2019), PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization.
"""

# Annotations stay objects here: PyTorch's own DistributedDataParallel compares those of a hook with its classes.

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket

from phalanx.ddp.hooks.residual import Named, Residual, accumulator
from phalanx.ddp.hooks.stages import StagedBuckets, Stages


class PowerSGDState:
    """This is the state of `powerSGD_hook`, for one model; it takes PyTorch's arguments.

    Arguments:
        process_group: the default group if None.
        matrix_approximation_rank: r above.
        start_powerSGD_iter: steps of ordinary averaging before the first compressed one; 2 or more, unless
            `use_error_feedback` and `warm_start` are both off.
        min_compression_rate: matrices that would not shrink by more than this factor travel whole, and so does all
            that is no matrix.
        use_error_feedback: keep what compression leaves out for the next step.
        warm_start: start from the last step's Q; else from random numbers, the same on all ranks.
        orthogonalization_epsilon, compression_stats_logging_frequency, batch_tensors_with_same_shape: accepted, and
            without effect: the factorisation used here needs no epsilon, nothing is logged, matrices go one by one.

    Memory: 4 bytes per element of gradient for the residual, and Q for each matrix.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        if matrix_approximation_rank < 1:
            raise ValueError(
                f"PowerSGDState: matrix_approximation_rank must be 1 or more, got {matrix_approximation_rank}"
            )
        if (use_error_feedback or warm_start) and start_powerSGD_iter <= 1:
            raise ValueError(
                f"PowerSGDState: start_powerSGD_iter must be 2 or more with error feedback or warm start, as in "
                f"PyTorch, got {start_powerSGD_iter}"
            )
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.random_seed = random_seed
        self._rng = np.random.RandomState(random_seed)  # as in PyTorch: the same seed starts from the same Q
        self._num_drawn = 0
        self.iter = 0
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.residual = Residual()
        self.factors: dict[Tensor, Tensor] = {}
        """The factor Q of each parameter's last step."""
        self.pipeline = StagedBuckets()

    def compression_stats(self) -> tuple[float, int, int]:
        """Return the rate, and the number of elements before and after compression, since the first compressed step."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0.0), before, after

    def draw_seed(self) -> int:
        """Return a number that is the same on all ranks, which draw in the same order."""
        self._num_drawn += 1
        return int(self._rng.randint(1_000_000_000))

    def state_dict(self, named_parameters: Named) -> dict[str, Any]:
        """Return all that a later run needs, by name, with `model.named_parameters()`; the residual is this rank's
        own.
        """
        named = list(named_parameters)
        return {
            "iter": self.iter,
            "num_drawn": self._num_drawn,
            "factors": {name: self.factors[p].clone() for name, p in named if p in self.factors},
            "residual": self.residual.state_dict(named),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], named_parameters: Named) -> None:
        """Go on where `state_dict` was taken. All ranks must load the same, except for "residual".

        Raises:
            ValueError: it is the state of another model.
        """
        parameters = dict(named_parameters)
        strangers = [name for name in state_dict["factors"] if name not in parameters]
        if strangers:
            raise ValueError(f"PowerSGDState: there is no parameter {strangers[0]!r} in the model")
        self.residual.load_state_dict(state_dict["residual"], parameters.items())
        self.factors = {parameters[name]: factor.clone() for name, factor in state_dict["factors"].items()}
        self._rng, self._num_drawn = np.random.RandomState(self.random_seed), 0
        for _ in range(state_dict["num_drawn"]):
            self.draw_seed()
        self.iter = state_dict["iter"]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "PowerSGDState can't be pickled: what it keeps belongs to this process's parameters. Save "
            "state.state_dict(model.named_parameters())"
        )


@dataclass
class _Factored:
    """A `_Factored` is one matrix on its way. `value` is a view of the bucket's values; `p` and `q` are the thin
    ones.
    """

    parameter: Tensor
    value: Tensor
    q: Tensor
    p: Tensor


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket, with its large matrices approximated in rank `state.matrix_approximation_rank`.

    Cost: two all_reduces, of r·n numbers per matrix and all that is not compressed, then of r·m.
    Numerics: bitwise equal on all ranks. P and Q travel in the gradient's dtype, and are computed in float32 or double
    precision. A NaN or an infinity makes its matrix NaN on all ranks, and forgets its residual and Q.
    Shape: of the bucket, any length; the same on every rank. Gradients of two dimensions or more count as matrices.

    Raises:
        PhalanxError: from the future: a rank died, is late, or has another bucket.
    """
    stages = _average if state.iter < state.start_powerSGD_iter else _compress
    launched = state.pipeline.launch(bucket, stages(state, bucket))
    state.iter += bucket.is_last()
    return launched


def _group(state: PowerSGDState) -> dist.ProcessGroup:
    group = state.process_group or dist.group.WORLD
    assert group is not None
    return group


def _average(state: PowerSGDState, bucket: Any) -> Stages:
    group = _group(state)
    buffer: Tensor = bucket.buffer()
    buffer.div_(group.size())
    yield dist.all_reduce(buffer, group=group, async_op=True)
    return buffer


def _compress(state: PowerSGDState, bucket: Any) -> Stages:
    group = _group(state)
    size = group.size()
    buffer: Tensor = bucket.buffer()
    if buffer.numel() == 0:
        return buffer
    wide = accumulator(buffer.dtype)
    values = buffer.to(wide, copy=True)
    residual = state.residual.of(bucket) if state.use_error_feedback else None
    if residual is not None:
        values += residual
    matrices, whole = _divide(state, bucket, values)
    for matrix in matrices:
        torch.matmul(matrix.value, matrix.q, out=matrix.p)
    first = _pack([*(m.p for m in matrices), *(tensor / size for tensor in whole)], buffer)
    yield dist.all_reduce(first, group=group, async_op=True)

    _unpack(first, [*(m.p for m in matrices), *whole])
    for matrix in matrices:
        matrix.p = torch.linalg.qr(matrix.p).Q  # this serves for a zero matrix as well, and no epsilon is needed
        torch.matmul(matrix.value.t(), matrix.p, out=matrix.q)
        matrix.q /= size
    second = _pack([m.q for m in matrices], buffer)
    if matrices:
        yield dist.all_reduce(second, group=group, async_op=True)

    _unpack(second, [m.q for m in matrices])
    if residual is not None:
        residual.zero_()
        left = _like(residual, values, matrices)
    for number, matrix in enumerate(matrices):
        approximation = matrix.p @ matrix.q.t()
        if residual is not None:
            torch.sub(matrix.value, approximation, out=left[number])
        matrix.value.copy_(approximation)
        if state.warm_start:
            state.factors[matrix.parameter] = matrix.q
    if residual is not None:
        residual.nan_to_num_(0.0, 0.0, 0.0)
    buffer.copy_(values)
    return buffer


def _divide(state: PowerSGDState, bucket: Any, values: Tensor) -> tuple[list[_Factored], list[Tensor]]:
    """Return the matrices to be compressed, each with its Q, and everything else; views of `values`."""
    matrices: list[_Factored] = []
    whole: list[Tensor] = []
    seed = None
    start = bucket.buffer().storage_offset()
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        offset = gradient.storage_offset() - start
        value = values[offset : offset + gradient.numel()]
        rows = gradient.shape[0] if gradient.dim() else 1
        columns = gradient.numel() // rows if rows else 0
        rank = min(rows, columns, state.matrix_approximation_rank)
        after = (rows + columns) * rank
        state.total_numel_before_compression += value.numel()
        if after * state.min_compression_rate >= value.numel():
            state.total_numel_after_compression += value.numel()
            whole.append(value)
            continue
        state.total_numel_after_compression += after
        q = state.factors.get(parameter) if state.warm_start else None
        if q is None or q.shape != (columns, rank) or not bool(q.isfinite().all()):
            if seed is None:  # one is drawn per bucket and step, alike on every rank
                seed = torch.Generator().manual_seed(state.draw_seed())
            q = torch.randn(columns, rank, generator=seed).to(values)
        q = torch.linalg.qr(q).Q
        matrices.append(_Factored(parameter, value.view(rows, columns), q, values.new_empty(rows, rank)))
    return matrices, whole


def _like(residual: Tensor, values: Tensor, matrices: list[_Factored]) -> list[Tensor]:
    """Return the parts of `residual` where the matrices lie in `values`."""
    return [
        residual[m.value.storage_offset() : m.value.storage_offset() + m.value.numel()].view(m.value.shape)
        for m in matrices
    ]


def _pack(tensors: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat([tensor.reshape(-1).to(like.dtype) for tensor in tensors]) if tensors else like.new_empty(0)


def _unpack(packed: Tensor, tensors: list[Tensor]) -> None:
    for tensor, part in zip(tensors, torch.split(packed, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
