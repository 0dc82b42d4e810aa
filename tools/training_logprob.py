"""What the log-prob pass takes beside the bare product of its head, in time and memory.

Axes: N tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rollout_shapes import model_config
from torch import Tensor

from sparrow.models.head import SummingHead, fp32_logits
from sparrow.training.logprob import score_tokens, token_logprobs

REPEATS = 5


def measure_logprob(name: str, tokens: int, top_k: int, chunk: int, device: torch.device) -> dict[str, Any]:
    """Forward alone (log-prob, entropy, top-k), and forward with backward; bf16 on CUDA, fp32 on the CPU.

    The matmul is the same product in the same chunks, into one buffer of the operands' dtype.
    """
    config = model_config(name)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    hidden_NE = torch.randn(tokens, config.hidden_size, generator=generator, device=device).to(dtype)
    weight_VE = torch.randn(config.vocab_size, config.hidden_size, generator=generator, device=device)
    weight_VE = (weight_VE * config.hidden_size**-0.5).to(dtype)
    targets_N = torch.randint(config.vocab_size, (tokens,), generator=generator, device=device)

    def head(hidden_NE: Tensor, vocab: slice | None = None) -> Tensor:
        return fp32_logits(hidden_NE, weight_VE if vocab is None else weight_VE[vocab])

    def update() -> None:
        logprobs_N, _ = token_logprobs(hidden_NE, SummingHead(weight_VE), targets_N, 1.0, chunk)
        logprobs_N.sum().backward()
        hidden_NE.grad = weight_VE.grad = None

    matmul_s, _ = timed(partial(_matmuls, hidden_NE, weight_VE, chunk), device)
    forward_s, forward_bytes = timed(
        lambda: score_tokens(hidden_NE, head, targets_N, 1.0, top_k, chunk_size=chunk), device
    )
    hidden_NE.requires_grad_(), weight_VE.requires_grad_()
    update_s, update_bytes = timed(update, device)
    return {
        "model": name, "tokens": tokens, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size,
        "top_k": top_k, "chunk": chunk, "matmul_s": matmul_s, "forward_s": forward_s,
        "forward_over_matmul": forward_s / matmul_s, "forward_extra_bytes": forward_bytes, "update_s": update_s,
        "update_over_matmul": update_s / matmul_s, "update_extra_bytes": update_bytes,
    }  # fmt: skip


def show_logprob(result: dict[str, Any]) -> str:
    lines = [f"{result['model']}: {result['tokens']} tokens x {result['hidden_size']} x {result['vocab_size']}"]
    lines.append(f"  matmul            {result['matmul_s'] * 1e3:9.2f} ms")
    for part, text in (("forward", f"+ entropy + top-{result['top_k']}"), ("update", "with gradients  ")):
        extra = result[f"{part}_extra_bytes"]
        memory = "not measured" if extra is None else f"{extra / 2**30:.2f} GiB"
        lines.append(
            f"  {part:7s} {result[f'{part}_s'] * 1e3:9.2f} ms, {result[f'{part}_over_matmul']:.2f} x matmul, "
            f"extra memory {memory} ({text.strip()})"
        )
    return "\n".join(lines)


def timed(work: Callable[[], object], device: torch.device) -> tuple[float, int | None]:
    """Median seconds after a first run, and on CUDA the peak of memory above what stood before."""
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    extra = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
    return sorted(seconds)[REPEATS // 2], extra


def _matmuls(hidden_NE: Tensor, weight_VE: Tensor, chunk: int) -> None:
    product = hidden_NE.new_empty(min(chunk, len(hidden_NE)), len(weight_VE))
    for part_NE in hidden_NE.split(chunk):
        torch.mm(part_NE, weight_VE.T, out=product[: len(part_NE)])
