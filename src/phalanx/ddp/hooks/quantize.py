"""Send gradients as int8 blocks, a quarter of the bytes, and carry rounding errors over to the next step.

    rank 0   [ own 0 | for 1 ]   --all_to_all-->   mean of part 0   --all_gather-->   [ part 0 | part 1 ]
    rank 1   [ for 0 | own 1 ]     int8 blocks     mean of part 1     int8 blocks     [ part 0 | part 1 ]

Everybody decodes the same bytes at the end, so all ranks hold the same bits.
"""

# Annotations stay objects here: PyTorch's own DistributedDataParallel compares those of a hook with its classes.

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket

from phalanx.ddp.hooks.blocks import decode, encode, message_bytes
from phalanx.ddp.hooks.residual import Named, Residual, accumulator
from phalanx.ddp.hooks.stages import StagedBuckets, Stages


class QuantizationState:
    """This is the state of `quantize_hook`, for one model.

    Arguments:
        process_group: the default group if None.
        block_size: how many elements share a scale. Larger sends fewer bytes and rounds more.
        use_error_feedback: False forgets what rounding loses, and saves the memory for it.

    Memory: 4 bytes per element of gradient, on every rank, for the residual.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        block_size: int = 256,
        use_error_feedback: bool = True,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"QuantizationState: block_size must be 1 or more, got {block_size}")
        self.process_group = process_group
        self.block_size = block_size
        self.use_error_feedback = use_error_feedback
        self.bytes_sent = 0
        """The number of bytes that this rank has sent up to now, without the headers of the network."""
        self.residual = Residual()
        self.pipeline = StagedBuckets()

    def state_dict(self, named_parameters: Named) -> dict[str, Any]:
        """Return the residuals of this rank, by name: every rank saves its own, with `model.named_parameters()`."""
        return {"residual": self.residual.state_dict(named_parameters)}

    def load_state_dict(self, state_dict: Mapping[str, Any], named_parameters: Named) -> None:
        """Go on from saved residuals. Without them, or on other ranks, training is right, but the residual is lost.

        Raises:
            ValueError: the residuals are of another model.
        """
        self.residual.load_state_dict(state_dict["residual"], named_parameters)


def quantize_hook(state: QuantizationState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in int8 blocks, with error feedback.

    Cost: 2(P-1)/P · (1 + 4/block_size) bytes per element and rank; all_reduce of float32 sends four times as much.
    Several passes over the bucket on each rank: it pays where the network is slow, and never in shared memory.
    Numerics: bitwise equal on all ranks. The sum of what all steps gave, plus the mean of all ranks' residuals, is
    the sum of the true means, up to rounding in float32. A NaN or an infinity makes its block NaN, on all ranks, and
    forgets the block's residual.
    Shape: of the bucket, any length; the same on every rank.

    Raises:
        PhalanxError: from the future: a rank died, is late, or has another bucket.
    """
    return state.pipeline.launch(bucket, _stages(state, bucket))


def _stages(state: QuantizationState, bucket: Any) -> Stages:
    group = state.process_group or dist.group.WORLD
    assert group is not None
    size, rank, block = group.size(), group.rank(), state.block_size
    buffer: Tensor = bucket.buffer()
    numel = buffer.numel()
    if size == 1 or numel == 0:
        return buffer
    part = -(-numel // (size * block)) * block  # the length of each rank's part; the last may reach beyond the bucket
    residual = state.residual.of(bucket) if state.use_error_feedback else None

    values = torch.zeros(size * part, dtype=accumulator(buffer.dtype), device=buffer.device)
    values[:numel] = buffer
    if residual is not None:
        values[:numel] += residual
    message = encode(values.view(size, part), block)
    if residual is not None:
        lost = values.sub_(decode(message, block, values.dtype).view(-1))
        residual.copy_(lost[:numel].nan_to_num_(0.0, 0.0, 0.0))

    received = torch.empty_like(message)
    yield dist.all_to_all_single(received, message, group=group, async_op=True)
    state.bytes_sent += 2 * (size - 1) * message_bytes(part, block)
    mean = torch.zeros(1, part, dtype=values.dtype, device=buffer.device)
    for sender in range(size):
        mean += decode(received[sender : sender + 1], block, values.dtype)
    mean /= size
    answer = encode(mean, block)
    if residual is not None:
        # The rounding of the mean by this rank comes back through its own gradient, which counts 1/size.
        lost = mean.sub_(decode(answer, block, values.dtype)).mul_(size).nan_to_num_(0.0, 0.0, 0.0)
        mine = residual[rank * part : (rank + 1) * part]
        mine += lost[0, : mine.numel()]

    gathered = torch.empty_like(message)
    yield dist.all_gather(list(gathered.unbind()), answer[0], group=group, async_op=True)
    buffer.copy_(decode(gathered, block, values.dtype).view(-1)[:numel])
    return buffer
