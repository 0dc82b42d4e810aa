"""The mode `math` of bench_rewards.py: ordinary and pathological answers for the mathematics reward."""

from __future__ import annotations

import os
import random
import time
from typing import Any

from sparrow.components.math_reward import MathReward

SAMPLES = 8
# Gold answers by kind, with how often each kind is drawn: 60 % integers, 20 % other plain numbers, 20 % expressions.
_KINDS = {"integer": 60, "number": 20, "expression": 20}
_EXPRESSIONS = [
    r"{a}\sqrt{{{b}}}", r"\frac{{{a}\pi}}{{{b}}}", "({a}, {b})", "{a}, {b}", "[{a}, {c}]", "x^2 + {a}x - {b}",
    r"\frac{{{a}\sqrt{{{b}}}}}{{{c}}}", "{a} + {b}i", r"x = {a} - \sqrt{{{b}}}", r"\text{{odd}}",
    r"{a}\text{{ cm}}^2", r"\log_{{{a}}} {b}",
]  # fmt: skip


def ordinary(count: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Responses and gold answers; of the 8 samples of a prompt about half are right, in one of several spellings, and
    the wrong ones are spread over a few values, as those of a model are."""
    draw = random.Random(seed)
    completions, golds = [], []
    while len(completions) < count:
        gold = _gold(draw)
        wrong = [_gold(draw, like=gold) for _ in range(3)]
        for _ in range(SAMPLES):
            answer = _respell(gold[1], draw) if draw.random() < 0.5 else draw.choice(wrong)[1]
            completions.append("Let us see.\n" * 200 + rf"Therefore the answer is \boxed{{{answer}}}.")
            golds.append(gold[1])
    return completions[:count], golds[:count]


def _gold(draw: random.Random, like: tuple[str, str] | None = None) -> tuple[str, str]:
    """A kind and an answer; `like` another one in shape."""
    a, b, c = draw.randint(2, 9), draw.choice([2, 3, 5, 7, 11]), draw.randint(10, 99)
    shape = like[0] if like else draw.choices(list(_KINDS), list(_KINDS.values()))[0]
    if shape == "integer":
        return shape, str(draw.randint(-20, 2000))
    if shape == "number":
        number = draw.choice([rf"\frac{{{a}}}{{{c}}}", f"{c}.{a}", rf"{c}\%", f"{a},{c}0", rf"-\frac{{{b}}}{{{c}}}"])
        return shape, number
    template = draw.choice(_EXPRESSIONS) if shape == "expression" else shape
    return template, template.format(a=a, b=b, c=c)


def _respell(answer: str, draw: random.Random) -> str:
    return draw.choice([answer, answer, answer.replace(r"\frac", r"\dfrac"), f"{answer} ", answer.replace(", ", ",")])


def pathological(count: int) -> list[str]:
    """Responses that hang or swell what reads them, no two the same."""
    shapes = [
        "9^{{9^{{9^{{{n}}}}}}}", "9**9**9**{n}", "10^{{10^{{{n}0}}}}", "({n}!)!!", "{n}00000!",
        r"\sum_{{k=1}}^{{{n}99999999}} \sin(k)^k", r"\prod_{{k=1}}^{{99999999{n}}} (k+1)",
        r"\int_0^{{{n}}} e^{{\sin(x^x)}} dx", r"\binom{{{n}99999999}}{{49999999}}", "(x+1)^{{{n}999}}",
        r"\begin{{pmatrix}}1&2\\3&4\end{{pmatrix}}^{{{n}99999}}", "(x+y+z+1)^{{4{n}}} - (z+y+x+2)^{{4{n}}}",
    ]  # fmt: skip
    answers = [rf"\boxed{{{shapes[n % len(shapes)].format(n=n + 2)}}}" for n in range(count)]
    # Some that hang a reader rather than a calculator.
    nested = "(" * 30_000 + ")" * 30_000
    long = ["{" * 100_000, r"\boxed{" * 15_000, r"\(" * 50_000, rf"\boxed{{{nested}}}", "1," * 50_000]
    answers[:: len(shapes)] = [f"{n} {long[n % len(long)]}" for n in range(len(answers[:: len(shapes)]))]
    return answers


def measure_math(workers: int, answers: int, hostile: int) -> dict[str, Any]:
    """Seconds of one call each, without the start of the processes."""
    reward = MathReward(workers=workers)
    began = time.perf_counter()
    reward([r"\boxed{\sqrt{8}}"], answer=[r"\sqrt{9}"])
    result: dict[str, Any] = {"workers": workers, "cores": os.cpu_count(), "start_s": time.perf_counter() - began}
    for name, (completions, golds) in {
        "ordinary": ordinary(answers),
        "pathological": (pathological(hostile), [r"2\sqrt{3}"] * hostile),
    }.items():
        began = time.perf_counter()
        reward(completions, answer=golds)
        seconds = time.perf_counter() - began
        result[name] = {"answers": len(completions), "seconds": seconds, "per_s": len(completions) / seconds}
        result[name] |= reward.counts
    result["load"] = os.getloadavg()[0]
    reward.close()
    return result


def show_math(result: dict[str, Any]) -> str:
    """A line a set."""
    machine = f"{result['workers']} workers, {result['cores']} cores, load {result['load']:.1f}"
    lines = [f"{machine}; start {result['start_s']:.1f} s"]
    for name in ("ordinary", "pathological"):
        part = result[name]
        counts = ", ".join(f"{part[key]} {key}" for key in ("correct", "wrong", "no_answer", "timeout", "error"))
        lines.append(f"{part['answers']} {name}: {part['seconds']:.1f} s, {part['per_s']:.0f} answers/s ({counts})")
    return "\n".join(lines)
