"""The passes of an ONNX model as functions of autograd, which onnxruntime computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils import dlpack

from onnxfit.errors import UnsupportedError
from onnxfit.runtime.functional import FunctionalPasses, Gradient
from onnxfit.runtime.session import StatelessSession
from onnxfit.runtime.values import DLPACK_HAS_BOOLEANS, from_dlpack

__all__ = ["OnnxFunction", "refuse_tangents", "refuse_transforms", "run"]


class OnnxFunction(torch.autograd.Function):
    """A forward and a backward pass as a node of autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any,
        passes: FunctionalPasses,
        order: tuple[str, ...],
        random_inputs: Mapping[str, torch.Tensor],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        graphs = passes.graphs
        values = {**random_inputs, **dict(zip(order, tensors))}
        computed = run(passes.forward, values)
        ctx.mark_non_differentiable(
            *(computed[name] for name in passes.results if name not in graphs.output_gradients)
        )
        # All of these are saved by torch, which then notices changes in place, frees the tensors
        # after the backward pass, and can keep them elsewhere.
        ctx.save_for_backward(*({**values, **computed}[name] for name in passes.saved))
        ctx.set_materialize_grads(False)
        ctx.passes = passes
        ctx.order = order
        ctx.zeros = {
            name: computed[name].new_zeros(()).expand(computed[name].shape)
            for name in graphs.output_gradients
        }
        return tuple(computed[name] for name in passes.results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        passes: FunctionalPasses = ctx.passes
        assert passes.gradient is not None
        values = dict(zip(passes.saved, ctx.saved_tensors))
        if torch.is_grad_enabled():
            # A derivative of the gradient follows the paths through computed values by itself.
            computed = values.keys() - set(ctx.order)
            values |= {name: values[name].detach() for name in computed}
        by_result = dict(zip(passes.results, gradients))
        for output, name in passes.gradient.output_gradients.items():
            dy = by_result[output]
            values[name] = ctx.zeros[output] if dy is None else dy
        by_name = _differentiate(passes.gradient, values)
        return (None, None, None, *(by_name.get(name) for name in ctx.order))


class GradientFunction(torch.autograd.Function):
    """A gradient as a node of autograd's graph, which differentiates it again."""

    @staticmethod
    def forward(
        ctx: Any, gradient: Gradient, order: tuple[str, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        computed = run(gradient.session, dict(zip(order, tensors)))
        ctx.wrt = tuple(name for name, needed in zip(order, ctx.needs_input_grad[2:]) if needed)
        dependent = gradient.depending_on(ctx.wrt)
        ctx.mark_non_differentiable(
            *(computed[name] for name in gradient.input_gradients.values() if name not in dependent)
        )
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.gradient = gradient
        ctx.order = order
        return tuple(computed[name] for name in gradient.input_gradients.values())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        gradient: Gradient = ctx.gradient
        named = zip(gradient.input_gradients.values(), gradients)
        arrived = {name: dy for name, dy in named if dy is not None}
        by_name: Mapping[str, torch.Tensor] = {}
        derivative = gradient.derivative(tuple(arrived), ctx.wrt)
        if derivative is not None:
            values = dict(zip(ctx.order, ctx.saved_tensors))
            values |= {
                name: arrived[output] for output, name in derivative.output_gradients.items()
            }
            by_name = _differentiate(derivative, values)
        return (None, None, *(by_name.get(name) for name in ctx.order))


def _differentiate(
    gradient: Gradient, values: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the gradients by the names of what they belong to.

    They are part of autograd's graph where the caller asked for that (`create_graph=True`).
    """
    refuse_transforms(values.values())
    if torch.is_grad_enabled():
        tensors = GradientFunction.apply(gradient, tuple(values), *values.values())  # type: ignore[no-untyped-call]  # torch's apply has no annotations
        computed = dict(zip(gradient.input_gradients.values(), tensors))
    else:
        computed = run(gradient.session, values)
    return {name: computed[output] for name, output in gradient.input_gradients.items()}


def refuse_transforms(tensors: Iterable[torch.Tensor] = ()) -> None:
    """Raise UnsupportedError inside a transform of torch.func, or for batches of gradients."""
    # A batch of gradients is a wrapper without memory of its own.
    if torch._C._are_functorch_transforms_active() or not all(
        torch._C._has_storage(tensor) for tensor in tensors
    ):
        raise UnsupportedError(
            "OnnxModule does not support the transforms of torch.func (grad, vmap, hessian, ...),"
            " vectorize=True or is_grads_batched=True. Use torch.autograd.grad with"
            " create_graph=True, or the functions of torch.autograd.functional."
        )


def refuse_tangents(tensors: Iterable[torch.Tensor]) -> None:
    """Raise UnsupportedError for tensors of forward-mode differentiation."""
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
        for tensor in tensors
    ):
        raise UnsupportedError(
            "OnnxModule does not support forward-mode differentiation (torch.autograd.forward_ad)."
            " Use torch.autograd.functional.jvp, which differentiates backward twice."
        )


def run(session: StatelessSession, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run on the tensors' own memory; return tensors in onnxruntime's memory."""
    inputs = {name: values[name].detach().contiguous() for name in session.inputs}
    for value in inputs.values():
        if value.is_cuda:
            # onnxruntime computes in its own stream.
            torch.cuda.current_stream(value.device).synchronize()
            break
    results = session({name: _to_ort_value(value) for name, value in inputs.items()})
    outputs = {name: _from_ort_value(value) for name, value in results.items()}
    for name in inputs.keys() & outputs.keys():
        # An input that is also an output comes back in the caller's memory.
        outputs[name] = outputs[name].clone()
    return outputs


def _to_ort_value(tensor: torch.Tensor) -> Any:
    boolean = tensor.dtype == torch.bool
    if not tensor.numel():
        # To torch, an empty tensor of any strides is contiguous; to onnxruntime it is not.
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if boolean and not DLPACK_HAS_BOOLEANS:
        tensor = tensor.view(torch.uint8)
    return from_dlpack(torch.to_dlpack(tensor), boolean)  # type: ignore[attr-defined]  # it is not in torch's stubs


def _from_ort_value(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = dlpack.from_dlpack(value.to_dlpack())
    return tensor.view(torch.bool) if value.data_type() == "tensor(bool)" else tensor
