"""From the fused projection to the cache in one kernel, against the modules of the decoder and the eager pool.

Axes: C shares, B rows, K KV heads, G query heads per KV head, D head dim, X = (G + 2) * K * D.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch's builds for CUDA")

from sparrow.attention.pattern import SparsePattern
from sparrow.attention.pool import PagePool
from sparrow.attention.step import DecodeStep
from sparrow.components.budget import FixedBudget
from sparrow.components.selector import CentroidSelector, QuestSelector, SegmentSoftmaxSelector
from sparrow.kernels.page_write import write_heads
from sparrow.models.decoder import RMSNorm, rotary_factors, rotate
from sparrow.models.decoder_config import DecoderConfig

pytestmark = pytest.mark.gpu

PAGE, BLOCK, K, D, EPS = 16, 128, 2, 32, 0.1
LENGTHS = [1, 15, 16, 17, 127, 128, 129]  # pages complete at 16 and 128
COMPLETED = [2, 5]


def pools(group: int, selector, dtype, device, randn) -> tuple[PagePool, PagePool]:
    """Two with the same random content, to be written by the kernel and by modules."""
    config = DecoderConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=K * group, num_kv_heads=K, head_dim=D
    )
    marks, kept = selector.landmarks_per_page, selector.landmarks(torch.zeros(1, PAGE, D, dtype=dtype)).dtype
    made = [PagePool(config, 2 * len(LENGTHS), BLOCK, PAGE, marks, range(1), device, dtype, kept) for _ in range(2)]
    for of_kernel, of_modules in zip(*([*p.keys_KSD, *p.values_KSD, p.landmarks_KPMD[0]] for p in made), strict=True):
        of_kernel.copy_(randn(*of_kernel.shape))
        of_modules.copy_(of_kernel)
    return made[0], made[1]


def by_modules(qkv_BX, gains, cos, sin, step: DecodeStep, group: int) -> torch.Tensor:
    """Queries [B, K, G, D]; keys, values and landmarks go to the pool of `step`."""
    q, k, v = qkv_BX.unflatten(1, (-1, D)).split((K * group, K, K), dim=1)
    if gains is not None:
        norms = [RMSNorm(D, EPS).to(qkv_BX.device) for _ in gains]
        for norm, gain in zip(norms, gains, strict=True):
            norm.weight.data = gain
        q, k = norms[0](q).detach(), norms[1](k).detach()
    step.write(0, rotate(k, cos, sin), v)
    return rotate(q, cos, sin).unflatten(1, (K, group))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "selector",
    [
        CentroidSelector(),
        SegmentSoftmaxSelector(2),
        SegmentSoftmaxSelector(4),
        SegmentSoftmaxSelector(4, fp8=True),
        QuestSelector(),
    ],
    ids=["mean", "halves", "quarters", "fp8", "minmax"],
)
@pytest.mark.parametrize(
    ("group", "shares", "bias", "norm"),
    [(1, 1, False, True), (2, 3, True, False), (4, 2, False, False), (5, 1, True, True)],
)
def test_queries_cache_and_landmarks_are_those_of_the_modules(
    device, randn, group, shares, bias, norm, selector, dtype
):
    by_kernel, reference = pools(group, selector, dtype, device, randn)
    before = by_kernel.landmarks_KPMD[0].clone()
    pattern = SparsePattern(FixedBudget(3), selector, PAGE, 1, 2, 0)
    lengths = torch.tensor(LENGTHS, device=device)
    table = (torch.arange(2 * len(LENGTHS), 0, -1, device=device)).view(-1, 2)
    step = DecodeStep(reference, BLOCK, table, lengths, 2 * BLOCK // PAGE, pattern)

    unrounded = shares > 1 or bias
    qkv_CBX = randn(shares, len(LENGTHS), (group + 2) * K * D, dtype=torch.float32 if unrounded else dtype)
    bias_X = randn(qkv_CBX.shape[2], dtype=dtype) if bias else None
    gains = (randn(D, dtype=dtype), randn(D, dtype=dtype)) if norm else None
    cos, sin = rotary_factors(lengths - 1, D, 1e4, dtype)
    q_BKGD = torch.empty(len(LENGTHS), K, group, D, device=device, dtype=dtype)
    write_heads(
        qkv_CBX, bias_X, gains, cos[:, 0, : D // 2].contiguous(), sin[:, 0, D // 2 :].contiguous(), step.slots_B,
        by_kernel.keys_KSD[0], by_kernel.values_KSD[0], by_kernel.landmarks_KPMD[0], selector.kernel == "bound",
        q_BKGD, PAGE, EPS,
    )  # fmt: skip

    total = qkv_CBX.float().sum(0)
    qkv_BX = (total if bias_X is None else total + bias_X.float()).to(dtype)
    expected = by_modules(qkv_BX, gains, cos, sin, step, group)
    # In bf16 a sum in another order may round to the neighbour, 2^-8 away, and the rotation adds two of them.
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 2**-6}
    torch.testing.assert_close(q_BKGD, expected, **close)
    torch.testing.assert_close(by_kernel.keys_KSD[0], reference.keys_KSD[0], **close)
    torch.testing.assert_close(by_kernel.values_KSD[0], reference.values_KSD[0], **close)
    pages = step.slots_B[COMPLETED] // PAGE
    made, expected = by_kernel.landmarks_KPMD[0].float(), reference.landmarks_KPMD[0].float()
    if by_kernel.landmarks_KPMD[0].dtype.itemsize == 1:  # the neighbour of a number with three bits after the first
        close = {"atol": 2**-8, "rtol": 2**-3}
    torch.testing.assert_close(made[:, pages], expected[:, pages], **close)
    made[:, pages] = before[:, pages].float()
    assert torch.equal(made, before.float()), "an open page's landmark is written when it completes"


def test_a_dense_layer_has_no_landmarks_to_write(device, randn):
    by_kernel, _ = pools(2, CentroidSelector(), torch.float32, device, randn)
    before = by_kernel.landmarks_KPMD[0].clone()
    slots_B = torch.tensor([15, 3 * BLOCK - 1], device=device)
    cos, sin = (x[:, 0, : D // 2].contiguous() for x in rotary_factors(slots_B, D, 1e4, torch.float32))
    qkv_CBX, q_BKGD = randn(1, 2, 4 * K * D), torch.empty(2, K, 2, D, device=device)
    keys_KSD, values_KSD = by_kernel.keys_KSD[0], by_kernel.values_KSD[0]
    write_heads(qkv_CBX, None, None, cos, -sin, slots_B, keys_KSD, values_KSD, None, False, q_BKGD, PAGE, EPS)
    assert torch.equal(values_KSD[:, slots_B].transpose(0, 1).flatten(1), qkv_CBX[0, :, -K * D :])
    assert torch.equal(by_kernel.landmarks_KPMD[0], before)
