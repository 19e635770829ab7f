"""Compute weight gradients outside of autograd: in place, and after the gradients of the inputs are sent.

For every micro-batch, autograd computes a new gradient of a weight and adds it to the sum. A product that accumulates
in place (`addmm_`) saves one write and one read of the whole gradient. Autograd also computes the weight gradients
before the stage can send the gradients of its inputs, for which the previous stage waits. So if only matrix products or
convolutions use a weight, autograd runs without that weight, the factors of its gradient are kept, and their product is
computed after the gradients of the inputs are sent:

    autograd    every layer: grad_input = grad_output @ weight, weight.grad += grad_output.T @ input; send
    here        every layer: grad_input = grad_output @ weight; send; weight.grad.addmm_(grad_output.T, input)

The gradients equal those of autograd up to the rounding of sums. Autograd computes a weight's gradient itself if the
parameter has a hook, if the graph contains a custom function, or if saved-tensor hooks move activations elsewhere.

Source: Narayanan et al. (2021), Megatron-LM, whose kernels fuse the addition; Qi et al. (2023), Zero Bubble.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

_LEAST_PRODUCT = 2**22
"""The number of multiplications below which autograd is faster than a matrix product called from Python."""


@dataclass(slots=True)
class _Product:
    """A `_Product` computes the gradient of `weight` from one use of it in a micro-batch."""

    weight: Tensor
    operand: Tensor | None
    """The other factor: (N, in), or a convolution's input."""
    transposed: bool = True
    """Whether the weight is (out, in), as in nn.Linear."""
    bias: Tensor | None = None
    convolution: tuple[Any, ...] = ()
    grad: Tensor | None = None
    """The gradient of the layer's output, once autograd has computed it."""
    at_once: bool = False
    """Whether the product is added during the backward, and not deferred to `run`."""

    def add(self) -> None:
        """Add the product to `weight.grad`, and release its factors."""
        grad, operand = self.grad, self.operand
        self.grad = self.operand = None
        if grad is None or operand is None:
            return
        # The training loop may call this under autocast, but the layer ran outside it: dtypes equal the weight's.
        with torch.autocast(grad.device.type, enabled=False):
            self._add(grad, operand)

    def _add(self, grad: Tensor, operand: Tensor) -> None:
        if self.convolution:
            _, of_weight, of_bias = torch.ops.aten.convolution_backward(
                grad, operand, self.weight, *self.convolution, [False, True, self.bias is not None]
            )
            _add(self.weight, of_weight)
            if self.bias is not None:
                _add(self.bias, of_bias)
            return
        first, second = (grad.t(), operand) if self.transposed else (operand.t(), grad)
        if self.weight.grad is None:
            self.weight.grad = first.mm(second)
        else:
            self.weight.grad.addmm_(first, second)


class WeightGradients:
    """`WeightGradients` computes those weight gradients of one micro-batch that autograd leaves out."""

    def __init__(self, products: Sequence[tuple[Any, _Product]], others: Sequence[Tensor]) -> None:
        """Store `products` with their autograd nodes; `others` are all other tensors that get a gradient."""
        self._products = products
        self._others = others
        self._later: list[_Product] = []

    def backward(self, roots: list[Tensor], grads: list[Tensor | None]) -> None:
        """Run `torch.autograd.backward` without these weights; hooks add their products, or defer them to `run`."""
        handles = []
        try:
            for node, product in self._products:
                handles.append(node.register_prehook(self._take(product)))
            self._products = ()
            torch.autograd.backward(roots, grads, inputs=self._others)
        finally:
            for handle in handles:
                handle.remove()

    def run(self) -> None:
        """Add the deferred products."""
        later, self._later = self._later, []
        with torch.no_grad():
            for product in later:
                product.add()

    def _take(self, product: _Product) -> Any:
        def hook(grads: Sequence[Tensor | None]) -> None:
            product.grad = grads[0]
            if product.at_once:
                with torch.no_grad():
                    product.add()
            else:
                self._later.append(product)

        return hook


class Weights:
    """`Weights` finds the weights in a graph whose gradients can be computed outside of autograd."""

    def __init__(self) -> None:
        self._known: dict[Any, Tensor] = {}
        """The parameters, by their AccumulateGrad nodes."""
        self._fruitless: set[bool] = set()
        """The values of `convolutions` for which a search in this step found nothing."""

    def begin(self) -> None:
        """Begin a step, whose graphs may differ."""
        self._fruitless.clear()

    def find(self, roots: Sequence[Tensor], room: float, *, convolutions: bool = True) -> WeightGradients | None:
        """Return the weight gradients of `roots` to compute outside of autograd; None if there are none.

        The gradients that the backward reaches last are deferred, as many as their factors fit into `room` bytes: the
        activations of the other layers have been freed by then. The others are accumulated in place at once.
        Gradients of convolutions cannot be accumulated in place: autograd computes those that are not deferred, and
        without `convolutions` all of them.
        """
        convolutions = convolutions and room > 0
        if convolutions in self._fruitless or True in self._fruitless:
            return None
        found = self._find(roots, room, convolutions)
        if found is None:
            self._fruitless.add(convolutions)
        return found

    def _find(self, roots: Sequence[Tensor], room: float, convolutions: bool) -> WeightGradients | None:
        uses: dict[Any, int] = {}
        candidates: list[tuple[Any, Any, Any, str]] = []
        todo: list[Any] = []
        for root in roots:
            if root.grad_fn is None:
                return None
            if root.grad_fn not in uses:
                uses[root.grad_fn] = 1  # the root's own gradient counts as a use; each edge to it adds another
                todo.append(root.grad_fn)
        ends = []
        while todo:
            node = todo.pop()
            edges = node.next_functions
            kind = type(node).__name__
            if not edges:
                ends.append(node)
            elif kind in _PRODUCTS:
                candidates.append((node, edges, *_PRODUCTS[kind]))
            elif isinstance(node, BackwardCFunction):
                return None  # it may do anything; a reentrant checkpoint raises if `inputs` is given
            for source, _ in edges:
                if source is None:
                    continue
                if source in uses:
                    uses[source] += 1
                else:
                    uses[source] = 1
                    todo.append(source)
        return self._choose(uses, candidates, ends, room, convolutions)

    def _choose(
        self, uses: dict[Any, int], candidates: list[Any], ends: list[Any], room: float, convolutions: bool
    ) -> WeightGradients | None:
        products: list[tuple[Any, _Product, tuple[Any, ...]]] = []
        for node, edges, at, saved in candidates:
            if (found := self._product(node, edges, at, saved, uses, convolutions)) is not None:
                products.append((node, *found))
        products = _plan_deferral(products, room)
        while True:  # handle all uses of a weight here, or none
            made: dict[Any, int] = {}
            for _, _, nodes in products:
                for end in nodes:
                    made[end] = made.get(end, 0) + 1
            kept = [item for item in products if all(made[end] == uses[end] for end in item[2])]
            if len(kept) == len(products):
                break
            products = kept
        if not products:
            return None
        others = [tensor for end in ends if end not in made and (tensor := _variable(end)) is not None]
        return WeightGradients([(node, product) for node, product, _ in products], others)

    def _product(
        self, node: Any, edges: Any, at: int, saved: str, uses: dict[Any, int], convolutions: bool
    ) -> tuple[_Product, tuple[Any, ...]] | None:
        """Return a product, and the AccumulateGrad nodes that it replaces; None leaves them to autograd."""
        source = edges[at][0]
        if source is None or getattr(node, f"_raw{saved}").unpack_hook is not None:
            return None
        if at == 1 and saved == "_saved_input":
            return self._convolution(node, edges) if convolutions else None
        transposed = type(source).__name__ == "TBackward0"
        if transposed:
            if uses[source] != 1:
                return None
            source = source.next_functions[0][0]
        weight = self._weight(source)
        if weight is None or (len(edges) == 3 and node._saved_alpha != 1):
            return None
        if edges[at - 1][0] is None and (len(edges) == 2 or edges[0][0] is None):
            return None  # without the weight, autograd would not visit this node
        operand = getattr(node, saved)
        if operand.shape[0] * weight.numel() < _LEAST_PRODUCT or not _is_plain(operand, weight):
            return None
        return _Product(weight, operand, transposed), (source,)

    def _convolution(self, node: Any, edges: Any) -> tuple[_Product, tuple[Any, ...]] | None:
        (below, _), (end, _), (bias_end, _) = edges
        weight, bias = self._weight(end), None if bias_end is None else self._weight(bias_end)
        if below is None or weight is None or (bias is None) != (bias_end is None):
            return None
        operand = node._saved_input
        if not operand.numel() or not _is_plain(operand, weight):
            return None
        if operand.numel() // operand.shape[1] * weight.numel() < _LEAST_PRODUCT:
            return None
        settings = (
            None if bias is None else list(bias.shape),
            node._saved_stride,
            node._saved_padding,
            node._saved_dilation,
            node._saved_transposed,
            node._saved_output_padding,
            node._saved_groups,
        )
        return _Product(weight, operand, bias=bias, convolution=settings), (end,) if bias is None else (end, bias_end)

    def _weight(self, end: Any) -> Tensor | None:
        """Return the parameter of an AccumulateGrad node, if its gradient is plain and no hook sees it."""
        weight = self._known.get(end)
        if weight is None:
            weight = _parameter(end)
            if weight is None:
                return None
            self._known[end] = weight  # while a node is referenced, new graphs use the same one
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:
            return None
        if getattr(weight, "grad_dtype", weight.dtype) != weight.dtype:
            return None
        grad = weight.grad
        if grad is not None and grad.dtype != weight.dtype:
            return None
        if grad is not None and (type(grad) is not Tensor or grad.requires_grad or grad.layout != torch.strided):
            return None
        return weight


_PRODUCTS = {
    "AddmmBackward0": (2, "_saved_mat1"),
    "MmBackward0": (1, "_saved_self"),
    "ConvolutionBackward0": (1, "_saved_input"),
}
"""The edge to the weight, and the name of the other factor, for each kind of autograd node."""


def _variable(end: Any) -> Tensor | None:
    variable = getattr(end, "variable", None)
    return variable if isinstance(variable, Tensor) else None


def _parameter(end: Any) -> Tensor | None:
    variable = _variable(end)
    if type(variable) is not torch.nn.Parameter or not variable.is_floating_point() or not variable.is_contiguous():
        return None
    return variable


def _is_plain(operand: Tensor, weight: Tensor) -> bool:
    return type(operand) is Tensor and operand.layout == torch.strided and operand.dtype == weight.dtype


def _add(parameter: Tensor, grad: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = grad if grad.stride() == parameter.stride() else torch.empty_like(parameter).copy_(grad)
    else:
        parameter.grad.add_(grad)


def _plan_deferral(products: list[Any], room: float) -> list[Any]:
    """Decide which products are deferred, and drop those that can be neither deferred nor accumulated in place."""
    if not products:
        return []
    if room < float("inf"):
        room += max(
            _nbytes(product.weight) for _, product, _ in products
        )  # autograd would need a temporary of this size
        products.sort(key=lambda item: item[0]._sequence_nr())  # the backward reaches the first layers last
        kept: set[int] = set()
        for node, product, _ in products:
            room -= _output_bytes(node)
            if product.operand.data_ptr() not in kept:
                kept.add(product.operand.data_ptr())
                room -= _nbytes(product.operand)
            product.at_once = room < 0
    return [item for item in products if not (item[1].at_once and item[1].convolution)]


def saved_bytes(roots: Sequence[Tensor]) -> int:
    """Return the bytes that the graph of `roots` saves for its backward, except parameters. Visits all nodes."""
    todo = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen: set[Any] = set(todo)
    kept: list[Tensor] = []
    parameters = set()
    while todo:
        node: Any = todo.pop()
        if (end := _variable(node)) is not None and isinstance(end, torch.nn.Parameter):
            parameters.add(end.untyped_storage().data_ptr())
        for name in dir(type(node)):
            if name.startswith("_raw_saved"):
                raw = getattr(node, name)
                for one in raw if isinstance(raw, (list, tuple)) else (raw,):
                    with contextlib.suppress(RuntimeError):  # no tensor is saved
                        if isinstance(tensor := one.data, Tensor):
                            kept.append(tensor)
        for source, _ in node.next_functions:
            if source is not None and source not in seen:
                seen.add(source)
                todo.append(source)
    return _held_bytes([tensor for tensor in kept if tensor.untyped_storage().data_ptr() not in parameters])


def _held_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of storage that the tensors view; storage with several views counts once."""
    views: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        place = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
        views[place] = max(views.get(place, 0), _nbytes(tensor))
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(min(size, sum(n for (base, _), n in views.items() if base == at)) for at, size in sizes.items())


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _output_bytes(node: Any) -> int:
    shape, dtype = node._input_metadata[0].shape, node._input_metadata[0].dtype
    return int(torch.Size(shape).numel() * dtype.itemsize)
