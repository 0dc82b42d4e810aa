"""Moving sequences between the ranks after the rollout, so that each trains on about as many tokens.

Every forward and backward of a sharded model waits for the slowest rank. Responses differ in length by far more than
prompts, and whose are long is known only now.

Axes: S sequences of this rank's batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sparrow.rollout import RolloutBatch, join
from sparrow.training import distributed


def balance(batch: RolloutBatch, kinds_S: Tensor) -> RolloutBatch:
    """The batch after the moves; collective. As few sequences move as it takes.

    Args:
        kinds_S: int64; the tokens of each kind are balanced for themselves, as those of an optimizer step are to be.
    """
    if distributed.world_size() == 1:
        return batch
    prompts = torch.tensor([len(prompt) for prompt in batch.prompts])
    mine = list(zip((prompts + batch.lengths_S).tolist(), kinds_S.tolist(), strict=True))
    everywhere = distributed.gather_objects(mine)
    owners = [[rank] * len(sequences) for rank, sequences in enumerate(everywhere)]
    for kind in sorted({kind for sequences in everywhere for _, kind in sequences}):
        members = [(r, s) for r, sequences in enumerate(everywhere) for s, x in enumerate(sequences) if x[1] == kind]
        lengths = [everywhere[r][s][0] for r, s in members]
        for (r, s), owner in zip(members, plan(lengths, [r for r, _ in members], len(everywhere)), strict=True):
            owners[r][s] = owner
    return _move(batch, owners)


def plan(lengths: Sequence[int], owners: Sequence[int], ranks: int) -> list[int]:
    """New owners: while it helps, the rank with most tokens gives one sequence to the rank with fewest."""
    owners = list(owners)
    loads = [sum(n for n, owner in zip(lengths, owners, strict=True) if owner == rank) for rank in range(ranks)]
    while True:
        rich, poor = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[rich] - loads[poor]
        # One of half the gap would leave them equal; one of the whole gap would only swap them.
        movable = [i for i, owner in enumerate(owners) if owner == rich and 0 < lengths[i] < gap]
        if not movable:
            return owners
        best = min(movable, key=lambda i: abs(2 * lengths[i] - gap))
        owners[best] = poor
        loads[rich] -= lengths[best]
        loads[poor] += lengths[best]


def _move(batch: RolloutBatch, owners: Sequence[Sequence[int]]) -> RolloutBatch:
    me, ranks = distributed.rank(), len(owners)
    parts = [batch.select([s for s, owner in enumerate(owners[me]) if owner == me])]
    # One pair after the other, in the same order on all ranks: nobody waits for one who waits for somebody else.
    for sender in range(ranks):
        for receiver in range(ranks):
            moved = [s for s, owner in enumerate(owners[sender]) if owner == receiver]
            if sender == receiver or not moved:
                continue
            if sender == me:
                dist.send_object_list([batch.select(moved)], receiver, device=torch.device("cpu"))
            elif receiver == me:
                received: list[RolloutBatch] = [None]  # type: ignore[list-item]
                dist.recv_object_list(received, sender, device=torch.device("cpu"))
                parts += received
    return join(parts)
