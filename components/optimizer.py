"""Optimizers beyond torch.optim: built from `model.named_parameters()`, like torch's own (`torch.optim.AdamW`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from sparrow.components.muon import Muon
from sparrow.errors import UserError

NOT_HIDDEN = ("embed_tokens", "lm_head")


class MuonWithAdamW:
    """Muon on the hidden matrices, AdamW on embeddings, head, norms and biases; used as if it were one optimizer.

    The hidden matrices are those with two dimensions whose name has neither `embed_tokens` nor `lm_head`. Each of
    `param_groups` is live: writing its `lr` takes effect.

    Args:
        named_parameters: (name, parameter) pairs; those that need no gradient are passed over.
        muon_lr, adamw_lr: the two learning rates.
        gain_lr: rate of the one-dimensional parameters, the norms' gains and the biases, where it is to differ from
            `adamw_lr`: they are of order 1, embeddings may be far smaller.
        weight_decay: decoupled, for both.
        momentum: Muon's.

    Raises:
        UserError: one of the two optimizers would have nothing to train.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        muon_lr: float,
        adamw_lr: float,
        gain_lr: float | None = None,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        hidden = [pair for pair in trained if is_hidden_matrix(*pair)]
        rest = [pair for pair in trained if not is_hidden_matrix(*pair)]
        if not hidden or not rest:
            raise UserError(
                f"MuonWithAdamW found {len(hidden)} hidden matrices and {len(rest)} other parameters; "
                "it needs both: use torch.optim.AdamW"
            )
        self._muon: Optimizer = Muon(hidden, lr=muon_lr, weight_decay=weight_decay, momentum=momentum)
        gains = [(name, parameter) for name, parameter in rest if parameter.ndim == 1]
        tables = [(name, parameter) for name, parameter in rest if parameter.ndim != 1]
        groups = [
            {"params": tables, "lr": adamw_lr},
            {"params": gains, "lr": adamw_lr if gain_lr is None else gain_lr},
        ]
        groups = [group for group in groups if group["params"]]
        self._adamw: Optimizer = AdamW(groups, lr=adamw_lr, weight_decay=weight_decay)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Muon's group, then AdamW's: embeddings and head, gains."""
        return [*self._muon.param_groups, *self._adamw.param_groups]

    def step(self) -> None:
        self._muon.step()
        self._adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._muon.zero_grad(set_to_none)
        self._adamw.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self._muon.state_dict(), "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._muon.load_state_dict(state["muon"])
        self._adamw.load_state_dict(state["adamw"])


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon is meant for this parameter."""
    return parameter.ndim == 2 and not any(part in NOT_HIDDEN for part in name.split("."))
