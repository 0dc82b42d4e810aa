"""Muon (Keller Jordan 2024): momentum, orthogonalised by Newton-Schulz, for hidden matrices.

The update rule is that of torch.optim.Muon. Two differences make it usable on a CPU: the iteration runs in fp32 (bf16
products without hardware support took .76 s a step for `tiny`'s 28 matrices), and matrices of one shape go together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparrow.training.sharding import share_of

# Quintic coefficients of the reference implementation and of torch.optim.Muon.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


class Muon(torch.optim.Optimizer):
    """Muon for two-dimensional parameters.

    Args:
        params: matrices, with or without names.
        lr: learning rate; scaled by max(1, rows / columns)^.5 per matrix.
        weight_decay: decoupled.
        momentum: Nesterov's.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            same_shape: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    same_shape[parameter.shape].append((parameter, self._momentum(parameter, group)))
            for shape, pairs in same_shape.items():
                # A matrix has to be whole for this; of a sharded one, each rank then keeps its share.
                updates = orthogonalize(torch.stack([_whole(update) for _, update in pairs]))
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for (parameter, _), update in zip(pairs, updates, strict=True):
                    share = share_of(update, parameter) if isinstance(parameter, DTensor) else update
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(share, alpha=-scale)

    def _momentum(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        buffer: Tensor = state.setdefault("momentum_buffer", torch.zeros_like(parameter.grad))
        buffer.lerp_(parameter.grad, 1 - group["momentum"])
        return parameter.grad.lerp(buffer, group["momentum"])


def _whole(matrix: Tensor) -> Tensor:
    return matrix.full_tensor() if isinstance(matrix, DTensor) else matrix


def orthogonalize(matrices: Tensor) -> Tensor:
    """Newton-Schulz towards U V^T of each matrix [N, rows, columns]; singular values end between about .7 and 1.2."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).float()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)
