from __future__ import annotations

import torch

from sparrow.rates import measure_rates


def test_a_cpu_does_something_in_a_second():
    rates = measure_rates(torch.device("cpu"))
    assert rates.element_bytes == 4
    assert 1e8 < rates.flop_per_s < 1e15 and 1e8 < rates.bytes_per_s < 1e13
