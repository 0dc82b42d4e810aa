"""AdamW whose states and step are the host's: the device holds weights and gradients alone.

torchao's CPUOffloadOptimizer copies each gradient in the backward, before it is summed over ranks and clipped; this one
copies when the step is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from sparrow.errors import UserError
from sparrow.training import distributed


class OffloadedAdamW:
    """torch.optim.AdamW, fused, on copies of the parameters in the host's memory; used as if it were it.

    The host needs 16 bytes a parameter (weight, gradient, two moments), pinned but for the moments. Build it after the
    weights are loaded.

    Args:
        named_parameters: (name, parameter) pairs in fp32; those that need no gradient are left out.
        lr, betas, eps, weight_decay: AdamW's.

    Raises:
        UserError: several processes; a save would keep the moments of one of them.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        if distributed.world_size() > 1:
            raise UserError(
                f"optimizer: OffloadedAdamW is for one process, there are {distributed.world_size()}, which share the "
                "state already; take torch.optim.AdamW or torchao.optim.AdamW8bit"
            )
        trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        assert all(parameter.dtype == torch.float32 for _, parameter in trained)
        self._parameters = [parameter for _, parameter in trained]
        self._copies = [_host_copy(parameter) for parameter in self._parameters]
        self._gradients = [_host_copy(parameter) for parameter in self._parameters]
        named = [(name, copy) for (name, _), copy in zip(trained, self._copies, strict=True)]
        self._adamw: AdamW = AdamW(named, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """AdamW's; writing their `lr` takes effect."""
        return self._adamw.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Gradients to the host, AdamW there, weights back. A parameter without a gradient stays."""
        for parameter, copy, gradient in zip(self._parameters, self._copies, self._gradients, strict=True):
            copy.grad = None
            if parameter.grad is not None:
                copy.grad = gradient.copy_(_share(parameter.grad), non_blocking=True)
        self._wait()
        self._adamw.step()
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            _share(parameter).copy_(copy, non_blocking=True)
        self._wait()  # the next step writes the copies

    def zero_grad(self, set_to_none: bool = True) -> None:
        assert set_to_none
        for parameter in self._parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return self._adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Also takes the weights as they are now: those of a save may have come after the copies were made."""
        self._adamw.load_state_dict(state)
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            copy.data.copy_(_share(parameter.detach()))

    def _wait(self) -> None:
        if any(parameter.is_cuda for parameter in self._parameters):
            torch.cuda.synchronize()


def _share(tensor: Tensor) -> Tensor:
    """What this rank holds of it, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _host_copy(parameter: Tensor) -> Tensor:
    share = _share(parameter.detach())
    return torch.empty_like(share, device="cpu", pin_memory=share.is_cuda).copy_(share)
