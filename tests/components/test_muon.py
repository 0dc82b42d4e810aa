from __future__ import annotations

import pytest
import torch

from sparrow.components.muon import Muon, orthogonalize


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 24), (2, 24, 8)])
def test_singular_values_end_near_one_and_directions_stay(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    out = orthogonalize(matrices)
    assert torch.linalg.svdvals(out).sub(1).abs().max() < 0.45
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    # U^T out V is diagonal: Newton-Schulz changes singular values only.
    inner = u.mT @ out @ vh.mT
    assert (inner - torch.diag_embed(inner.diagonal(dim1=1, dim2=2))).abs().max() < 1e-4


def test_moves_parameters_as_torch_does():
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=generator) for shape in ((16, 16), (8, 24), (24, 8), (16, 16))]
    gradients = [[torch.randn(w.shape, generator=generator) for w in start] for _ in range(3)]
    results = []
    for optimizer_class in (Muon, torch.optim.Muon):
        weights = [torch.nn.Parameter(w.clone()) for w in start]
        optimizer = optimizer_class(weights, lr=0.1, weight_decay=0.1, momentum=0.9)
        for step in gradients:
            for weight, gradient in zip(weights, step, strict=True):
                weight.grad = gradient.clone()
            optimizer.step()
        results.append([w.detach() for w in weights])
    for ours, theirs, w in zip(*results, start, strict=True):
        moved = (theirs - w).norm()
        # torch iterates in bf16: three steps agree to a few percent of the distance.
        assert (ours - theirs).norm() < 0.05 * moved
