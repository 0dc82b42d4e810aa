"""FlexAttention over documents: its lists of blocks by brute force, its result against the padded reference.

Axes: P packed tokens, filled up, B blocks of 128 of them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from sparrow.attention.dense import DenseAttention
from sparrow.attention.packed import PackedCausal
from sparrow.attention.packed_flex import (
    BLOCK,
    PackedFlex,
    attend_documents,
    block_lists,
    document_starts,
    filled_length,
)
from sparrow.errors import UserError

PACKINGS = [[1024], [1, 2, 3], [700, 1, 127, 128, 129], [128] * 8, [1500, 900, 30], [300, 2000]]


def visible(lengths: list[int]) -> Tensor:
    """Bool [P, P], from document ids."""
    size = filled_length(sum(lengths))
    fillers = torch.arange(size - sum(lengths)) + len(lengths)
    document_P = torch.cat((torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)), fillers))
    order_P = torch.arange(size)
    return (document_P[:, None] == document_P) & (order_P[:, None] >= order_P)


def qkv(total: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: torch.device | str = "cpu"):
    generator = torch.Generator().manual_seed(total)
    shapes = (heads[0], heads[1], heads[1])
    return [torch.randn(total, h, head_dim, generator=generator).to(device, dtype).requires_grad_() for h in shapes]


@pytest.mark.parametrize("lengths", PACKINGS, ids=str)
def test_lists_hold_the_blocks_that_are_seen(lengths: list[int]) -> None:
    seen_PP = visible(lengths)
    blocks = seen_PP.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(1, 2).flatten(2)
    full_BB, any_BB = blocks.all(-1), blocks.any(-1)
    lists = block_lists(document_starts(lengths, "cpu"))
    for number, dense_BB in enumerate((any_BB & ~full_BB, full_BB, (any_BB & ~full_BB).T, full_BB.T)):
        count_B, index_BB = lists[2 * number][0, 0], lists[2 * number + 1][0, 0]
        for row in range(len(dense_BB)):
            assert index_BB[row, : count_B[row]].tolist() == dense_BB[row].nonzero().flatten().tolist()


def test_lists_are_those_of_create_block_mask() -> None:
    lengths = [700, 1, 127, 128, 129]
    seen_PP = visible(lengths)
    size = len(seen_PP)
    expected = create_block_mask(lambda b, h, q, kv: seen_PP[q, kv], None, None, size, size, "cpu", BLOCK)
    ours = block_lists(document_starts(lengths, "cpu"))
    theirs = (
        expected.kv_num_blocks, expected.kv_indices, expected.full_kv_num_blocks, expected.full_kv_indices,
        expected.q_num_blocks, expected.q_indices, expected.full_q_num_blocks, expected.full_q_indices,
    )  # fmt: skip
    for a, b in zip(ours, theirs, strict=True):
        assert b is not None and torch.equal(a, b) and a.dtype == b.dtype


def test_few_lengths_are_compiled_for() -> None:
    assert [filled_length(n) for n in (1, 1024, 1025, 1281, 2048, 2049, 32768, 32769)] == [
        1024, 1024, 1280, 1536, 2048, 2560, 32768, 40960,
    ]  # fmt: skip
    lengths = {filled_length(n) for n in range(1, 32769)}
    assert len(lengths) == 1 + 5 * 4 and all(n % BLOCK == 0 for n in lengths)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("lengths", [[5, 1, 40], [700, 1, 127, 128, 129]], ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (5, 1), (3, 3)], ids=str)
def test_documents_attend_to_themselves_only(lengths: list[int], heads: tuple[int, int]) -> None:
    """Uncompiled, FlexAttention evaluates the mask for all pairs: the mask and the fillers are right."""
    with torch.no_grad():
        q, k, v = qkv(sum(lengths), heads, 16, torch.float32)
        flex = PackedFlex(lengths, "cpu")
        reference = PackedCausal(lengths)
        torch.testing.assert_close(flex.attend(attend_documents, q, k, v), reference(0, q, k, v), atol=1e-5, rtol=1e-5)
        assert torch.equal(flex.positions_T, reference.positions_T)


def test_the_cpu_takes_the_reference() -> None:
    q, k, v = qkv(10, (4, 2), 16, torch.float32)
    out = DenseAttention("auto", [6, 4], torch.device("cpu"))(0, q, k, v)
    assert torch.equal(out, PackedCausal([6, 4])(0, q, k, v))
    with pytest.raises(UserError, match="flex needs a CUDA device"):
        DenseAttention("flex", [6, 4], torch.device("cpu"))


def results(attention: object, inputs: list[Tensor]) -> list[Tensor]:
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = attention(0, *inputs)  # type: ignore[operator]
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    (out.float() * weights).sum().backward()
    return [out.detach(), *(x.grad for x in inputs)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (8, 2), (5, 1), (9, 3), (14, 2)], ids=str)
def test_forward_and_backward_on_cuda(device: torch.device, heads: tuple[int, int], head_dim: int, dtype) -> None:
    for lengths in ([700, 1, 127, 128, 129], [1500, 900, 30], [1024]):
        inputs = qkv(sum(lengths), heads, head_dim, dtype, device)
        ours = results(DenseAttention("flex", lengths, device), inputs)
        expected = results(PackedCausal(lengths, device), [x.detach().double() for x in inputs])
        tolerance = 2e-5 if dtype == torch.float32 else 1.5e-2
        for a, b in zip(ours, expected, strict=True):
            assert a.dtype == dtype
            assert (a.double() - b).norm() < tolerance * b.norm()


@pytest.mark.gpu
def test_one_kernel_serves_all_packings_of_a_length(device: torch.device) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.utils.counters["stats"]
    for number, lengths in enumerate(([1000], [500, 524], [3] * 300)):
        inputs = qkv(sum(lengths), (4, 2), 64, torch.bfloat16, device)
        auto = results(DenseAttention("auto", lengths, device), inputs)
        reference = results(PackedCausal(lengths, device), inputs)
        for a, b in zip(auto, reference, strict=True):
            assert (a.float() - b.float()).norm() < 1.5e-2 * b.float().norm()
        if number == 0:
            compiled = counter["unique_graphs"]
    assert counter["unique_graphs"] == compiled > 0
    again = results(DenseAttention("auto", lengths, device), inputs)
    assert all(torch.equal(a, b) for a, b in zip(again, auto, strict=True)), "the backward has no order of its own"
