"""Which sparse attention trains, where no kernel runs."""

from __future__ import annotations

import torch

from sparrow.attention.backend import runs_kernels
from sparrow.attention.masked import MaskedSparse
from sparrow.attention.sparse import SparseAttention
from sparrow.components.budget import FixedBudget
from sparrow.components.kv_cache import SparseKVCache

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_cpu_takes_the_mask():
    lengths, prompts = [70, 9], [20, 3]
    cache = SparseKVCache(FixedBudget(3), page_size=8, block_size=16, dense_layers=0)
    attention = cache.training(lengths, prompts, CPU)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, 16, generator=generator) for heads in (4, 2, 2))
    out = attention(0, q, k, v)
    assert isinstance(attention, SparseAttention) and isinstance(attention.chosen, MaskedSparse)
    assert torch.equal(out, MaskedSparse(lengths, prompts, cache.pattern)(0, q, k, v))


def test_kernels_run_on_cuda_for_powers_of_two_that_fit():
    assert runs_kernels(CUDA, torch.bfloat16, 16, 256) and runs_kernels(CUDA, torch.float32, 128, 128)
    for device, dtype, page_size, head_dim in (
        (CPU, torch.bfloat16, 16, 128),
        (CUDA, torch.float64, 16, 64),
        (CUDA, torch.bfloat16, 8, 64),
        (CUDA, torch.bfloat16, 24, 64),
        (CUDA, torch.bfloat16, 16, 80),
        (CUDA, torch.float32, 16, 256),
    ):
        assert not runs_kernels(device, dtype, page_size, head_dim)
