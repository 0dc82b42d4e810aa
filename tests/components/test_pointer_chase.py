from __future__ import annotations

import pytest

from sparrow.components.pointer_chase import END, SYMBOLS, PointerChase, pointer_progress, pointer_reward
from sparrow.errors import UserError


def test_the_response_follows_the_table():
    for index in range(50):
        example = PointerChase(nodes=12, hops=7, seed=3).example(index)
        table, question = example.prompt.split("?")
        entries = [table[i : i + 4] for i in range(0, len(table), 4)]
        target = {entry[1]: entry[2] for entry in entries}
        assert len(entries) == len(target) == 12 and list(target.values()).count(".") == 1
        node, total, text = question[0], 0, ""
        assert question == f"{node}0:"
        while target[node] != ".":
            value = SYMBOLS.index(target[node]) % 10
            text += f"({node}{target[node]}){total}+{value}={(total + value) % 10};"
            node, total = target[node], (total + value) % 10
        assert example.columns["answer"] == f"{node}{total}"
        assert example.columns["response"] == f"{text}({node}.)#{node}{total}{END}"
        assert text.count(";") == 7


def test_examples_depend_on_seed_and_index_alone():
    one, other = PointerChase(40, 30, seed=1), PointerChase(40, 30, seed=1)
    assert one.example(5) == other.example(5)
    assert one.example(5) != one.example(6) and one.example(5) != PointerChase(40, 30, seed=2).example(5)


def test_rewards_by_hand():
    texts = ["...#z3", "...#z4", "...#z3#z3", "...#z3;", "z3", "", "...#"]
    assert pointer_reward(texts, ["z3"] * 7) == [1, 0, 0, 0, 0, 0, 0]
    worked = "(ab)0#b1" + END
    assert pointer_progress(["(ab)0#b1", "(ab)1#b1", "", "x", "(ab)0#b1extra"], [worked] * 5) == [1, 0.5, 0, 0, 1]


@pytest.mark.parametrize(("nodes", "hops"), [(5, 5), (53, 3), (4, 0)])
def test_impossible_sizes(nodes, hops):
    with pytest.raises(UserError, match=f"hops {hops}, nodes {nodes}"):
        PointerChase(nodes, hops)
