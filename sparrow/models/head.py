"""The head's product: fp32 logits from half-precision weights, without an fp32 copy of the matrix.

A [V, E] copy in fp32 is 1.5 GB for a 4B model, made again for every chunk of tokens. A product of two bf16 numbers is
exact in fp32, so multiplying in bf16 and adding up in fp32 gives what the copy would, up to the order of summation.

Axes: N tokens, E hidden size, V vocabulary (v a slice of it).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
CAST_ROWS = 8192  # of the matrix that stand in fp32 at a time, where the device cannot add up in fp32 by itself


def fp32_logits(hidden_NE: Tensor, weight_VE: Tensor, gradient: WeightGradient | None = None) -> Tensor:
    """Logits [N, V] in fp32, with gradient.

    Args:
        gradient: takes the gradient of half-precision weights instead of autograd; see `SummingHead`.
    """
    if weight_VE.dtype in HALF:
        logits_NV: Tensor = _HalfHead.apply(hidden_NE, weight_VE, gradient)
        return logits_NV
    return F.linear(hidden_NE.float(), weight_VE.float())


class SummingHead:
    """The head for the chunks of one forward and its one backward.

    Autograd would add the chunks' gradients of half-precision weights up in their dtype, and lose bits with each.
    Here they are added up in fp32, and the sum is cast once.
    """

    def __init__(self, weight_VE: Tensor) -> None:
        self.gradient = WeightGradient()
        self.weight_VE = _CastOnce.apply(weight_VE, self.gradient) if weight_VE.dtype in HALF else weight_VE

    def __call__(self, hidden_NE: Tensor) -> Tensor:
        return fp32_logits(hidden_NE, self.weight_VE, self.gradient)


class WeightGradient:
    """A sum [V, E] in fp32 of products over tokens."""

    def __init__(self) -> None:
        self.sum_VE: Tensor | None = None

    def add(self, grad_NV: Tensor, hidden_NE: Tensor) -> None:
        if self.sum_VE is None:
            self.sum_VE = hidden_NE.new_zeros(grad_NV.shape[1], hidden_NE.shape[1], dtype=torch.float32)
        if _native(grad_NV, hidden_NE):
            torch.addmm(self.sum_VE, grad_NV.T, hidden_NE, out_dtype=torch.float32, out=self.sum_VE)
            return
        hidden_NE = hidden_NE.float()
        for sum_vE, grad_Nv in zip(self.sum_VE.split(CAST_ROWS), grad_NV.split(CAST_ROWS, 1), strict=True):
            sum_vE.addmm_(grad_Nv.T, hidden_NE)

    def take(self, dtype: torch.dtype) -> Tensor:
        """The sum, which begins anew."""
        assert self.sum_VE is not None
        gradient_VE, self.sum_VE = self.sum_VE.to(dtype), None
        return gradient_VE


class _CastOnce(torch.autograd.Function):
    """The weights as they are; their gradient is what `gradient` has gathered by the time autograd arrives here."""

    @staticmethod
    def forward(ctx: Any, weight_VE: Tensor, gradient: WeightGradient) -> Tensor:
        ctx.gradient, ctx.dtype = gradient, weight_VE.dtype
        ctx.set_materialize_grads(False)  # no chunk sends one: zeros [V, E] would be made for nothing
        return weight_VE.view_as(weight_VE)

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[Tensor, None]:
        return ctx.gradient.take(ctx.dtype), None


class _HalfHead(torch.autograd.Function):
    """Gradients have the dtypes of what they belong to; their sums over tokens and vocabulary are fp32."""

    @staticmethod
    def forward(ctx: Any, hidden_NE: Tensor, weight_VE: Tensor, gradient: WeightGradient | None) -> Tensor:
        ctx.save_for_backward(hidden_NE, weight_VE)
        ctx.gradient = gradient
        if _native(hidden_NE, weight_VE):
            return torch.mm(hidden_NE, weight_VE.T, out_dtype=torch.float32)
        hidden_NE = hidden_NE.float()
        return torch.cat([hidden_NE @ weight_vE.float().T for weight_vE in weight_VE.split(CAST_ROWS)], 1)

    @staticmethod
    def backward(ctx: Any, grad_NV: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden_NE, weight_VE = ctx.saved_tensors
        if _native(hidden_NE, weight_VE):
            grad_NV = grad_NV.to(weight_VE.dtype)
        needs_hidden, needs_weight, _ = ctx.needs_input_grad
        grad_NE = _hidden_gradient(grad_NV, weight_VE).to(hidden_NE.dtype) if needs_hidden else None
        if needs_weight and ctx.gradient is not None:
            ctx.gradient.add(grad_NV, hidden_NE)
            return grad_NE, None, None
        return grad_NE, _weight_gradient(grad_NV, hidden_NE, weight_VE.dtype) if needs_weight else None, None


def _native(hidden_NE: Tensor, weight_VE: Tensor) -> bool:
    """Whether the device multiplies these and adds up in fp32 by itself."""
    return hidden_NE.is_cuda and hidden_NE.dtype == weight_VE.dtype


def _hidden_gradient(grad_NV: Tensor, weight_VE: Tensor) -> Tensor:
    if grad_NV.dtype == weight_VE.dtype:
        return grad_NV @ weight_VE
    grad_NE = grad_NV.new_zeros(len(grad_NV), weight_VE.shape[1])
    for grad_Nv, weight_vE in zip(grad_NV.split(CAST_ROWS, 1), weight_VE.split(CAST_ROWS), strict=True):
        grad_NE.addmm_(grad_Nv, weight_vE.float())
    return grad_NE


def _weight_gradient(grad_NV: Tensor, hidden_NE: Tensor, dtype: torch.dtype) -> Tensor:
    if grad_NV.dtype == hidden_NE.dtype == dtype:
        return grad_NV.T @ hidden_NE
    hidden_NE = hidden_NE.float()
    return torch.cat([(grad_Nv.T @ hidden_NE).to(dtype) for grad_Nv in grad_NV.split(CAST_ROWS, 1)])
