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


def fp32_logits(hidden_NE: Tensor, weight_VE: Tensor) -> Tensor:
    """Logits [N, V] in fp32, with gradient."""
    if weight_VE.dtype in HALF:
        logits_NV: Tensor = _HalfHead.apply(hidden_NE, weight_VE)
        return logits_NV
    return F.linear(hidden_NE.float(), weight_VE.float())


class _HalfHead(torch.autograd.Function):
    """Gradients have the dtypes of what they belong to; their sums over tokens and vocabulary are fp32.

    Those of several calls, as of the chunks of a micro-batch, are added up in that dtype, by autograd.
    """

    @staticmethod
    def forward(ctx: Any, hidden_NE: Tensor, weight_VE: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_NE, weight_VE)
        if _native(hidden_NE, weight_VE):
            return torch.mm(hidden_NE, weight_VE.T, out_dtype=torch.float32)
        hidden_NE = hidden_NE.float()
        return torch.cat([hidden_NE @ weight_vE.float().T for weight_vE in weight_VE.split(CAST_ROWS)], 1)

    @staticmethod
    def backward(ctx: Any, grad_NV: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_NE, weight_VE = ctx.saved_tensors
        if _native(hidden_NE, weight_VE):
            grad_NV = grad_NV.to(weight_VE.dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad
        return (
            _hidden_gradient(grad_NV, weight_VE).to(hidden_NE.dtype) if needs_hidden else None,
            _weight_gradient(grad_NV, hidden_NE, weight_VE.dtype) if needs_weight else None,
        )


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
