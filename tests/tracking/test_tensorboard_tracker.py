"""Event files, read back by TensorBoard itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sparrow.tracking.histogram import histogram_metrics
from sparrow.tracking.tensorboard import TensorBoardTracker


def test_scalars_histograms_and_samples_are_read_back_and_repeated_steps_once(tmp_path: Path) -> None:
    cells = {f"acceptance/{key}": value for key, value in histogram_metrics([1.0, 0.0, 3.0]).items()}
    for steps in ((1, 2, 3), (3, 4)):  # resumed from a save after step 2
        tracker = TensorBoardTracker()
        tracker.start(tmp_path, {"lr": 1e-6, "nested": {"a": 1}}, "abc")
        for step in steps:
            tracker.log_dict({"reward": step + len(steps) / 10, **cells}, step)
            tracker.log_samples([{"prompt": "p", "response": f"r{step}", "reward": 1.0}], step)
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    rewards = {event.step: event.value for event in events.Scalars("reward")}
    assert rewards == pytest.approx({1: 1.3, 2: 2.3, 3: 3.2, 4: 4.2})
    assert events.Histograms("acceptance")[0].histogram_value.num == 4
    texts = events.Tensors("samples/0/text_summary")
    assert b"r4" in texts[-1].tensor_proto.string_val[0]
    assert b"nested:" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
