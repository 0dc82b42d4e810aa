"""The page: parsed as a browser would, for what it shows, and for what untrusted text could make it do."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from sparrow.tracking.picture import COLORS
from sparrow.tracking.report import page
from sparrow.tracking.report.run import Run, read_run

NOW = 1_800_000_000.0
HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u202egnp\u2066\x00\x1b[31m\ud800 & \" ' <!-- ]]>"
)


class Parsed(HTMLParser):
    """Tags with their attributes, the text of each element by tag, and that every element is closed in order."""

    VOID = frozenset({"meta", "img", "br", "input", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        shown = [words for tag, words in self.texts.items() if tag not in ("script", "style")]
        return "\n".join("".join(words) for words in shown)


def metrics(step: int, **more: Any) -> dict[str, Any]:
    bins = {f"acceptance/p5_bin/{start}": 0.95 - start / 10_000 for start in (0, 64, 128)}
    return {
        "step": step, "reward": 0.02 * step, "acceptance/p5": 0.93, "acceptance/tau": 0.91, **bins,
        "budget/kv_read_ratio": 0.4, "budget/mean_pages": 20.0, "completions/mean_length": 180.0,
        "time/rollout": 4.0, "time/update": 3.0, "time/step": 10.0, "alarm/p5": 0.0,
        "alarm/grad_norm": float(step == 2), "rewards/math/correct": 3.0, "rewards/math/wrong": 1.0,
        "rewards/math/error": 0.0, **more,
    }  # fmt: skip


def sample(step: int, **more: Any) -> dict[str, Any]:
    low = {"position": 1, "alpha": 0.05, "before": "one", "token": " two", "after": " three"}
    return {
        "step": step, "prompt": "count", "response": "one two three", "reward": 1.0,
        "rewards": {"math": 1.0, "form": None}, "advantage": 0.5, "length": 3, "terminated": True, "alpha_mean": 0.7,
        "alpha_min": 0.05, "tokens": ["one", " two", " three"], "alphas": [990, 50, -1], "omitted": 0, "lowest": [low],
        **more,
    }  # fmt: skip


def run(folder: Path, rows: list[Any], samples: list[Any] | None = None, tail: str = "") -> Run:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples or []))
    return read_run(folder, folder.name, page.SAMPLES)


def rendered(*runs: Run) -> tuple[str, Parsed]:
    text = page.render(runs, NOW)
    text.encode("utf-8")
    return text, Parsed(text)


def test_a_run_has_all_its_charts_and_names_what_it_does_not_log(tmp_path: Path) -> None:
    _, parsed = rendered(run(tmp_path / "run", [metrics(step) for step in range(1, 6)], [sample(5)]))
    keys = {str(figure["id"]).rpartition("-")[0] for figure in parsed.all("figure")}
    assert keys == {"reward", "tail", "profile", "budget", "read", "length", "time", "outcomes", "alarms"}
    assert "Not logged by this run: Tokens by acceptance rate; Speed-up over dense" in parsed.text
    assert "rollout 40%, update 30%, other 30%" in parsed.text
    assert "0.93, above tau 0.91" in parsed.text and "lowest bin 0.9372, from 128 cached tokens" in parsed.text
    assert "Sequences by outcome; never: error." in parsed.text
    assert "Never raised: p5." in parsed.text
    assert all(svg["tabindex"] == "0" and "Last values" in str(svg["aria-label"]) for svg in parsed.all("svg"))


def test_the_read_out_has_the_values_that_were_logged(tmp_path: Path) -> None:
    _, parsed = rendered(run(tmp_path / "run", [metrics(1), metrics(2, reward="nan"), metrics(4)]))
    (svg,) = [svg for svg in parsed.all("svg") if str(svg["aria-label"]).startswith("Reward and validation")]
    data = json.loads("".join(parsed.texts["script"][:1]))
    reward = data[int(str(svg["data-chart"]))]["s"][0]
    assert reward["x"] == [1, 2, 4] and reward["v"] == [0.02, None, 0.08]
    assert "1 value is not finite, and left out." in parsed.text


def test_a_stack_reads_its_parts_and_a_timeline_the_worst_step_of_a_column(tmp_path: Path) -> None:
    rows = [metrics(step, **{"time/validation": 5.0} if step == 2 else {}) for step in range(1, 1001)]
    _, parsed = rendered(run(tmp_path / "run", rows))
    data = json.loads("".join(parsed.texts["script"][:1]))
    series = {series["n"]: series for chart in data for series in chart["s"]}
    # Three steps a column, and none is left out where a part is missing.
    assert series["validation"]["x"] == series["rollout"]["x"]
    assert series["validation"]["v"][:2] == [1.667, 0.0] and set(series["rollout"]["v"]) == {4.0}
    assert series["grad_norm"]["v"][:2] == [1.0, 0.0]


@pytest.mark.parametrize("field", ["prompt", "response", "tokens", "lowest", "rewards"])
def test_a_hostile_sample_is_only_text(tmp_path: Path, field: str) -> None:
    low = {"position": 0, "alpha": 0.1, "before": HOSTILE, "token": HOSTILE, "after": HOSTILE}
    values = {"tokens": [HOSTILE, "a", "b"], "lowest": [low], "rewards": {HOSTILE: 1.0}}
    row = sample(
        1, **{field: values.get(field, HOSTILE)}, **({"tokens": [], "alphas": []} if field == "response" else {})
    )
    calm, _ = rendered(run(tmp_path / "run", [metrics(1)], [sample(1)]))
    text, parsed = rendered(run(tmp_path / "run", [metrics(1)], [row]))
    assert len(parsed.all("script")) == 2 and not parsed.all("img")
    assert "</script><script>alert(1)</script>" in parsed.text
    assert "[U+202E]" in parsed.text and "[U+D800]" in parsed.text
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00-\x08\x1b\ud800-\udfff]", text)
    assert text.count("</script>") == calm.count("</script>")


def test_hostile_names_of_metrics_and_runs_are_only_text(tmp_path: Path) -> None:
    rows = [metrics(1, **{f"rewards/{HOSTILE}/mean": 1.0, f"val/mean@{HOSTILE}": 1.0, f"alarm/{HOSTILE}": 1.0})]
    folder = tmp_path / "<b onclick=alert(1)>&"
    text, parsed = rendered(run(folder, rows), run(tmp_path / "other", rows))
    assert len(parsed.all("script")) == 2 and not parsed.all("img") and not parsed.all("b")
    assert "<b onclick=alert(1)>&" in parsed.text
    assert "<b onclick" not in text and "<script>alert" not in text


def test_long_texts_are_cut(tmp_path: Path) -> None:
    row = sample(1, prompt="p" * 10**6, response="r" * 10**6, tokens=["t" * 10**6], alphas=[500])
    text, parsed = rendered(run(tmp_path / "run", [metrics(1)], [row]))
    assert len(text) < 200_000
    assert "[... 996000 characters ...]" in parsed.text


def test_nothing_is_loaded_and_only_its_own_script_and_style_run(tmp_path: Path) -> None:
    text, parsed = rendered(run(tmp_path / "run", [metrics(1)], [sample(1)]))
    assert not re.search(r"https?:|//\w|url\(|@import|javascript:", text)
    names = {name for _, attributes in parsed.tags for name in attributes}
    assert not {"src", "href", "style", "action"} & names and not [name for name in names if name.startswith("on")]
    (policy,) = [meta["content"] for meta in parsed.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none';") and "unsafe" not in policy
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        content = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content[-1].encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy and len(content) == 1


def test_tokens_are_coloured_by_alpha_and_the_lowest_marked(tmp_path: Path) -> None:
    row = sample(1, tokens=["a", "b", "c", "d"], alphas=[950, 50, -1, 600], omitted=10)
    row["lowest"] = [{"position": 1, "alpha": 0.05, "token": "b"}, {"position": 13, "alpha": 0.6, "token": "d"}]
    _, parsed = rendered(run(tmp_path / "run", [metrics(1)], [row]))
    tokens = [i for i in parsed.all("i") if "data-a" in i]
    assert [i.get("class") for i in tokens] == [None, "a0 low", "n", "a3 low"]
    assert [i["data-a"] for i in tokens] == ["950", "50", "-1", "600"]
    assert [div["data-first"] for div in parsed.all("div") if "data-first" in div] == ["0", "12"]
    assert "10 tokens left out" in parsed.text


def test_an_older_run_without_tokens_shows_its_responses(tmp_path: Path) -> None:
    old = {
        key: value
        for key, value in sample(1).items()
        if key not in ("rewards", "tokens", "alphas", "omitted", "lowest")
    }
    _, parsed = rendered(run(tmp_path / "run", [{"step": 1, "reward": 0.5}], [old]))
    assert "one two three" in parsed.text and "mean alpha 0.7" in parsed.text
    assert "This run logs no alarms." in parsed.text


@pytest.mark.parametrize("rows", [[], [{"step": 0}], [{"step": 0, "val/mean@1": 0.3}], [metrics(1)]])
def test_a_run_that_just_began_has_a_page(tmp_path: Path, rows: list[Any]) -> None:
    _, parsed = rendered(run(tmp_path / "run", rows, tail='{"step": 9, "rew'))
    assert ("There is no whole line" in parsed.text) == (not rows)
    assert "No samples" in parsed.text


@pytest.mark.parametrize("value", ["nan", "inf", 0.0, -1.0, 1e300])
def test_any_value_of_any_metric_gives_a_page(tmp_path: Path, value: float | str) -> None:
    bare = [
        {**dict.fromkeys(metrics(1), value), "acceptance/histogram/3": value, "grad_norm": value, "step": step}
        for step in (1, 2)
    ]
    text, _ = rendered(run(tmp_path / "run", bare))
    assert not re.search(r'(?:d|x1|y1|x|y)="[^"]*(?:nan|inf)', text)


def test_equal_logs_give_equal_pages(tmp_path: Path) -> None:
    rows, samples = [metrics(step) for step in range(1, 9)], [sample(step) for step in range(1, 9)]
    one, two = run(tmp_path / "run", rows, samples), run(tmp_path / "run", rows, samples)
    assert page.render([one], one.written) == page.render([two], two.written)


def test_a_resumed_run_shows_each_step_once(tmp_path: Path) -> None:
    straight = run(tmp_path / "run", [metrics(step) for step in range(1, 7)])
    resumed = run(tmp_path / "run", [*(metrics(step, reward=9.0) for step in (1, 5, 6)), *map(metrics, range(1, 7))])
    assert page.render([straight], straight.written) == page.render([resumed], resumed.written)


def test_a_long_run_says_what_its_points_stand_for_and_stays_small(tmp_path: Path) -> None:
    rows = [metrics(step, **{"acceptance/p5": 0.5 if step == 777 else 0.93}) for step in range(1, 2001)]
    text, parsed = rendered(run(tmp_path / "run", rows))
    assert "Each point is the mean of up to 5 steps; the band is their lowest to highest." in parsed.text
    data = json.loads("".join(parsed.texts["script"][:1]))
    (whole,) = [series for chart in data for series in chart["s"] if series["n"] == "all tokens"]
    assert len(whole["x"]) == 400 and min(whole["lo"]) == 0.5
    assert len(text) < 1_000_000


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    one = run(tmp_path / "one", [metrics(step) for step in (1, 2)])
    two = run(tmp_path / "two", [metrics(step, **{"acceptance/below_tau": 1.0}) for step in (1, 2, 3)])
    for folder, rate in (("one", 1), ("two", 2)):
        (tmp_path / folder / "settings.yaml").write_text(f"steps: 8\nloss: {{rate: {rate}}}\nreward: [a, b]\n")
    one, two = (read_run(tmp_path / name, name, 1) for name in ("one", "two"))
    _, parsed = rendered(one, two)
    cells = "|".join(parsed.texts["td"])
    assert "2 of 8|3 of 8" in cells and "|100%" in cells
    assert "loss.rate" in parsed.text and "reward.0" not in parsed.text and cells.endswith("1|2")
    assert [details.get("id") for details in parsed.all("details") if details.get("class") == "run"] == [
        "run-0",
        "run-1",
    ]


def test_settings_come_from_the_newest_save_where_the_folder_has_none(tmp_path: Path) -> None:
    for step, text in ((1, "steps: 10"), (2, "steps: 20"), (3, "steps: [")):
        save = tmp_path / "run" / "checkpoints" / f"step_{step:06d}"
        save.mkdir(parents=True)
        (save / "config.yaml").write_text(text)
    assert run(tmp_path / "run", [metrics(1)]).steps == 20


def test_the_health_line_tells_a_bad_run(tmp_path: Path) -> None:
    bad = run(tmp_path / "run", [metrics(1), metrics(2, **{"acceptance/p5": 0.8, "alarm/p5": 1.0})])
    _, parsed = rendered(bad)
    assert "look at this" in parsed.text and "0.8, below tau 0.91" in parsed.text
    (tmp_path / "run" / "settings.yaml").write_text("steps: 100")
    _, parsed = rendered(read_run(tmp_path / "run", "run", 1))
    assert "stopped, or stuck?" in parsed.text and "2 of 100" in parsed.text


def test_pictures_have_the_colours_of_the_page() -> None:
    css = (Path(page.__file__).parent / "page.css").read_text()
    light = dict(re.findall(r"--(\w+): (#\w{6})", css[: css.index("@media")]))
    assert {name: light[name] for name in COLORS} == COLORS
