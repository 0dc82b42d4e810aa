"""Real weights through the whole loop: a chat prompt, sparse rollouts on real text, one GRPO step on the CPU.

SPARROW_REAL_CHECKPOINT=/path/to/Qwen2.5-0.5B-Instruct pytest -s tests/recipes/test_real_checkpoint.py
"""

from __future__ import annotations

import json

import pytest

from sparrow.recipes import sparrow_grpo


@pytest.mark.real
def test_one_step_with_sparse_rollouts(real_checkpoint, tmp_path):
    small = ["steps=1", "prompts_per_step=2", "num_samples=4", "engine.max_rows=8", "engine.kv_tokens=8192"]
    arguments = ["--config", "qwen2.5_0.5b", f"model={real_checkpoint}", f"output_dir={tmp_path}", *small]
    assert sparrow_grpo.main([*arguments, "engine.max_new_tokens=256", "~validation", "~trackers.2"]) == 0
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    print(json.dumps(row, indent=1))
    assert row["budget/kv_read_ratio"] < 0.95, "pages are dropped"
    assert 0.1 < row["acceptance/p5"] < 1 and row["acceptance/mean"] > 0.8
    assert row["completions/mean_length"] > 20
    assert abs(row["sampling/importance_sampling_ratio/mean"] - 1) < 0.1
    if not row["update/noop"]:
        assert row["policy/ratio_error"] == 0.0 and row["update/skipped"] == 0.0
