from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sparrow.components.budget import StepSchedule
from sparrow.components.kv_cache import SparseKVCache
from sparrow.components.selector import HeadSoftmaxSelector
from sparrow.config import load_config
from sparrow.errors import UserError
from sparrow.models.checkpoint import load_decoder
from sparrow.models.tokenizer import Tokenizer
from sparrow.recipes import sparrow_calibrate
from sparrow.recipes.calibrate_config import CalibrateConfig, check, fixed_budget, measured_with, with_budget
from sparrow.recipes.calibrate_measure import (
    Sampler,
    Scorer,
    Trajectories,
    decoded_positions,
    joined_trajectories,
    sequence_numbers,
    share_of,
)
from sparrow.recipes.calibrate_report import progress_line
from sparrow.recipes.calibrate_results import Results
from sparrow.recipes.calibrate_surface import (
    GRID,
    Cell,
    Measured,
    agreement,
    bins_of,
    bootstrap_interval,
    cells_of,
    choose,
    refuse_small_cells,
)

SEGMENTS = "{_component_: sparrow.components.selector.SegmentSoftmaxSelector, segments: 3}"
CONFIG = str(Path(__file__).parent / "mini_calibrate.yaml")


@pytest.fixture
def calibrate(checkpoint: Path, tmp_path: Path) -> Callable[..., int]:
    """Runs a mini calibration into `tmp_path`."""

    def run(*overrides: str) -> int:
        return sparrow_calibrate.main(
            ["--config", CONFIG, f"model={checkpoint}", f"output_dir={tmp_path}", "device=cpu", *overrides]
        )

    return run


def cell(bin_start: int, budget: int, low: float, tokens: int = 1000, sequences: int = 20) -> Cell:
    return Cell(bin_start, budget, low + 0.02, low, low + 0.04, tokens, sequences)


def measured(alpha_N: torch.Tensor, sequence_N: torch.Tensor, first_length: int = 0) -> Measured:
    return Measured(alpha_N, torch.ones_like(alpha_N), first_length + torch.arange(len(alpha_N)), sequence_N)


# The surface


@given(st.integers(1, 6), st.integers(1, 40), st.sampled_from([0.05, 0.3]), st.integers(0, 1000))
def test_bootstrap_equals_brute_force_over_whole_sequences(S: int, N: int, level: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    alpha_N = torch.rand(N, generator=generator, dtype=torch.float64)
    sequence_N = 7 * torch.randint(S, (N,), generator=generator)
    names = sequence_N.unique().tolist()
    draws_RS = torch.randint(len(names), (50, len(names)), generator=torch.Generator().manual_seed(3))
    values_R = [
        np.quantile(np.concatenate([alpha_N[sequence_N == names[s]] for s in row]), level, method="inverted_cdf")
        for row in draws_RS.tolist()
    ]
    low, high = bootstrap_interval(alpha_N, sequence_N, level, confidence=0.9, resamples=50, seed=3)
    expected = np.quantile(values_R, 0.05), np.quantile(values_R, 0.95)
    assert expected[0] - 1 / GRID <= low <= expected[0] + 1e-9, "rounded outwards, by less than the grid"
    assert expected[1] - 1e-9 <= high <= expected[1] + 1 / GRID + 1e-9


def test_interval_knows_that_tokens_of_a_sequence_go_astray_together() -> None:
    """One sequence of ten is bad: whether P5 is bad hangs on whether it is drawn at all."""
    sequence_N = torch.arange(10).repeat_interleave(100)
    alpha_N = torch.where(sequence_N == 0, 0.2, 0.9)
    low, high = bootstrap_interval(alpha_N, sequence_N, 0.05, 0.95, 500, seed=0)
    assert low < 0.21 and high > 0.89
    as_tokens = bootstrap_interval(alpha_N, torch.arange(1000), 0.05, 0.95, 500, seed=0)
    assert as_tokens[1] - as_tokens[0] < 0.001, "resampled tokens would be sure of the bad value"


def test_dense_tokens_have_no_doubt() -> None:
    assert bootstrap_interval(torch.ones(30), torch.arange(30) // 3, 0.05, 0.95, 100, seed=0) == (1.0, 1.0)


def test_cells_hold_the_tokens_of_their_bin() -> None:
    alpha_N = torch.tensor([0.5, 0.7, 0.9, 1.0])
    cells = cells_of(measured(alpha_N, torch.tensor([0, 0, 1, 2]), first_length=9), 4, range(0, 30, 10), 0.9, 20)
    assert [(c.bin_start, c.budget, c.tokens, c.sequences) for c in cells] == [
        (0, 4, 1, 1),
        (10, 4, 3, 3),
        (20, 4, 0, 0),
    ]
    assert cells[0].p5 == pytest.approx(0.5) and cells[1].p5 == pytest.approx(0.7 + 0.1 * 0.2)
    assert np.isnan(cells[2].p5)


def test_an_acceptance_rate_that_is_not_finite_is_named() -> None:
    broken = measured(torch.tensor([0.5, torch.nan]), torch.zeros(2))
    with pytest.raises(UserError, match="budget 4: the acceptance rate of 1 tokens is not finite"):
        cells_of(broken, 4, range(0, 10, 10), 0.9, 20)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [((0, None), [128, 192, 256]), ((0, 256), [128, 192]), ((129, None), [192, 256]), ((0, 257), [128, 192, 256])],
)
def test_bins_reach_from_the_shortest_prompt_to_the_longest_text(limits: tuple, expected: list[int]) -> None:
    assert list(bins_of([torch.tensor([165, 250]), torch.tensor([300])], 64, *limits)) == expected


def test_bins_that_hold_nothing() -> None:
    with pytest.raises(UserError, match="until_length 64"):
        bins_of([torch.tensor([165])], 64, 0, 64)
    with pytest.raises(UserError, match="no token was decoded"):
        bins_of([torch.tensor([], dtype=torch.int64)], 64, 0, None)


# The choice


def test_chosen_is_the_smallest_budget_whose_lower_bound_reaches_tau() -> None:
    cells = [cell(0, 4, 0.9), cell(0, 8, 0.95), cell(64, 4, 0.8), cell(64, 8, 0.91)]
    assert [c.budget for c in choose(cells, tau=0.9)] == [4, 8]


def test_chosen_budgets_do_not_fall_with_length() -> None:
    cells = [cell(0, 4, 0.8), cell(0, 8, 0.95), cell(64, 4, 0.93), cell(64, 8, 0.89), cell(64, 16, 0.94)]
    assert [c.budget for c in choose(cells, tau=0.9)] == [8, 16], "4 would fall, and 8 does not reach tau there"


def test_no_budget_reaches_tau() -> None:
    with pytest.raises(UserError, match=r"from cached length 64 on; the best is 8 pages with P5 0\.820"):
        choose([cell(0, 4, 0.95), cell(64, 4, 0.7), cell(64, 8, 0.8)], tau=0.9)
    cells = [cell(0, 4, 0.95), cell(64, 4, 0.7), cell(128, 4, 0.95)]
    assert choose(cells, tau=0.9, strict=False) == cells[:1]


def test_small_cells_are_refused_by_bin_with_what_they_lack() -> None:
    cells = [cell(0, 4, 0.9), cell(64, 4, 0.9, tokens=380), cell(64, 8, 0.9, tokens=395, sequences=6)]
    refuse_small_cells(cells, 380, 6)
    with pytest.raises(UserError, match="bin 64, budgets 4, 8: needs 20 tokens and 2 sequences more") as error:
        refuse_small_cells(cells, 400, 8)
    assert "bin 0" not in str(error.value)


def test_agreement_compares_cells_that_both_have() -> None:
    ours = [cell(0, 4, 0.9), cell(0, 8, 0.9), cell(64, 4, 0.9, tokens=0)]
    theirs = [cell(0, 4, 0.8), cell(64, 4, 0.7)]
    assert agreement(ours, theirs) == {(0, 4): pytest.approx(0.1)}


# The measurement


def test_both_modes_agree_to_rounding_on_the_same_tokens(checkpoint: Path) -> None:
    """A sparse rollout re-scored under its own cache: the training forward reads the pages that decode read."""
    cfg = replace(load_config(CalibrateConfig, CONFIG), model=str(checkpoint), device="cpu")
    model, tokenizer = load_decoder(checkpoint, torch.device("cpu"), torch.float32), Tokenizer(checkpoint)
    acceptance = cfg.acceptance.build()
    cache = with_budget(cfg.kv_cache, fixed_budget(4)).build()
    sampler = Sampler(cfg, cfg.data.build(), model, tokenizer, acceptance.top_k)
    scorer = Scorer(cfg, model, acceptance, torch.device("cpu"))
    batch = sampler.sample(cache, range(6), keep_hidden=True)
    generated, rescored = scorer.generated(batch), scorer.rescored(batch, cache)
    assert generated.alpha_N.min() < 0.9, "pages were dropped"
    torch.testing.assert_close(rescored.alpha_N, generated.alpha_N, atol=1e-4, rtol=0)
    assert len(generated.alpha_N) == batch.num_tokens - 6, "without the first token of each response"
    assert torch.equal(rescored.cached_length_N, generated.cached_length_N)


def test_sequences_have_the_same_numbers_on_any_number_of_ranks() -> None:
    """Five prompts of two samples each, dealt out to two ranks."""
    ranks = [sequence_numbers(torch.arange(n), 2, rank, 2).tolist() for rank, n in enumerate((6, 4))]
    assert ranks == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]]
    assert sequence_numbers(torch.arange(10), 2, 0, 1).tolist() == list(range(10))


def test_trajectories_come_together_in_the_order_of_their_prompts() -> None:
    whole = Trajectories([[1], [2, 2], [3], [4]], torch.tensor([2, 3, 1, 2]), torch.arange(8))
    for num_samples in (1, 2):
        shares = [share_of(whole, num_samples, rank, 2) for rank in range(2)]
        parts = [Trajectories(share.prompts, share.lengths_S, share.tokens_T) for share in shares]
        again = joined_trajectories(parts, num_samples)
        assert again.prompts == whole.prompts and torch.equal(again.tokens_T, whole.tokens_T)
        assert torch.equal(again.lengths_S, whole.lengths_S)
    assert shares[0].prompts == [[1], [2, 2]], "the samples of a prompt stay together"
    assert decoded_positions(whole).cached_length_N.tolist() == [2, 3, 4, 2]


# The results


def test_other_settings_are_refused_with_the_keys_that_differ(tmp_path: Path) -> None:
    cfg = load_config(CalibrateConfig, CONFIG)
    Results(tmp_path, measured_with(cfg))
    Results(tmp_path, measured_with(load_config(CalibrateConfig, CONFIG, ["seed=9"])))  # nothing is measured yet
    Results(tmp_path, measured_with(cfg)).save("generate", 4, 1, measured(torch.ones(3), torch.zeros(3)))
    chooses_only = load_config(CalibrateConfig, CONFIG, ["acceptance.tau=0.8", "acceptance.bin_width=32", "mode=both"])
    Results(tmp_path, measured_with(chooses_only))
    Results(tmp_path, measured_with(load_config(CalibrateConfig, CONFIG, ["budgets=[4]", "kv_cache.budget.pages=5"])))
    Results(tmp_path, measured_with(load_config(CalibrateConfig, CONFIG, ["prompts=60"])))
    other = load_config(CalibrateConfig, CONFIG, ["data.nodes=6", "kv_cache.page_size=8"])
    with pytest.raises(UserError, match=r"data\.nodes: 5 then, 6 now; kv_cache\.page_size: 4 then, 8 now"):
        Results(tmp_path, measured_with(other))


def test_other_spellings_are_the_same_settings(checkpoint: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(checkpoint)
    data = "data={_component_: sparrow.components.data.JsonlPrompts, path: %s}"

    def settings(*overrides: str) -> dict:
        return measured_with(load_config(CalibrateConfig, CONFIG, ["~data", *overrides]))

    plain = settings(data % "./prompts.jsonl", f"model={checkpoint}")
    spelt_out = ["data.prompt_key=prompt", "kv_cache.sink_pages=1", "kv_cache.backend=auto", "sampling.temperature=1"]
    again = settings(data % (tmp_path / "prompts.jsonl"), *spelt_out, "model=./model/")
    assert plain == again and plain["data.path"] == str(tmp_path / "prompts.jsonl")
    assert settings(data % "./prompts.jsonl", f"model={tmp_path}")["model"] != plain["model"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"output_dir: {tmp_path}/file/measured cannot be made: Not a directory"):
        Results(tmp_path / "file" / "measured", {})


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"PK\x03\x04"])
def test_damaged_and_foreign_files_are_named(tmp_path: Path, content: bytes) -> None:
    results = Results(tmp_path, {"seed": 0})
    results.save("generate", 4, 1, measured(torch.ones(3), torch.zeros(3)))
    assert results.prompts("generate", 4) == 1
    torch.save({"foreign": 1}, tmp_path / "trajectories.pt")
    with pytest.raises(UserError, match=r"trajectories\.pt is damaged or none of"):
        results.load_trajectories()
    (tmp_path / "generate_00004.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"generate_00004\.pt is damaged or none of"):
        results.prompts("generate", 4)
    (tmp_path / "settings.json").write_bytes(content)
    with pytest.raises(UserError, match=r"settings\.json does not say"):
        Results(tmp_path, {"seed": 0})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("budgets=[]", "budgets"),
        ("budgets=[8,4]", "budgets"),
        ("confidence=1.0", "confidence: 1.0"),
        ("min_tokens=10", "min_tokens: 10"),
        ("prompts=0", "prompts: 0"),
        ("until_length=0", "until_length: 0"),
        ("sampling.top_p=0.9", "top_p"),
        ("kv_cache=sparrow.components.kv_cache.DenseKVCache", "has no budget to calibrate"),
    ],
)
def test_bad_input(override: str, message: str) -> None:
    removed = ["~kv_cache"] if override.startswith("kv_cache") else []
    with pytest.raises(UserError, match=message):
        check(load_config(CalibrateConfig, CONFIG, [*removed, override]))


def test_a_budget_below_the_reserved_pages_is_an_error(calibrate: Callable[..., int], capsys) -> None:
    assert calibrate("budgets=[2,8]") == 2
    assert "error: budgets: 2 pages do not hold the 1 sink and 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("kv_cache.backend=triton", "kv_cache.backend: triton needs a CUDA device"),
        ("kv_cache.dense_layers=3", "kv_cache.dense_layers: 3 of the model's 3 layers"),
        (f"kv_cache.selector={SEGMENTS}", "segments: 3 does not divide"),
        ("acceptance.tau=2.0", "acceptance.tau: 2.0 must be"),
        ("acceptance.estimator=top_k acceptance.top_k=30", "set acceptance.top_k: 20 or"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_measured(
    calibrate: Callable[..., int], tmp_path: Path, capsys, override: str, message: str
) -> None:
    assert calibrate(*(override.split() if " acc" in override else [override])) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.pt"))


# The whole recipe


def test_schedule_surface_and_pictures(calibrate: Callable[..., int], tmp_path: Path, checkpoint: Path, capsys) -> None:
    assert calibrate("mode=both", "held_out_prompts=16") == 0
    printed = capsys.readouterr().out
    assert "P5 differs by" in printed and "held-out prompts under the chosen schedule" in printed
    for name in ("p5_by_position.png", "p5_by_position_teacher_forced.png", "path.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((tmp_path / "surface.csv").open()))
    assert list(rows[0]) == ["page_size", "bin_start", "budget_pages", "p5", "p5_low", "p5_high", "tokens"]
    assert {(row["bin_start"], row["budget_pages"]) for row in rows} == {
        (b, p) for b in ("16", "32") for p in ["3", "5", "8", "16"]
    }
    assert all(float(row["p5_low"]) <= float(row["p5"]) + 1 / GRID for row in rows)
    dense = [float(row["p5"]) for row in rows if row["budget_pages"] == "16"]
    assert min(dense) > 0.999, "16 pages of 4 hold every sequence: dense by construction"
    by_response = list(csv.DictReader((tmp_path / "surface_by_response.csv").open()))
    assert list(by_response[0]) == list(rows[0])
    # The prompts are all 24 tokens: five entries of four and the question. Position 0 comes from the prefill.
    position_N = torch.load(tmp_path / "measured" / "generate_00003.pt")["cached_length_N"] - 24
    assert position_N.min() == 1
    expected = {start: int((position_N // 16 * 16 == start).sum()) for start in (0, 16, 32)}
    tokens = {int(row["bin_start"]): int(row["tokens"]) for row in by_response if row["budget_pages"] == "3"}
    assert tokens == {start: count for start, count in expected.items() if count}
    schedule = StepSchedule(path=str(tmp_path / "schedule.yaml"))
    assert schedule.bin_width == 16 and len(schedule.entries) == 3 and schedule.entries[0] == schedule.entries[1]
    cache = SparseKVCache(schedule, HeadSoftmaxSelector(), page_size=4, block_size=16, dense_layers=1)
    assert cache.check(str(checkpoint), 1.0, "exact") == []
    written = yaml.safe_load((tmp_path / "schedule.yaml").read_text())
    assert (written["source"], written["mode"], written["prompts"]) == ("calibrated", "generate", 40)
    assert written["tokens_per_bin"][0] == 0 and min(written["tokens_per_bin"][1:]) >= 100
    assert not list(tmp_path.rglob("*.part"))


def test_only_missing_budgets_are_measured_again(calibrate: Callable[..., int], tmp_path: Path, capsys) -> None:
    assert calibrate() == 0
    surface = (tmp_path / "surface.csv").read_text()
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "measured").glob("teacher_forced_*.pt")}
    lost = tmp_path / "measured" / "teacher_forced_00005.pt"
    lost.unlink()
    capsys.readouterr()
    assert calibrate() == 0
    assert "1/1  budget 5" in capsys.readouterr().out
    assert (tmp_path / "surface.csv").read_text() == surface
    assert all(path.stat().st_mtime_ns == then for path, then in files.items() if path != lost)
    assert calibrate("acceptance.tau=0.3", "budgets=[3,4,16]") == 0
    assert "1/1  budget 4" in capsys.readouterr().out
    assert calibrate("seed=1") == 2
    assert "seed: 0 then, 1 now" in capsys.readouterr().err


def test_more_prompts_are_measured_beside_those_there_are(
    calibrate: Callable[..., int], tmp_path: Path, capsys
) -> None:
    wanted = ["mode=both", "budgets=[5]", "acceptance.tau=0.1", "min_tokens=20", "min_sequences=2"]
    files = [tmp_path / "measured" / f"{mode}_00005.pt" for mode in ("generate", "teacher_forced")]
    assert calibrate(*wanted) == 0
    at_once = [torch.load(file) for file in files]
    shutil.rmtree(tmp_path / "measured")
    assert calibrate(*wanted, "prompts=25") == 0
    surface, fewer = (tmp_path / "surface.csv").read_text(), [torch.load(file) for file in files]
    assert calibrate(*wanted) == 0, "the last 15 beside the 25"
    for before, grown, expected in zip(fewer, map(torch.load, files), at_once, strict=True):
        assert (before["prompts"], grown["prompts"]) == (25, 40)
        assert len(before["alpha_N"]) < len(grown["alpha_N"])
        assert torch.equal(grown["sequence_N"], expected["sequence_N"])
        torch.testing.assert_close(grown["alpha_N"], expected["alpha_N"], atol=1e-4, rtol=0)
    capsys.readouterr()
    assert calibrate(*wanted, "prompts=25") == 0
    assert "1/1" not in capsys.readouterr().out, "25 of the 40 are there"
    assert (tmp_path / "surface.csv").read_text() == surface


def test_a_choice_that_fails_leaves_nothing_of_the_last_one(
    calibrate: Callable[..., int], tmp_path: Path, capsys
) -> None:
    assert calibrate("held_out_prompts=8", "mode=both", "budgets=[3,16]") == 0
    before = {file.name for file in tmp_path.iterdir()}
    assert calibrate("acceptance.tau=1.0", "budgets=[3]", "mode=generate") == 2
    assert "error: budgets: none keeps" in capsys.readouterr().err
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {"measured", "surface.csv", "p5_by_position.png", "surface_by_response.csv"}
    assert before - left == {
        *("schedule.yaml", "path.png", "held_out.csv", "agreement.csv", "surface_teacher_forced.csv"),
        *("p5_by_position_teacher_forced.png", "surface_by_response_teacher_forced.csv"),
    }


def test_progress_counts_the_bins_that_are_wanted() -> None:
    tokens = measured(torch.linspace(0, 1, 40), torch.zeros(40), first_length=16)
    line = progress_line(tokens, bins_of([tokens.cached_length_N], 16, 0, 48), "exact")
    assert "48:" not in line and line.endswith("16 to 16 tokens a cell")


def test_too_few_tokens_are_refused_before_the_sweep(calibrate: Callable[..., int], tmp_path: Path, capsys) -> None:
    assert calibrate("~until_length", "min_tokens=300", "budgets=[16]") == 2
    assert "tokens more" in capsys.readouterr().err
    assert not list((tmp_path / "measured").glob("teacher_forced_*.pt"))
    # As the message advises.
    assert calibrate("~until_length", "min_tokens=300", "budgets=[16]", "prompts=60") == 0
    assert "20 sequences" in capsys.readouterr().out, "of the prompts that are new"


def test_top_20_stands_beside_its_floor(calibrate: Callable[..., int], tmp_path: Path, capsys) -> None:
    assert calibrate("acceptance.estimator=top_k", "acceptance.tau=0.3") == 0
    assert "  floor " in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "schedule.yaml").read_text())["estimator"] == "top_20"
