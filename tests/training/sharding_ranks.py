"""One process of test_sharding.py: `python sharding_ranks.py RANK RANKS FOLDER DEVICE`; RANKS 1 needs no group."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from sparrow.attention.packed import PackedCausal
from sparrow.components.aggregation import MODES, Aggregation
from sparrow.components.loss import GSPO, ClippedSurrogate, LossInputs
from sparrow.models.adapted import copy_weights
from sparrow.models.decoder import Decoder
from sparrow.recipes.grpo_minibatches import split_minibatches
from sparrow.rollout import RolloutBatch
from sparrow.training import distributed
from sparrow.training.balance import balance
from sparrow.training.distributed import SharedQueue
from sparrow.training.logprob import token_logprobs
from sparrow.training.packing import response_hidden
from sparrow.training.sharding import clip_gradients, full_state_dict, is_sharded, load_trained, release

DEVICE = torch.device(sys.argv[4], int(sys.argv[1])) if sys.argv[4] == "cuda" else torch.device("cpu")
PROMPTS = [[1, 2], [3], [4, 5, 6], [7, 8], [9, 1, 2, 3], [5]]
LENGTHS = [7, 3, 9, 2, 5, 4]
# The second rank has one short sequence: it runs out of micro-batches.
OWN = {1: [[0, 1, 2, 3, 4, 5]], 2: [[0, 1, 2, 3, 4], [5]]}


def share(rank: int, ranks: int) -> RolloutBatch:
    generator = torch.Generator().manual_seed(0)
    whole_T = torch.randint(0, 16, (sum(LENGTHS),), generator=generator)
    parts = whole_T.split(LENGTHS)
    members = OWN[ranks][rank]
    lengths_S = torch.tensor([LENGTHS[s] for s in members])
    tokens_T = torch.cat([parts[s] for s in members])
    T, S = len(tokens_T), len(members)
    nothing_T = torch.zeros(T)
    return RolloutBatch(
        prompts=[PROMPTS[s] for s in members],
        groups_S=torch.arange(S),
        samples_S=torch.zeros(S, dtype=torch.int64),
        lengths_S=lengths_S,
        tokens_T=tokens_T,
        logprobs_T=nothing_T,
        top_ids_TK=torch.zeros(T, 1, dtype=torch.int64),
        top_logprobs_TK=nothing_T[:, None],
        pages_T=torch.zeros(T, dtype=torch.int64),
        terminated_S=torch.ones(S, dtype=torch.bool),
        versions_S=torch.zeros(S, dtype=torch.int64),
        numbers_S=torch.tensor(members),
        keep_S=torch.ones(S, dtype=torch.bool),
        advantages_S=torch.tensor([(-1.0) ** s * (s + 1) for s in members]),
    )


def gradients(model: Decoder, batch: RolloutBatch, mode: str, loss_component: object) -> dict[str, torch.Tensor]:
    """Summed loss, norm before clipping, and all gradients whole, as a dict of tensors."""
    cfg = SimpleNamespace(minibatches=1, kl_coef=0.0, micro_batch_tokens=12)
    minibatches, _ = split_minibatches(batch, cfg, DEVICE)
    aggregation, total = Aggregation(mode, max_length=10), 0.0
    for micro in minibatches[0].micro_batches:
        hidden_NE = response_hidden(model, micro, PackedCausal(micro.lengths, DEVICE))
        logprobs_N, _ = token_logprobs(hidden_NE, model.summing_head(), micro.targets_N, 1.0, chunk_size=8)
        inputs = LossInputs(
            logprobs_T=logprobs_N,
            old_logprobs_T=logprobs_N.detach() - 0.05,
            advantages_T=batch.advantages_S[batch.sequence_T[micro.index_N]].to(DEVICE),
            correction_T=torch.ones(len(micro.index_N), device=DEVICE),
            sequence_T=micro.sequence_N,
            lengths_S=micro.response_lengths,
        )
        weights_N = aggregation.weights(micro.response_lengths, micro.sequence_N, minibatches[0].totals)
        loss = (weights_N * loss_component(inputs).loss_T).sum()
        loss.backward()
        total += float(loss.detach())
    norm = clip_gradients(list(model.parameters()), 0.1)
    whole = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        assert gradient.dtype == torch.float32
        whole[name] = (gradient.full_tensor() if is_sharded(model) else gradient).cpu()
        parameter.grad = None
    loss = distributed.sum_values({"loss": total})["loss"]
    return whole | {"loss": torch.tensor(loss), "norm": torch.tensor(norm)}


def balanced(batch: RolloutBatch) -> dict[str, torch.Tensor]:
    """Which prompts this rank's sequences answer after the moves, and what tells whether the rest came along."""
    moved = balance(batch, torch.zeros(batch.num_sequences, dtype=torch.int64))
    return {"numbers": moved.numbers_S, "advantages": moved.advantages_S, "tokens": moved.tokens_T}


def claimed(ranks: int) -> list[list[int]]:
    """What this rank got of two queues, one after the other, and of a third that is dealt out."""
    queues = [SharedQueue(5), SharedQueue(ranks)]
    return [list(iter(claim, None)) for claim in (queues[0].claim, queues[1].claim, SharedQueue(5).deal())]


def main(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    if ranks > 1:
        backend = "cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    batch = share(rank, ranks)
    results = {}
    for head in ("tied", "untied"):
        for dtype in (torch.float32, torch.bfloat16) if head == "tied" else (torch.float32,):
            for replicate in range(1, ranks + 1):
                model = load_trained(folder / head, DEVICE, dtype, replicate)
                for mode in MODES if dtype == torch.float32 else MODES[:1]:
                    key = f"{head} {str(dtype)[6:]} {mode}"
                    results[f"{key} / {replicate}"] = gradients(model, batch, mode, ClippedSurrogate())
                results[f"{head} {str(dtype)[6:]} gspo / {replicate}"] = gradients(model, batch, MODES[0], GSPO())
                with torch.no_grad():  # as the dense pass leaves it
                    tokens_T = torch.arange(3, device=DEVICE)
                    model(tokens_T, tokens_T, PackedCausal([3], DEVICE))
                copy = Decoder(model.config)
                copy_weights(copy, model)
                release(model)
                state = full_state_dict(model, torch.float32)
                if rank == 0 and dtype == torch.float32:
                    assert state.keys() == copy.state_dict().keys()
                    assert all(torch.equal(state[name], tensor) for name, tensor in copy.state_dict().items())
                assert rank == 0 or not state
    results["balance"] = balanced(batch)
    results["claimed"] = claimed(ranks)
    torch.save(results, folder / f"{ranks}_{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
