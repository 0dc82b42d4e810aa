"""Procedural tasks and their reward, with a package of the test's own in the place of reasoning-gym."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparrow.components.data import Example, FiniteData
from sparrow.components.gym_families import FAMILIES, canonical, judged_here
from sparrow.components.reasoning_gym import ReasoningGymPrompts, ReasoningGymSet
from sparrow.components.reasoning_gym_reward import COUNTS, VETTED, ReasoningGymReward, find_gym_answer
from sparrow.components.reward import ChecksGold, Closes, CountsOutcomes, GivesAnswers
from sparrow.errors import UserError

from .gym_attacks import WRONG, injections

# Its scorer does what the answer says, as one would that an answer took over.
PACKAGE = '''
import os, random, socket

class Dataset:
    def __init__(self, name, seed, limit):
        self.name, self.seed, self.limit = name, seed, limit

    def __getitem__(self, index):
        value = random.Random(self.seed + index).randrange(self.limit)
        if self.name == "gcd":
            # Every third has a gold answer that is no number.
            answer = "none" if index % 3 == 0 else str(value)
            return {"question": f"value {index}?", "answer": answer, "metadata": {}}
        return {"question": f"good {value}?\\n", "answer": "good", "metadata": {"letters": list("good")}}

    def score_answer(self, answer, entry):
        assert entry["metadata"]["letters"] == list("good")
        return ACTIONS.get(answer, lambda: 0.0)()

def create_dataset(name, seed, size, limit=1000):
    assert limit > 0, "limit must be above 0"
    return Dataset(name, seed, limit)

def hang():
    while True:
        pass

def escape():
    """1.0 if anything of the host is in reach."""
    for path in ("MARK", "/etc/passwd"):
        if os.path.exists(path):
            return 1.0
    for action in (lambda: open("MARK-made", "w"), lambda: open(__file__, "a"), lambda: socket.socket(socket.AF_INET)):
        try:
            action()
        except OSError:
            continue
        return 1.0
    return 0.0

def crowd():
    while True:
        os.fork()

ACTIONS = {
    "good": lambda: 1.0, "one": lambda: 1, "half": lambda: 0.5, "hang": hang, "escape": escape, "crowd": crowd,
    "memory": lambda: len(bytearray(10**10)), "raise": lambda: 1 / 0, "nan": lambda: float("nan"),
    "inf": lambda: float("inf"), "two": lambda: 2.0, "minus": lambda: -1.0, "true": lambda: True, "text": lambda: "1.0",
    "list": lambda: [1.0], "null": lambda: None, "object": lambda: object(), "leave": lambda: os._exit(0),
    "die": lambda: os.kill(os.getpid(), 9), "print": lambda: print('{"value": 1.0}') or 0.0,
    "long": lambda: print("1.0" * 10**8) or 1.0,
}
'''


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that it is installed in; a file `mark` beside it is what must not be seen."""
    folder = tmp_path_factory.mktemp("gym")
    site = folder / "site"
    (site / "reasoning_gym").mkdir(parents=True)
    (folder / "mark").touch()
    (site / "reasoning_gym" / "__init__.py").write_text(PACKAGE.replace("MARK", str(folder / "mark")))
    metadata = site / f"reasoning_gym-{VETTED}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: reasoning-gym\nVersion: {VETTED}\n")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
            patch.delitem(sys.modules, name)
        patch.syspath_prepend(str(site))
        yield folder
        sys.modules.pop("reasoning_gym", None)


@pytest.fixture(scope="module")
def reward(package: Path) -> Iterator[ReasoningGymReward]:
    opened = ReasoningGymReward(timeout=60, memory_mb=256, workers=2)
    yield opened
    opened.close()


def gym(family: str, answer: str, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"family": family, "answer": answer, "metadata": metadata or {}, "settings": {}}


PALINDROME = gym("palindrome_generation", "good", {"letters": list("good")})


def tagged(answer: str) -> str:
    return f"I think so.</think>\n<answer>{answer}</answer>"


def text_of(example: Example) -> str:
    assert isinstance(example.prompt, list)
    return example.prompt[-1]["content"]


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>7</answer>", "7"),
        ("<answer>6</answer> no, <answer>7</answer>", "7"),
        ("<answer>6</answer> no, <answer>7", None),
        ("<answer></answer>", None),
        (r"\boxed{6} <answer>7</answer> \boxed{8}", "7"),
        (r"so \boxed{6}, no, \boxed{{7}}", "{7}"),
        ("<answer>6</answer></think> 7", "7"),
        ("<think><answer>6</answer>", None),
        ("<answer>\n```json\n[1]\n```\n</answer>", "[1]"),
        ("1 2\n3 4\n", "1 2\n3 4"),
        ("", None),
    ],
)
def test_where_the_answer_stands(response: str, answer: str | None) -> None:
    assert find_gym_answer(response) == answer


def test_a_response_that_was_cut_has_no_answer_without_a_mark() -> None:
    assert find_gym_answer("7", truncated=True) is None
    assert find_gym_answer("<answer>7</answer> and so", truncated=True) == "7"


@pytest.mark.parametrize(
    ("family", "gold", "right", "wrong"),
    [
        ("gcd", "1234", ["1234", "+1,234", "1234.0", " 01234 "], ["1235", "12 34", "1234 apples", "1e3", "1,23,4"]),
        ("dice", "1121/1360", ["1121/1360", "2242/2720"], ["1121/1361", ".824", "1121/0"]),
        ("bitwise_arithmetic", "-0x1f", ["-0x1f", "-0X1F", "-31"], ["0x1f", "1f", "0x"]),
        ("syllogism", "Yes", ["yes", "Yes."], ["No", "Yes and no"]),
        ("caesar_cipher", "A B", ["A  B"], ["a b", "AB"]),
        ("sudoku", "1 2\n3 4", ["1 2 \n\n 3 4"], ["1 2 3 4", "12\n34", "1 2\n3 5"]),
        ("word_sorting", "a, b", ["a,b"], ["b, a", "a b"]),
        ("number_filtering", "['4.0', '-5']", ["['4.0','-5']", '["4.0", "-5"]', "[4.0, -5]"], ["[4, -5]", "4.0,-5"]),
    ],
)
def test_answers_compared_by_spelling(family: str, gold: str, right: list[str], wrong: list[str]) -> None:
    answers = [*right, *wrong]
    reward = ReasoningGymReward()
    given = reward([tagged(answer) for answer in answers], gym=[gym(family, gold)] * len(answers))
    assert given == [1.0] * len(right) + [0.0] * len(wrong)
    assert reward.counts == dict.fromkeys(COUNTS, 0) | {"correct": len(right), "wrong": len(wrong)}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("4*(9/1 - 3)", True),
        ("-(3 - 9/1)*4", True),
        ("4*(9 - 3)", False),  # without the 1
        ("4*(9/1 - 3)*1", False),  # with it twice
        ("24", False),
        ("4*(9//1 - 3)", False),
        ("(9 - 3)**1*4", False),
        ("(9 - 3)*4/(1 - 1)", False),
        ("4(9/1 - 3)", False),
        ("4*(9/1 - 3) #", False),
        ("9**9**9**9", False),
        ("4*(9/1 - 3", False),
        ("(" * 90 + "4*(9/1 - 3)" + ")" * 90, True),
        ("(" * 100 + "4*(9/1 - 3)" + ")" * 100, False),  # too long,
        ("4*(9/1.0 - 3)", False),
        ("int(24)", False),
    ],
)
def test_expressions_are_evaluated_here(expression: str, value: bool) -> None:
    family, numbers = FAMILIES["puzzle24"], {"numbers": [9, 1, 3, 4]}
    assert bool(judged_here(family, canonical(family, expression) or "", "", numbers)) == value
    assert not judged_here(FAMILIES["countdown"], expression, "", {**numbers, "target": 25})


def test_one_of_several() -> None:
    boards = ["Q _\n_ _", "_ Q\n_ _"]
    rewards = ReasoningGymReward()(
        [tagged(a) for a in [*boards, "Q Q"]], gym=[gym("n_queens", boards[0], {"valid_answers": boards})] * 3
    )
    assert rewards == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("name", FAMILIES)
def test_no_attack_gets_to_a_scorer(name: str, tmp_path: Path) -> None:
    """What does not begin in the parent with the family's grammar is wrong without one; the sandbox is not started."""
    family, mark = FAMILIES[name], tmp_path / "mark"
    metadata = {"numbers": [1, 2, 3, 4], "target": 24, "valid_answers": ["Q _\n_ Q"]}
    for attack in injections(mark):
        for answer in (attack, f"good {attack}", f"{attack} good", f"good\n{attack}", f"good;{attack}"):
            formed = canonical(family, answer)
            assert formed is None or judged_here(family, formed, "good", metadata) is False
    assert not mark.exists()


def test_grammars_do_not_backtrack() -> None:
    """Near misses as long as an answer may be; one that backtracks does not come back."""
    for name, wrong in WRONG.items():
        for answer in wrong:
            for joint in ("", " ", ", ", " and ", "\n"):
                assert len(joint.join([answer] * (3000 // len(answer + joint)))) <= 4000
                canonical(FAMILIES[name], joint.join([answer] * (3000 // len(answer + joint))) + "!")
        assert canonical(FAMILIES[name], "a" * 3999 + "!") is None


def test_outcomes_of_a_scorer(reward: ReasoningGymReward) -> None:
    answers = {
        "good": 1.0, "one": 1.0, "half": 0.0, "bad": 0.0, "escape": 0.0, "print": 0.0,
        "long": 0.0, "memory": 0.0, "die": 0.0,
        "raise": None, "nan": None, "inf": None, "two": None, "minus": None, "true": None, "text": None, "list": None,
        "null": None, "object": None, "leave": None,
    }  # fmt: skip
    rewards = reward([*map(tagged, answers), "<think>"], gym=[PALINDROME] * (len(answers) + 1))
    assert dict(zip(answers, rewards, strict=False)) == answers
    assert reward.counts == {"correct": 2, "wrong": 4, "no_answer": 1, "timeout": 3, "error": 11}


def test_what_hangs_is_killed_and_the_next_is_scored(package: Path) -> None:
    reward = ReasoningGymReward(timeout=2, memory_mb=256, workers=1)
    assert reward([tagged("hang"), tagged("crowd")], gym=[PALINDROME] * 2)[0] == 0.0
    assert reward.counts["timeout"] >= 1
    reward.close()
    # What takes two seconds on a busy machine is no part of the test.
    slow = ReasoningGymReward(timeout=60, memory_mb=256, workers=1)
    assert slow([tagged("good")], gym=[PALINDROME]) == [1.0]
    slow.close()


def test_credit_in_part_is_asked_for(package: Path) -> None:
    reward = ReasoningGymReward(partial=True, timeout=60)
    assert reward([tagged("half"), tagged("good"), tagged("nan")], gym=[PALINDROME] * 3) == [0.5, 1.0, None]
    assert reward.counts == {"correct": 1, "wrong": 1, "no_answer": 0, "timeout": 0, "error": 1}
    reward.close()


def test_the_protocols_of_a_reward(reward: ReasoningGymReward) -> None:
    assert isinstance(reward, CountsOutcomes) and isinstance(reward, ChecksGold)
    assert isinstance(reward, GivesAnswers) and isinstance(reward, Closes)
    broken = [
        gym("gcd", "four"),
        gym("palindrome_generation", "bad", PALINDROME["metadata"]),
        gym("puzzle24", "1", {"numbers": [2]}),
    ]
    problems = reward.problems({"gym": [PALINDROME, gym("gcd", "4"), None, *broken]})
    assert problems[:3] == [None] * 3 and all(problems[3:])
    columns = [gym("gcd", "4"), gym("gcd", "4"), PALINDROME, None]
    texts = [tagged("4.0"), tagged("four"), tagged("GOOD"), tagged("4")]
    assert reward.answers(texts, gym=columns) == ["4", None, "good", None]
    assert reward([tagged("4")], gym=[None]) == [None] and not any(reward.counts.values())


@pytest.mark.parametrize(
    "column",
    [3, "gcd", {}, {"family": "gcd"}, {"family": [], "x": 1, "y": 2}, gym("nothing", "1"), gym("countdown", "1")],
)
def test_a_column_of_another_kind(column: Any) -> None:
    with pytest.raises(UserError, match="index 0 is not of ReasoningGymPrompts"):
        ReasoningGymReward()([tagged("1")], gym=[column])
    with pytest.raises(UserError, match="no column 'gym'"):
        ReasoningGymReward()(["1"], answer=["1"])


@pytest.mark.parametrize("limit", [{"workers": 0}, {"timeout": 0.0}, {"memory_mb": 1}, {"weight": float("nan")}])
def test_limits_that_cannot_be(limit: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(limit)).replace("timeout", "seconds")):
        ReasoningGymReward(**limit)


def test_scorers_of_another_version_are_refused(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=f"version {VETTED} were vetted, not those of None"):
        ReasoningGymReward()([tagged("good")], gym=[PALINDROME])
    # Which does not concern what is compared here.
    assert ReasoningGymReward()([tagged("4")], gym=[gym("gcd", "4")]) == [1.0]


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "reasoning_gym").exists()])
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    for use in (
        lambda: ReasoningGymPrompts("gcd"),
        lambda: ReasoningGymReward()([tagged("good")], gym=[PALINDROME]),
    ):
        with pytest.raises(UserError, match=r"pip install 'sparrow-rl\[gym\]'"):
            use()


def test_prompts_depend_on_seed_and_index_only(package: Path) -> None:
    families = {"gcd": 3.0, "palindrome_generation": 1.0}
    first, again = (ReasoningGymPrompts(families, seed=1) for _ in range(2))
    forwards = [first.example(index) for index in range(200)]
    assert [again.example(index) for index in reversed(range(200))] == forwards[::-1]
    # Seeds that are next to each other have no entry in common: theirs are seed + index.
    other = [ReasoningGymPrompts(families, seed=seed).example(index) for seed in (0, 2) for index in range(200)]
    golds = [
        [e.columns["gym"]["answer"] for e in part if e.columns["gym"]["family"] == "gcd"] for part in (forwards, other)
    ]
    assert golds[0] != golds[1][: len(golds[0])]
    assert len({example.columns["id"] for example in [*forwards, *other]}) == 600
    share = sum(example.columns["source"] == "reasoning_gym/gcd" for example in forwards) / 200
    assert 0.6 < share < 0.9


def test_what_an_example_holds(package: Path) -> None:
    example = ReasoningGymPrompts("palindrome_generation", settings={"palindrome_generation": {"limit": 1}}).example(0)
    assert text_of(example) == "good 0?\n\nGive your final answer between <answer> and </answer>."
    assert json.loads(json.dumps(example.columns)) == example.columns
    assert example.columns["gym"] == PALINDROME | {"settings": {"limit": 1}}
    plain = ReasoningGymPrompts("gcd", instruction="", chat=False).example(0)
    assert isinstance(plain.prompt, str) and plain.prompt.endswith("?")


def test_entries_that_no_answer_of_which_is_right_are_left_out(package: Path) -> None:
    prompts = ReasoningGymPrompts("gcd")
    assert all(prompts.example(index).columns["answer"].isdecimal() for index in range(60))


def test_a_set_of_so_many(package: Path) -> None:
    data = ReasoningGymSet(20, "gcd", seed=4, shuffle_seed=1)
    assert isinstance(data, FiniteData) and data.size == 20
    assert list(data.examples()) == [ReasoningGymPrompts("gcd", seed=4).example(index) for index in range(20)]
    assert {data.example(index).columns["id"] for index in range(20)} == {e.columns["id"] for e in data.examples()}
    data.drop({0, 3})
    assert data.size == 18


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"families": "countdwn"}, "did you mean 'countdown'"),
        ({"families": "polynomial_multiplication"}, "is not offered: its scorer hands the answer to sympy"),
        ({"families": {}}, "weights above 0"),
        ({"families": {"gcd": 0.0}}, "weights above 0"),
        ({"families": "gcd", "settings": {"lcm": {}}}, "'lcm' is not one of the families"),
        ({"families": "gcd", "settings": {"gcd": {"limits": 3}}}, "settings.gcd: reasoning-gym refuses"),
        ({"families": "gcd", "settings": {"gcd": {"limit": 0}}}, "limit must be above 0"),
        ({"families": "gcd", "settings": {"gcd": {"seed": 3}}}, "seed is not a setting"),
    ],
)
def test_arguments_that_cannot_be(package: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ReasoningGymPrompts(**arguments)
