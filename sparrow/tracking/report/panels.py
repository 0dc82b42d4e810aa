"""The charts of one run, in the order in which its owner needs them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparrow.tracking.report.chart import (
    BLUE,
    CYCLE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PINK,
    RED,
    SKY,
    VIOLET,
    Chart,
    Line,
    shade,
)
from sparrow.tracking.report.metrics import Metrics, Series
from sparrow.tracking.report.reduce import smoothed

# Those that add up to a step, and saving; time/validation_rollout is a part of time/validation.
PHASES = {
    "rollout": BLUE, "reward": RED, "dense": GREEN, "update": PINK, "distill": ORANGE, "sync": SKY,
    "validation": VIOLET, "measure_speedup": "s9", "save": GREY,
}  # fmt: skip
SHARE = (0.0, 1.0)


def panels(metrics: Metrics) -> list[Chart]:
    """Every chart, also those for which the run has no data (`Chart.empty`)."""
    return [
        _reward(metrics),
        _tail(metrics),
        _profile(metrics),
        _histogram(metrics),
        _budget(metrics),
        _read(metrics),
        _speedup(metrics),
        _length(metrics),
        _clipped(metrics),
        _time(metrics),
        _throughput(metrics),
        _memory(metrics),
        *_mismatch(metrics),
        *_stability(metrics),
        *_rewards(metrics),
    ]


def _line(metrics: Metrics, name: str, label: str, color: str = BLUE, band: bool = False) -> Line:
    return Line(label, metrics.get(name), color, band=band)


def _reward(metrics: Metrics) -> Chart:
    reward = metrics.get("reward")
    window = max(1, len(reward) // 20)
    validations = metrics.below("val/mean@").items()
    lines = [Line("each step", reward, BLUE, "thin" if window > 1 else "line", band=True)]
    if window > 1:
        lines.append(Line(f"mean of {window} steps", smoothed(reward, window), BLUE))
    for (n, found), color in zip(validations, (RED, GREEN, ORANGE, PINK), strict=False):
        lines.append(Line(f"val/mean@{n}, dense", found, color, "dots"))
    note = "The reward of the sparse rollouts trained on; validation is of the dense policy, on other prompts."
    return Chart("reward", "Reward and validation", lines, note)


def threshold(metrics: Metrics) -> tuple[float, str] | None:
    """tau as a mark."""
    tau = metrics.get("acceptance/tau").last
    return (tau, f"tau {tau:g}") if np.isfinite(tau) else None


def _tail(metrics: Metrics) -> Chart:
    bins = metrics.bins("acceptance/p5_bin/")
    # First, middle and last are enough for a legend; hovering names them all.
    named = {0, len(bins) // 2, len(bins) - 1}
    lines = [
        Line(f"from {start}", found, shade(order, len(bins)), "thin", named=order in named)
        for order, (start, found) in enumerate(bins.items())
    ]
    lines.append(Line("all tokens", metrics.get("acceptance/p5"), INK, band=True))
    note = "The worst twentieth of the tokens, by cached length. Below tau, the rollouts drift from the policy."
    return Chart("tail", "Acceptance tail (P5 of alpha)", lines, note, mark=threshold(metrics))


def _profile(metrics: Metrics) -> Chart:
    parts = (("p50", "median", GREY), ("p10", "P10", SKY), ("p5", "P5", INK), ("p1", "P1", ORANGE))
    lines = [Line(label, _last_of(metrics, f"acceptance/{name}_bin/"), color, "dots") for name, label, color in parts]
    last = int(metrics.steps_N[-1]) if len(metrics.steps_N) else 0
    note = f"Step {last}: percentiles of alpha in each bin of cached length."
    mark = threshold(metrics)
    return Chart("profile", "Tail by cached length, last step", lines, note, mark=mark, over="cached tokens from")


def _last_of(metrics: Metrics, prefix: str) -> Series:
    """A value for each bin that the newest step with any of these has."""
    bins = metrics.bins(prefix)
    newest = max((found.steps_N[-1] for found in bins.values()), default=0)
    kept = {start: found.last for start, found in bins.items() if found.steps_N[-1] == newest}
    return Series(np.array(list(kept), dtype=np.int64), np.array(list(kept.values()), dtype=np.float64))


def _histogram(metrics: Metrics) -> Chart:
    cells = _last_of(metrics, "acceptance/histogram/")
    note = "Last step; the counts are on a logarithmic axis."
    line = Line("tokens", cells, BLUE)
    over = "alpha, in twentieths"
    # From less than one token, so that a single one has a bar.
    return Chart("histogram", "Tokens by acceptance rate", [line], note, "bars", (-0.3, None), log=True, over=over)


def _budget(metrics: Metrics) -> Chart:
    bins = metrics.bins("budget/pages_bin/")
    named = {0, len(bins) // 2, len(bins) - 1}
    lines = [
        Line(f"from {start}", found, shade(order, len(bins)), named=order in named)
        for order, (start, found) in enumerate(bins.items())
    ]
    lines.append(_line(metrics, "budget/mean_pages", "mean, as read", INK, band=True))
    note = "Pages that a sparse layer reads for a token; by cached length where the budget follows the tail."
    return Chart("budget", "KV budget (pages)", lines, note, bounds=(0.0, None))


def _read(metrics: Metrics) -> Chart:
    line = _line(metrics, "budget/kv_read_ratio", "read / cached", BLUE, band=True)
    note = "Share of the cached keys and values that decoding read, selection and dense layers included."
    return Chart("read", "KV read ratio", [line], note, bounds=SHARE)


def _speedup(metrics: Metrics) -> Chart:
    lines = [
        _line(metrics, "speedup/model", "cost model", GREY),
        Line("measured", metrics.get("speedup/measured"), BLUE, "dots"),
    ]
    note = "Decoding time with a dense cache over that with the sparse one."
    return Chart("speedup", "Speed-up over dense", lines, note, mark=(1.0, "dense"))


def _length(metrics: Metrics) -> Chart:
    lines = [
        _line(metrics, "completions/mean_length", "all", BLUE, band=True),
        _line(metrics, "completions/mean_terminated_length", "that ended by themselves", GREEN),
        Line("validation", metrics.get("val/mean_length"), RED, "dots"),
    ]
    return Chart("length", "Response length (tokens)", lines, "Mean over the sequences.", bounds=(0.0, None))


def _clipped(metrics: Metrics) -> Chart:
    lines = [
        _line(metrics, "completions/clipped_ratio", "cut at the limit", RED, band=True),
        _line(metrics, "frac_reward_zero_std", "groups without a signal", GREY),
    ]
    note = "Share of the responses that were truncated, and of the groups whose rewards are all equal."
    return Chart("clipped", "Truncation and silent groups", lines, note, bounds=SHARE)


def _time(metrics: Metrics) -> Chart:
    found = [(phase, metrics.get(f"time/{phase}")) for phase in PHASES]
    lines = [Line(phase.replace("_", " "), s, PHASES[phase]) for phase, s in found if len(s)]
    step = metrics.get("time/step")
    if len(step):
        lines.append(Line("other", _remainder(step, [s for phase, s in found if phase != "save"]), INK))
    total = sum(line.series.finite_M.sum() for line in lines)
    shares = [f"{line.label} {line.series.finite_M.sum() / total:.0%}" for line in lines if total > 0]
    note = f"Of all time so far: {', '.join(shares)}." if shares else ""
    return Chart("time", "Time of a step (s)", lines, note, "stack", bounds=(0.0, None))


def _remainder(whole: Series, parts: Sequence[Series]) -> Series:
    """What the parts leave of the whole at each of its steps; saving is outside of it."""
    rest_N = whole.values_N.copy()
    for part in parts:
        _, at_M, from_M = np.intersect1d(whole.steps_N, part.steps_N, assume_unique=True, return_indices=True)
        rest_N[at_M] -= np.nan_to_num(part.values_N[from_M])
    return Series(whole.steps_N, np.maximum(rest_N, 0.0))


def _throughput(metrics: Metrics) -> Chart:
    line = _line(metrics, "tokens_per_second", "tokens / s", BLUE, band=True)
    return Chart("throughput", "Rollout (tokens/s)", [line], "Response tokens over rollout time.", bounds=(0.0, None))


def _memory(metrics: Metrics) -> Chart:
    lines = [
        _line(metrics, "memory/peak_gib", "peak", BLUE),
        _line(metrics, "memory/reserved_gib", "reserved", GREY),
    ]
    return Chart("memory", "Memory (GiB)", lines, "Of the device of rank 0.", bounds=(0.0, None))


def _mismatch(metrics: Metrics) -> list[Chart]:
    prefix = "sampling/importance_sampling_ratio/"
    parts = (("max", RED), ("mean", INK), ("min", BLUE))
    ratio = [_line(metrics, f"{prefix}{name}", name, color) for name, color in parts]
    kl = [
        _line(metrics, "rollout_corr/k3_kl", "k3", BLUE, band=True),
        _line(metrics, "rollout_corr/kl", "k1", GREY),
        _line(metrics, "distill/kl", "with the adapter, k3", ORANGE),
    ]
    shares = [
        _line(metrics, "rollout_corr/ess", "effective sample size", BLUE),
        _line(metrics, "rollout_corr/rollout_rs_masked_fraction", "tokens masked", RED),
        _line(metrics, "sampling/ratio_outside", "ratio outside .5 to 2", ORANGE),
    ]
    ratio_note = "Dense over rollout probability of the sampled tokens, before truncation; 1 for dense rollouts."
    return [
        Chart("ratio", "Importance ratio", ratio, ratio_note, mark=(1.0, "dense"), log=True),
        Chart("kl", "KL of rollout and dense policy (nats)", kl, "Estimates at the sampled tokens."),
        Chart("ess", "Correction (shares)", shares, "What the distance to the rollouts costs.", bounds=SHARE),
    ]


def _stability(metrics: Metrics) -> list[Chart]:
    entropy = [_line(metrics, "entropy", "dense policy", BLUE, band=True)]
    norm = [_line(metrics, "grad_norm", "before clipping", BLUE, band=True)]
    loss = [_line(metrics, "loss", "loss", BLUE, band=True)]
    clips = zip(metrics.below("clip_ratio/").items(), CYCLE, strict=False)
    clip = [Line(name, found, color) for (name, found), color in clips]
    return [
        Chart("entropy", "Entropy (nats)", entropy, "Of the dense policy, at the sampling temperature."),
        Chart("grad_norm", "Gradient norm", norm, "Logarithmic.", log=True),
        Chart("loss", "Loss", loss, "Near 0 on-policy, and not a measure of progress."),
        Chart("clip", "Tokens at the clip bounds (share)", clip, "By bound."),
    ]


def _rewards(metrics: Metrics) -> list[Chart]:
    """The mean of each reward function, and for those that count them, how their verdicts came about."""
    parts = [(name.rpartition("/"), found) for name, found in metrics.below("rewards/").items() if "/" in name]
    means = [(name, found) for (name, _, what), found in parts if what == "mean"]
    lines = [Line(name, found, color) for (name, found), color in zip(means, CYCLE, strict=False)]
    charts = [Chart("reward_parts", "Reward functions", lines, "Unweighted mean of each.")]
    for function in dict.fromkeys(name for (name, _, what), _ in parts if what != "mean"):
        outcomes = [(what, found) for (name, _, what), found in parts if name == function and what != "mean"]
        counted = [(what, found) for what, found in outcomes if found.finite_M.any()]
        stack = [Line(what, found, CYCLE[i % len(CYCLE)]) for i, (what, found) in enumerate(counted)]
        never = ", ".join(what for what, found in outcomes if not found.finite_M.any())
        note = f"Sequences by outcome{f'; never: {never}' if never else ''}."
        charts.append(Chart("outcomes", f"Outcomes of {function}", stack, note, "stack", bounds=(0.0, None)))
    return charts


def alarm_chart(metrics: Metrics) -> Chart:
    """A row for each alarm that was ever raised."""
    alarms = {name: found for name, found in metrics.below("alarm/").items() if (found.finite_M > 0).any()}
    lines = [Line(name, found, CYCLE[1]) for name, found in alarms.items()]
    return Chart("alarms", "Alarms", lines, "", "timeline")
