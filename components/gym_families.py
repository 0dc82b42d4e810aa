"""The families of reasoning-gym that are offered, and how an answer of each is judged without trusting what it says.

reasoning-gym's own scorers execute, parse or half-credit what they are given (docs/tasks.md says which). So most
answers are compared here, with the gold answer and by spelling; expressions are evaluated here; and only where many
answers are right, and the scorer was read and does nothing but follow them, it is asked, in the sandbox, about an
answer that a grammar let through.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

MAX_CHARS = 4000  # the longest gold answer, a grid of 30 x 30, has half of it
_MAX_EXPRESSION = 200
_NUMBER = re.compile(r"([+-]?)((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?)(?:/([0-9]+))?")
_HEXADECIMAL = re.compile(r"([+-]?)(?:0[xX]([0-9a-fA-F]+)|([0-9]+))")
_MAX_DIGITS = 100
Form = Callable[[str], str | None]


@dataclass(frozen=True)
class Family:
    """How answers are judged.

    Attributes:
        form: gives an answer in the spelling that equal answers share; None for what can be no answer of the family.
        check: "equal": to the gold answer; "one_of": to one of the entry's `valid_answers`; "expression": has the
            entry's `target` (24 where it has none) as its value, made of each of its `numbers` once; "scorer":
            reasoning-gym's, in the sandbox.
        metadata: the part of an entry's that the check needs.
        grammar: what the scorer may see at all, of the answer in its form.
        gold: takes a right answer from the metadata where the entry has none.
    """

    form: Form
    check: Literal["equal", "one_of", "expression", "scorer"]
    metadata: tuple[str, ...] = ()
    grammar: re.Pattern[str] | None = None
    gold: Callable[[Mapping[str, Any]], str] | None = None


def text(answer: str) -> str | None:
    return " ".join(answer.split()) or None


def word(answer: str) -> str | None:
    return " ".join(answer.casefold().split()).removesuffix(".") or None


def number(answer: str) -> str | None:
    """A decimal number or fraction, thousands grouped or not, exactly."""
    match = _NUMBER.fullmatch(answer.strip())
    if match is None or len(answer) > _MAX_DIGITS:
        return None
    sign, digits, denominator = match.groups(default="1")
    if not int(denominator):
        return None
    return str(Fraction(f"{'-' if sign == '-' else ''}{digits.replace(',', '')}") / int(denominator))


def hexadecimal(answer: str) -> str | None:
    match = _HEXADECIMAL.fullmatch(answer.strip())
    if match is None or len(answer) > _MAX_DIGITS:
        return None
    value = int(match[2], 16) if match[2] else int(match[3])
    return str(-value if match[1] == "-" else value)


def rows(answer: str) -> str | None:
    """Words in lines; empty lines, and how many spaces there are, mean nothing."""
    return "\n".join(" ".join(line.split()) for line in answer.splitlines() if line.strip()) or None


def items(answer: str) -> str | None:
    """Separated by commas."""
    return ", ".join(" ".join(item.split()) for item in answer.split(",")).strip() or None


def compact(answer: str) -> str | None:
    """Lists in brackets, with or without spaces and quotes."""
    return re.sub(r"[\s'\"]", "", answer) or None


def letters(answer: str) -> str | None:
    return answer.strip().lower() or None


def _scorer(form: Form, grammar: str, metadata: str, gold: Callable[[Mapping[str, Any]], str] | None = None) -> Family:
    return Family(form, "scorer", tuple(metadata.split()), re.compile(grammar, re.ASCII), gold)


# Each repetition in a grammar begins with something that the one before cannot end with: no backtracking.
_STATEMENT = r"[A-Za-z]+ is an? [a-z]+"
_JUG_MOVE = r'"(?:fill [A-Z]|empty [A-Z]|pour [A-Z]->[A-Z])"'
_COLOR = r'"[0-9]{1,3}" ?: ?[0-9]{1,3}'
_HANOI_MOVE = r"Move disk [0-9]{1,2} from Peg [0-9]{1,2} to Peg [0-9]{1,2}"
_EQUAL: dict[Form, str] = {
    number: (
        "aiw basic_arithmetic binary_alternation chain_sum count_bits count_primes decimal_chain_sum dice "
        "gcd largest_island lcm leg_counting letter_counting maze number_sequence products rectangle_count "
        "rotten_oranges self_reference simple_equations simple_geometry"
    ),
    hexadecimal: "bitwise_arithmetic",
    word: (
        "base_conversion bf calendar_arithmetic circuit_logic color_cube_rotation course_schedule family_relationships "
        "figlet_font game_of_life_halting mahjong_puzzle needle_haystack spell_backward syllogism zebra_puzzles"
    ),
    text: "ab caesar_cipher letter_jumble path_star string_insertion string_manipulation",
    rows: (
        "arc_1d binary_matrix manipulate_matrix mini_sudoku modulo_grid rotate_matrix spiral_matrix string_splitting "
        "string_synthesis sudoku"
    ),
    items: "word_sequence_reversal word_sorting",
    compact: "game_of_life number_filtering number_sorting",
}
FAMILIES: dict[str, Family] = {
    **{name: Family(form, "equal") for form, names in _EQUAL.items() for name in names.split()},
    "n_queens": Family(rows, "one_of", ("valid_answers",)),
    "countdown": Family(text, "expression", ("numbers", "target")),
    "puzzle24": Family(text, "expression", ("numbers",)),
    "cryptarithm": _scorer(text, "[A-Z]=[0-9](?: ?, ?[A-Z]=[0-9])*", "words_letters result_letters allow_leading_zero"),
    "graph_color": _scorer(
        text, rf"\{{ ?{_COLOR}(?: ?, ?{_COLOR})* ?\}}", "puzzle", lambda data: json.dumps(data["possible_answer"])
    ),
    "jugs": _scorer(text, rf"\[ ?{_JUG_MOVE}(?: ?, ?{_JUG_MOVE})* ?\]", "puzzle"),
    "kakurasu": _scorer(rows, r"[01](?:[ \n][01])*", "row_sums col_sums n_rows n_cols"),
    "knights_knaves": _scorer(text, rf"{_STATEMENT}(?:(?:, and |, | and ){_STATEMENT})*\.?", ""),
    "palindrome_generation": _scorer(letters, "[a-z]{1,200}", "letters"),
    "quantum_lock": _scorer(
        text, "[A-C](?: ?(?:→|->) ?[A-C]){0,60}", "initial_value initial_state buttons target_value"
    ),
    "shortest_path": _scorer(text, "infeasible|(?:up|down|left|right)(?: (?:up|down|left|right))*", "matrix"),
    "sokoban": _scorer(text, "[UDLR]{1,1000}", "gamestr"),
    "tower_of_hanoi": _scorer(
        rows, rf"{_HANOI_MOVE}(?:\n{_HANOI_MOVE})*", "num_disks num_pegs start_peg target_peg solution_length"
    ),
}


def canonical(family: Family, answer: str) -> str | None:
    """The answer in its family's form; None where it can be none."""
    if len(answer) > MAX_CHARS:
        return None
    formed = family.form(answer)
    if formed is None or (family.grammar and not family.grammar.fullmatch(formed)):
        return None
    return formed


def judged_here(family: Family, formed: str, gold: str, metadata: Mapping[str, Any]) -> bool | None:
    """Whether an answer in its form is right; None where the scorer has to say it."""
    if family.check == "scorer":
        return None
    if family.check == "expression":
        return _has_value(formed, metadata["numbers"], metadata.get("target", 24))
    accepted = metadata["valid_answers"] if family.check == "one_of" else [gold]
    return formed in {canonical(family, answer) for answer in accepted}


def _has_value(expression: str, numbers: list[int], target: int) -> bool:
    """Sums, products, differences and quotients of exactly these numbers that make the target."""
    if len(expression) > _MAX_EXPRESSION or not re.fullmatch(r"[0-9+\-*/() ]+", expression):
        return False
    try:
        used: list[int] = []
        value = _value(ast.parse(expression, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    return sorted(used) == sorted(numbers) and value == target


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def _value(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError("neither a number nor one of + - * /")
