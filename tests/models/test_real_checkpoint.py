"""Parity with transformers on a real checkpoint: SPARROW_REAL_CHECKPOINT=<folder> pytest -m real -s."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from sparrow.models.checkpoint import load_decoder
from sparrow.models.tokenizer import Tokenizer

TEXT = """A binary search keeps two bounds around the place where a value may stand, and halves the distance each time.
It needs a sorted list; on 1,000,000 items it looks at no more than 20 of them.

```python
def binary_search(items: list[int], wanted: int) -> int | None:
    low, high = 0, len(items)
    while low < high:
        middle = (low + high) // 2
        if items[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < len(items) and items[low] == wanted else None
```

The invariant: everything left of `low` is smaller than `wanted`, nothing from `high` on is.
"""

pytestmark = pytest.mark.real


@torch.inference_mode()
def both_logits(folder: Path, dtype: torch.dtype, attention_class) -> tuple[Tensor, Tensor]:
    """Logits [T, V] in fp32 of this decoder and of transformers."""
    tokens_T = torch.tensor(Tokenizer(folder).encode(TEXT))
    model = load_decoder(folder, dtype=dtype)
    ours = model.logits(model(tokens_T, torch.arange(len(tokens_T)), attention_class([len(tokens_T)])))
    del model
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(tokens_T[None]).logits[0]
    return ours, theirs.float()


def test_fp32_logits_equal_those_of_transformers(real_checkpoint, packed_attention):
    ours, theirs = both_logits(real_checkpoint, torch.float32, packed_attention)
    difference = (ours - theirs).abs().max().item()
    print(f"\n{real_checkpoint.name}: {len(ours)} tokens, fp32 max |logit difference| {difference:.2e}")
    surprise = mean_surprise(real_checkpoint, ours)
    print(f"largest |logit| {theirs.abs().max():.1f}, mean surprise of the text {surprise:.2f} nats")
    assert difference <= 1e-3


def test_bf16_most_probable_tokens_agree(real_checkpoint, packed_attention):
    ours, theirs = both_logits(real_checkpoint, torch.bfloat16, packed_attention)
    agreement = (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item()
    print(f"\n{real_checkpoint.name}: bf16 argmax agreement {agreement:.4f}, max {(ours - theirs).abs().max():.3f}")
    assert agreement >= 0.97


def mean_surprise(folder: Path, logits_TV: Tensor) -> float:
    targets_T = torch.tensor(Tokenizer(folder).encode(TEXT))[1:]
    return torch.nn.functional.cross_entropy(logits_TV[:-1], targets_T).item()
