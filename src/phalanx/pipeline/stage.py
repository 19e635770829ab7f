"""A `Stage` runs the forward and the backward of a micro-batch, and keeps the state between the two."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

from phalanx._base.partition.parts import LayerRange
from phalanx._base.partition.program import LayerProgram
from phalanx._base.torch_names import find
from phalanx.pipeline.aliases import ValueAliases, find_pairs
from phalanx.pipeline.micro_batch_random import MicroBatchRandom
from phalanx.pipeline.nested import tree_flatten, tree_map
from phalanx.pipeline.weight_gradients import WeightGradients, Weights, saved_bytes


@dataclass
class PendingMicroBatch:
    """A `PendingMicroBatch` is what a stage keeps of a micro-batch from its forward to the end of its backward."""

    inputs: dict[fx.Node, Any]
    leaves: dict[int, list[Tensor]] = field(default_factory=dict)
    """The received tensors for which their source stage expects a gradient, by source stage."""
    outputs: dict[int, list[Tensor]] = field(default_factory=dict)
    """The sent tensors for which their target stage may return a gradient, by target stage."""
    needs: dict[int, list[bool]] = field(default_factory=dict)
    """Whether each sent tensor is among the `outputs`, by target stage."""
    loss: Tensor | None = None
    random_state: Tensor | None = None
    buffers: dict[tuple[nn.Module, str], Tensor] = field(default_factory=dict)
    mode: tuple[bool, bool] = (True, True)
    finish: Callable[[dict[fx.Node, Any]], Any] | None = None
    recompute: bool = False
    recomputed: bool = False
    weights: WeightGradients | None = None
    """The weight gradients to compute outside of autograd, if any."""


class Stage:
    """A `Stage` is a contiguous range of the model's layers on this rank."""

    def __init__(
        self,
        part: LayerRange,
        last: bool,
        root: nn.Module,
        output: fx.Node,
        random_state: MicroBatchRandom,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self.part = part
        self.index = part.index
        wanted = [node for values in part.sends.values() for node in values]
        if last:
            wanted += output.all_input_nodes
        sent = [node for values in part.sends.values() for node in values]
        self.program = LayerProgram(root, part.layers, dict.fromkeys(wanted), makers_of(root, part.nodes, sent))
        self.parameters = parameters
        self._random_state = random_state
        self._mode = (False, False)
        """Whether gradients are needed, and whether layers are in training: both decide which layers work in place."""
        self._written: dict[tuple[bool, bool], set[fx.Node]] = {}
        """The values of other stages that some layer changes in place, by mode; known after the first micro-batch."""
        self.seen: dict[tuple[bool, bool], ValueAliases] = {}
        """The values that overlap, and those that are changed in place, in the first micro-batch, by mode."""
        self._buffers = RecomputedBuffers(root.get_submodule(name) for name in part.modules)
        own = [module for name in part.modules for module in root.get_submodule(name).modules()]
        self._own = own
        # `Weights` cannot see DDP's hooks, which are C++ hooks of the graph: autograd computes these weight gradients.
        self._weights = None if any(isinstance(module, DistributedDataParallel) for module in own) else Weights()
        self._saved_bytes: int | None = None
        """The number of bytes that a micro-batch keeps for its backward; measured once."""
        self.in_flight: dict[int, PendingMicroBatch] = {}
        self._most = 1

    def begin(self, most: int) -> None:
        """Begin a step with at most `most` micro-batches in flight on this stage."""
        self._most = most
        # The deprecated `register_backward_hook` hooks the last operation's node, where it sees weight gradients, too.
        if any(module._backward_hooks and module._is_full_backward_hook is False for module in self._own):
            self._weights = None
        if self._weights is not None:
            self._weights.begin()

    def forward(
        self,
        micro_batch: int,
        inputs: dict[fx.Node, Any],
        leaves: dict[int, list[Tensor]],
        *,
        training: bool,
        in_training: bool,
        recompute: bool,
        finish: Callable[[dict[fx.Node, Any]], Any] | None = None,
        making: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> tuple[dict[int, tuple[list[Any], list[bool]]], Any]:
        """Run the layers; return the values and needs for each later stage, and the result of `finish`.

        The needs are a bool for each tensor in the values: whether it needs a gradient. `finish` computes the loss of
        the last stage, and is recomputed with the stage. Values to send are created inside the context `making()`.
        `training` says whether a backward will follow; `in_training` is the modules' training mode.
        """
        pending = PendingMicroBatch(inputs, leaves, finish=finish, recompute=recompute)
        self._mode = (training, in_training)
        if recompute:
            pending.random_state = self._random_state.get()
            pending.buffers, pending.mode = self._buffers.values(self._mode), self._mode
        with torch.set_grad_enabled(training and not recompute):
            results = self._run(inputs, making)
            made = finish(results) if finish is not None else None
        sends = {}
        some = recompute and (any(leaves.values()) or any(p.requires_grad for p in self.parameters))
        for target, nodes in self.part.sends.items():
            values = [results[node] for node in nodes]
            tensors = flat_tensors(values)
            needs = [training and (t.requires_grad or (some and t.is_floating_point())) for t in tensors]
            sends[target] = (values, needs)
            if training:
                pending.needs[target] = needs
                pending.outputs[target] = [t for t, needed in zip(tensors, needs, strict=True) if needed]
        if training:
            pending.loss = made if isinstance(made, Tensor) else None
            if not recompute:  # autograd keeps those that it needs
                pending.inputs = {}
            self.in_flight[micro_batch] = pending
        return sends, made

    def recompute(self, micro_batch: int) -> None:
        """Run the forward again with gradients, if it ran without them."""
        pending = self.in_flight[micro_batch]
        if not pending.recompute:
            return
        pending.recompute, pending.recomputed = False, True
        assert pending.random_state is not None
        before = self._random_state.get()
        self._random_state.set(pending.random_state)
        with torch.enable_grad(), self._buffers.as_they_were(pending.buffers, pending.mode):
            results = self._run(pending.inputs, nullcontext)
            pending.loss = pending.finish(results) if pending.finish is not None else None
        self._random_state.set(before)
        for target, nodes in self.part.sends.items():
            tensors = [t for t in tree_flatten([results[node] for node in nodes])[0] if isinstance(t, Tensor)]
            pending.outputs[target] = [t for t, needed in zip(tensors, pending.needs[target], strict=True) if needed]

    def prepare_backward(self, micro_batch: int, *, later_weights: bool = False, is_last: bool = True) -> None:
        """Plan which weight gradients to compute after the gradients for other stages are sent.

        Call it before the gradients of later stages arrive. With `later_weights`, the schedule has a separate action
        for `backward_weights`, and all deferrable work waits for it. `is_last` says that no other micro-batch follows.
        The two gradients of a convolution cost more in two calls than in one. So they are split only in these two
        cases: otherwise the earlier stages have other work, and gain nothing from an early gradient.
        """
        pending = self.in_flight[micro_batch]
        if self._weights is None:
            return
        roots = _roots(pending)
        if not any(pending.leaves.values()):
            room = 0.0  # no stage waits
        else:
            room = float("inf") if later_weights else self._room(roots, recomputed=pending.recomputed)
        pending.weights = self._weights.find(roots, room, convolutions=later_weights or is_last)

    def _room(self, roots: Sequence[Tensor], *, recomputed: bool) -> float:
        """Return how many bytes of a micro-batch may be kept until its gradients are sent, without a higher peak.

        The peak is that of all micro-batches that the schedule allows in flight here; fewer are near its end.
        """
        if self._saved_bytes is None:
            self._saved_bytes = saved_bytes(roots)
        now, most = (1, 1) if recomputed else (len(self.in_flight), self._most)
        return self._saved_bytes * (_TOLERATED * most - (now - 1))

    def backward(self, micro_batch: int, grads: dict[int, list[Tensor | None]]) -> dict[int, list[Tensor | None]]:
        """Return the gradients for each source stage, given the gradients from each target stage.

        Call `backward_weights` afterwards, at any time.
        """
        pending = self.in_flight[micro_batch]
        roots: list[Tensor] = []
        root_grads: list[Tensor | None] = []
        if pending.loss is not None and pending.loss.requires_grad:
            roots, root_grads = [pending.loss], [None]
        for target, tensors in pending.outputs.items():
            for tensor, grad in zip(tensors, grads[target], strict=True):
                if grad is not None and tensor.requires_grad:
                    roots.append(tensor)
                    root_grads.append(grad)
        leaves = [leaf for source in pending.leaves.values() for leaf in source]
        if pending.weights is not None:
            pending.weights.backward(roots, root_grads)
        elif roots:
            torch.autograd.backward(roots, root_grads)
        pending.outputs, pending.loss, pending.finish = {}, None, None
        made = {source: [leaf.grad for leaf in tensors] for source, tensors in pending.leaves.items()}
        for leaf in leaves:
            leaf.grad = None
        return made

    def backward_weights(self, micro_batch: int) -> None:
        """Accumulate the weight gradients that `backward` deferred, and drop the micro-batch."""
        pending = self.in_flight.pop(micro_batch)
        if pending.weights is not None:
            pending.weights.run()

    def _run(
        self, inputs: dict[fx.Node, Any], making: Callable[[], AbstractContextManager[None]]
    ) -> dict[fx.Node, Any]:
        """Run the layers on `inputs`, which stay unchanged: a layer that works in place gets a copy.

        The first run in a mode, on copies of all inputs, shows which inputs need one.
        """
        written = self._written.get(self._mode)
        given = {
            node: tree_map(_copy, value) if written is None or node in written else value
            for node, value in inputs.items()
        }
        results = self.program.run(given, making)
        if written is None and not torch.is_inference_mode_enabled():  # versions are not counted there: always copy
            written = {node for node, value in given.items() if any(t._version for t in flat_tensors([value]))}
            self._require_last_readers(written)
            self._written[self._mode] = written
            crossing = {node: results[node] for nodes in self.part.sends.values() for node in nodes}
            self.seen[self._mode] = ValueAliases(
                self.index, find_pairs({**given, **crossing}), tuple(map(str, written))
            )
        return results

    def _require_last_readers(self, written: Iterable[fx.Node]) -> None:
        """Raise if a later stage reads a value that a layer here changes: that stage would get the unchanged value."""
        own = set(self.part.nodes)
        for node in written:
            here = [user for user in node.users if user in own]
            begins = here[0]
            if any(user not in own and begins < user for user in node.users):
                names = [layer.name for layer in self.part.layers if any(user in layer.nodes for user in here)]
                layers = " or ".join(map(repr, names))
                raise ValueError(
                    f"layer {layers} changes the value {str(node)!r} of an earlier stage in place, "
                    "but a later stage also uses that value, and would receive it unchanged. Let the layer make a new "
                    "tensor (inplace=False), or cut elsewhere."
                )


_TOLERATED = 1.05


def _roots(pending: PendingMicroBatch) -> list[Tensor]:
    """Return the tensors at which the backward may begin."""
    tensors = [tensor for tensors in pending.outputs.values() for tensor in tensors if tensor.requires_grad]
    return [pending.loss, *tensors] if pending.loss is not None and pending.loss.requires_grad else tensors


def makers_of(root: nn.Module, nodes: Sequence[fx.Node], values: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes that may create the memory of `values`.

    These are the nodes that return the values. If such a node may work in place or return a view of its input, the
    nodes that make the input are included.
    """
    makers: set[fx.Node] = set()
    todo = [value for value in values if value in nodes]
    while todo:
        node = todo.pop()
        if node in makers:
            continue
        makers.add(node)
        if node.op == "call_module":
            module = root.get_submodule(str(node.target))
            passes = getattr(module, "inplace", False) or isinstance(module, _PASSING)
        else:
            passes = True  # a function may return a view of its input, or work in place
        if passes:
            todo += [source for source in node.all_input_nodes if source in nodes]
    return makers


_Dropout: Any = find(
    "torch.nn.modules.dropout._DropoutNd",
    loses="stages of a Pipeline know PyTorch's own dropout alone",
    instead=nn.Dropout,
)
_PASSING = (nn.Identity, nn.Flatten, nn.Unflatten, _Dropout)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def flat_tensors(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors in nested values."""
    if all(isinstance(value, Tensor) for value in values):
        return list(values)
    return [leaf for leaf in tree_flatten(list(values))[0] if isinstance(leaf, Tensor)]


# Restore buffers that layers change in their forward, when a forward is recomputed in the backward.
#
# The second run begins with the same buffers as the first. Its changes are dropped: the first run made them already.
# (Running statistics of BatchNorm layers come from the whole mini-batch: see `MiniBatchStatistics`.)

_Place = tuple[nn.Module, str]


class RecomputedBuffers:
    """`RecomputedBuffers` saves the buffers of some modules before a forward, and restores them to recompute it.

    The first recomputation in a mode shows which buffers change; only those are saved from then on.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        inner = {part: None for module in modules for part in module.modules()}
        self._all = [(part, name) for part in inner for name, buffer in part._buffers.items() if buffer is not None]
        self._changing: dict[Hashable, list[_Place]] = {}

    def values(self, mode: Hashable) -> dict[_Place, Tensor]:
        """Return copies of the buffers that may change."""
        return {place: _buffer(place).detach().clone() for place in self._changing.get(mode, self._all)}

    @contextmanager
    def as_they_were(self, values: Mapping[_Place, Tensor], mode: Hashable) -> Iterator[None]:
        """Replace the modules' buffers by copies of `values` during the block, and drop the block's changes to them."""
        now = {place: _buffer(place) for place in values}
        tried = {place: value.clone() for place, value in values.items()}
        for (module, name), value in tried.items():
            module._buffers[name] = value
        try:
            yield
        finally:
            for (module, name), value in now.items():
                module._buffers[name] = value
        if mode not in self._changing:
            self._changing[mode] = [place for place, value in values.items() if not torch.equal(value, tried[place])]


def _buffer(place: _Place) -> Tensor:
    module, name = place
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer
