from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparrow.config import Component, Positional, load_config, to_yaml
from sparrow.errors import UserError

ME = __name__


class Scorer(Protocol):
    def score(self) -> float: ...


class Base: ...


@dataclass
class Leaf(Base):
    width: int
    rate: float = 0.5
    mode: Literal["sum", "mean"] = "sum"


@dataclass
class Branch:
    leaf: Base
    leaves: Sequence[Leaf] = ()
    scorer: Scorer | None = None


def free(**kwargs: Any) -> dict[str, Any]:
    return kwargs


NOT_CALLABLE = 3


@dataclass(kw_only=True)
class Inner:
    sizes: list[int] = field(default_factory=list)
    span: tuple[int, float] = (0, 1.0)
    table: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.span[0] > self.span[1]:
            raise UserError(f"span: {self.span[0]} is above {self.span[1]}")


@dataclass(kw_only=True)
class Schema:
    steps: int
    lr: float = 1.0
    name: str = "run"
    greedy: bool = False
    mode: Literal["a", "b", 3] = "a"
    limit: float | None = None
    size: int | list[int] = 0
    folder: Path = Path("out")
    inner: Inner = field(default_factory=Inner)
    part: Component | None = None
    parts: list[Component] = field(default_factory=list)
    optimizer: Annotated[Component, Positional(1)] | None = None


Load = Callable[..., Schema]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads Schema from YAML text (`ME.` stands for this module) and overrides."""

    def load_text(text: str, *overrides: str) -> Schema:
        path = tmp_path / "my.yaml"
        path.write_text(text.replace("ME.", f"{ME}."))
        return load_config(Schema, str(path), [override.replace("ME.", f"{ME}.") for override in overrides])

    return load_text


def test_values_are_converted_by_annotation(load: Load) -> None:
    config = load("steps: 2\nlr: 1e-3\nlimit: 4\nfolder: a/b\ninner: {sizes: [1, 2], span: [1, 2], table: {x: 1}}")
    assert (config.steps, config.lr, config.limit, config.folder) == (2, 1e-3, 4.0, Path("a/b"))
    assert config.inner == Inner(sizes=[1, 2], span=(1, 2.0), table={"x": 1.0})
    assert isinstance(config.inner.span[1], float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "my.yaml: is empty"),
        ("[1]", "my.yaml: must hold key: value pairs"),
        ("lr: 1", "my.yaml: steps: missing key"),
        ("steps: ???", "my.yaml: steps: must be given"),
        ("steps: 1.0", "my.yaml: steps: must be int, not 1.0"),
        ("steps: true", "my.yaml: steps: must be int, not True"),
        ("steps: 1\nlr: true", "lr: must be float, not True"),
        ("steps: 1\ngreedy: 1", "greedy: must be bool, not 1"),
        ("steps: 1\nname: 12", "name: must be str, not 12; quote it"),
        ("steps: 1\nlimit: None", "limit: must be float or null, not 'None'; YAML's word for none is null"),
        ("steps: 1\nmode: c", "mode: must be one of 'a', 'b', 3, not 'c'"),
        ("steps: 1\nsize: x", "size: must be int or list[int], not 'x'"),
        ("steps: 1\nsize: [1, x]", "size.1: must be int, not 'x'"),
        ("steps: 1\ninner: 3", "inner: must be a mapping with the keys sizes, span, table, not 3"),
        ("steps: 1\ninner: {span: [1]}", "inner.span: must be tuple[int, float], not [1]"),
        ("steps: 1\ninner: {span: [3, 1]}", "inner: span: 3 is above 1.0"),
        ("steps: 1\ninner: {tabel: {}}", "inner.tabel: unknown key, did you mean 'table'?"),
        ("steps: 1\nqqq: 1", "qqq: unknown key, known here: steps, lr"),
        ("steps: 1\nname: ${nothing}", "name: Interpolation key 'nothing' not found"),
        ("steps: 1\nsteps: 2", "found duplicate key steps"),
        ("steps: [", "not readable as YAML"),
        ("steps: 1\npart: {_component_: ME.Leaf}", "part.width: missing key"),
        ("steps: 1\npart: {_component_: ME.Leaf, widht: 1}", "part.widht: unknown key, did you mean 'width'?"),
        ("steps: 1\npart: {_component_: ME.Leaf, width: x}", "part.width: must be int, not 'x'"),
        ("steps: 1\npart: {_component_: ME.Leaf, width: 1, mode: x}", "part.mode: must be one of 'sum', 'mean'"),
        ("steps: 1\npart: {_component_: ME.Laef}", "part._component_:"),
        ("steps: 1\npart: {_component_: ME.Laef}", "did you mean 'Leaf'?"),
        ("steps: 1\npart: {_component_: nowhere.Leaf}", "no module named 'nowhere'"),
        ("steps: 1\npart: {_component_: Leaf}", "'Leaf' is not a dotted path"),
        ("steps: 1\npart: {_component_: 3}", "part._component_: must be str, not 3"),
        ("steps: 1\npart: {_component_: sparrow.components}", "'sparrow.components' is a module, not a class"),
        ("steps: 1\npart: {_component_: sparrow.componets.loss.X}", "did you mean 'components'?"),
        ("steps: 1\npart: {_component_: sparrow.config}", "'sparrow.config' is a module"),
        ("steps: 1\npart: {_component_: ME.NOT_CALLABLE}", "is a int, not a class or function"),
        ("steps: 1\npart: {width: 1}", "part: must be Component, not {'width': 1}"),
        ("steps: 1\nparts: {_component_: ME.free}", "parts: must be list[Component]"),
        ("steps: 1\npart: {_component_: ME.Branch, leaf: {_component_: ME.Branch}}", "part.leaf.leaf: missing key"),
        ("steps: 1\npart: {_component_: ME.Branch, leaf: {_component_: ME.free}, scorer: 1}", "part.scorer: must be"),
        ("steps: 1\npart: {_component_: ME.Branch, leaf: {_component_: fractions.Fraction}}", "must be a Base, which"),
        ("steps: 1\nlr: {_component_: ME.free}", "lr: must be float, not {"),
        ("steps: 1\noptimizer: {_component_: torch.optim.AdamW, beta: 1}", "did you mean 'betas'?"),
    ],
)
def test_a_mistake_is_named_with_its_key(load: Load, text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load(text)
    assert message in str(error.value)


def test_all_mistakes_are_reported_at_once_with_their_sources(load: Load, tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text("lr: fast\nsteps: 1")
    with pytest.raises(UserError) as error:
        load("base: below.yaml\nname: 1", "greedy=2")
    assert str(error.value).splitlines() == [
        f"{tmp_path / 'below.yaml'}: lr: must be float, not 'fast'",
        f"{tmp_path / 'my.yaml'}: name: must be str, not 1; quote it to make it a string",
        "command line: greedy: must be bool, not 2",
    ]


def test_components_are_built_nested_first(load: Load) -> None:
    leaf = "{_component_: ME.Leaf, width: 2, rate: 1}"
    config = load(f"steps: 1\npart: {{_component_: ME.Branch, leaf: {leaf}, leaves: [{leaf}, {leaf}]}}")
    assert config.part is not None and config.part.key == "part"
    assert config.part.build() == Branch(Leaf(2, 1.0), [Leaf(2, 1.0), Leaf(2, 1.0)])


def test_a_function_with_free_keywords_takes_components_too(load: Load) -> None:
    config = load("steps: 1\nparts: [{_component_: ME.free, a: {b: [{_component_: ME.Leaf, width: 1}]}}]")
    assert config.parts[0].build() == {"a": {"b": [Leaf(1)]}}


def test_an_optimizer_takes_the_parameters_first(load: Load) -> None:
    config = load("steps: 1\noptimizer: {_component_: torch.optim.AdamW, lr: 1, betas: [0, 0.5]}")
    weight = torch.nn.Parameter(torch.zeros(2))
    assert config.optimizer is not None
    optimizer = config.optimizer.build([weight])
    assert optimizer.param_groups[0]["betas"] == (0.0, 0.5) and optimizer.param_groups[0]["params"] == [weight]


def test_a_torchtune_component_gets_the_shim(load: Load, tmp_path: Path) -> None:
    path = "torchtune.training.metric_logging.StdoutLogger"
    part = load(f"steps: 1\npart: {{_component_: {path}}}").part
    assert part is not None and type(part.build()).__name__ == "StdoutLogger"


def test_a_missing_dependency_of_a_component_is_named(load: Load, toy: Path) -> None:
    (toy / "toy_broken.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(UserError, match="cannot import toy_broken: No module named 'not_installed_anywhere'"):
        load("steps: 1\npart: {_component_: toy_broken.Part}")


def test_overrides(load: Load) -> None:
    text = "steps: 1\nlimit: 2\nname: x\nparts: [{_component_: ME.Leaf, width: 1}, {_component_: ME.Leaf, width: 2}]"
    config = load(
        text, "steps=3", "steps=4", "inner.sizes=[1,2]", "name=a=b", "limit=None", "parts.1.width=5", "lr=1e-3"
    )
    assert (config.steps, config.inner.sizes, config.name, config.limit, config.lr) == (4, [1, 2], "a=b", None, 1e-3)
    assert [part.kwargs["width"] for part in config.parts] == [1, 5]
    assert load(text, "~limit", "~name").limit is None


def test_items_of_lists_are_removed_by_the_index_they_have_in_the_file(load: Load) -> None:
    text = (
        "steps: 1\ninner: {sizes: [1, 2, 3]}\nparts: [{_component_: ME.free, x: a}, {_component_: ME.Leaf, width: 1}]"
    )
    assert load(text, "~inner.sizes.2").inner.sizes == [1, 2]
    assert load(text, "~inner.sizes.0", "~inner.sizes.1").inner.sizes == [3]
    assert load(text, "~parts.1.width", "parts.1.width=4").parts[1].build() == Leaf(4)
    (part,) = load(text, "~parts.0", "parts.1.width=5").parts
    assert part.build() == Leaf(5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "'steps' is not key=value or ~key"),
        ("=1", "'=1' is not key=value"),
        ("a..b=1", "'a..b=1' is not key=value"),
        ("~stops", "~stops: there is no such key to remove, did you mean 'steps'?"),
        ("~steps.x", "~steps.x: there is no such key to remove"),
        ("~inner.sizes.1", "~inner.sizes.1: there is no such key to remove; the list has 1 items, from 0"),
        ("~inner.sizes.-1", "~inner.sizes.-1: there is no such key to remove; the list has 1 items, from 0"),
        ("name=[", "command line: name: '[' is not readable as YAML"),
        ("inner.sizes.7=1", "index 7 is beyond the list's 1 items"),
        ("stepz=1", "command line: stepz: unknown key, did you mean 'steps'?"),
        ("part=ME.Leef", "command line: part._component_: "),
    ],
)
def test_bad_overrides(load: Load, override: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load("steps: 1\ninner: {sizes: [1]}", override)
    assert message in str(error.value)


@pytest.mark.parametrize("overrides", [["part=ME.free", "part.x=1"], ["part.x=1", "part._component_=ME.free"]])
def test_another_component_replaces_the_node(load: Load, overrides: list[str]) -> None:
    part = load("steps: 1\npart: {_component_: ME.Leaf, width: 1}", *overrides).part
    assert part == Component(f"{ME}.free", {"x": 1}, "part")


def test_the_same_component_keeps_its_arguments(load: Load) -> None:
    part = load("steps: 1\npart: {_component_: ME.Leaf, width: 1}", "part=ME.Leaf", "part.rate=2").part
    assert part is not None and part.build() == Leaf(1, 2.0)


def test_base_is_loaded_first_and_relative_to_the_file(load: Load, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "middle.yaml").write_text("base: ../low.yaml\nname: ${lr}-${steps}\ninner: {sizes: [9]}")
    (tmp_path / "low.yaml").write_text("lr: 2\nsteps: 7\ninner: {sizes: [1, 2], table: {a: 1}}")
    config = load("base: sub/middle.yaml\nlr: 3")
    assert (config.steps, config.lr, config.name) == (7, 3.0, "3-7")
    assert config.inner == Inner(sizes=[9], table={"a": 1.0})


def test_bases_in_a_circle_and_missing_ones(load: Load, tmp_path: Path) -> None:
    (tmp_path / "low.yaml").write_text("base: my.yaml")
    with pytest.raises(UserError, match="in a circle"):
        load("base: low.yaml\nsteps: 1")
    with pytest.raises(UserError, match=r"my.yaml: base: no config named 'tinny'.*did you mean 'tiny'"):
        load("base: tinny")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00\x01", b"\x00\x01", b"a: \xe9"])
def test_a_binary_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"x.yaml: not readable as YAML"):
        load_config(Schema, str(path))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none.yaml"), str(tmp_path)):
        with pytest.raises(UserError, match="no config named"):
            load_config(Schema, name)


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x85\u2028\u2029"), max_size=12).filter(
    lambda text: text != "???"
)
NUMBER = st.floats(allow_nan=False)


@given(name=TEXT, lr=NUMBER, limit=st.none() | NUMBER, table=st.dictionaries(TEXT, NUMBER, max_size=2), free=TEXT)
@example(name="1e-6", lr=float("inf"), limit=1e-300, table={"no": 1.0, "": 2.0}, free="null")
@example(name="\\${x}", lr=1.0, limit=None, table={}, free="${lr}")
def test_the_effective_config_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, name: str, lr: float, limit: float | None, table: dict, free: str
) -> None:
    config = Schema(
        steps=1,
        name=name,
        lr=lr,
        limit=limit,
        inner=Inner(table=table),
        part=Component(f"{ME}.free", {"x": free}, "part"),
    )
    path = tmp_path_factory.mktemp("yaml") / "effective.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(Schema, str(path)) == config
