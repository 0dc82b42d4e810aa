"""Whether two answers say the same, by math-verify; runs in worker processes (sparrow/worker_pool.py), never in a run.

math-verify is told the answer, not the response: its own search would take any formula out of a box that hedges. Around
it are what it lacks: the rules of math_rules.py, the relative size of an error, and the imaginary unit.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from math_verify import verify
from math_verify.grader import get_pct_val, should_treat_as_complex
from sympy.core.relational import Relational
from sympy.logic.boolalg import And

from sparrow.components.math_answer import tidy, too_much
from sparrow.components.math_lists import Listing, listing, signed
from sparrow.components.math_rules import plain_integer, quick_verdict
from sparrow.components.math_words import base_digits, choice, clock, split_unit, strip_words, word_key

logging.disable(logging.CRITICAL)  # math-verify warns that its own time-outs are off

# Units are stripped here, by words and not by letters: math-verify takes the h of "3h" for hours.
_NORMALIZE = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
# What six decimals of a number around 1 give; relative, so that 1e-9 is not 0.
RELATIVE_ERROR = 2e-6
# Of what stands behind an \approx.
ROUNDING_ERROR = 1e-2


def judge(item: list[Any]) -> Any:
    """`["verdict", answer, golds]` -> bool; `["problem", gold]` -> str or None; `["canonical", answer]` -> str."""
    what, *arguments = item
    if what == "verdict":
        answer, golds = arguments
        return any(equivalent(gold, answer) for gold in golds)
    return problem(*arguments) if what == "problem" else canonical(*arguments)


def equivalent(gold: str, answer: str) -> bool:
    """Raises what sympy raises where neither side is to blame."""
    if too_much(answer):
        return False
    verdict = quick_verdict(answer, gold)
    return by_mathematics(split_unit(tidy(answer))[0], split_unit(tidy(gold))[0]) if verdict is None else verdict


def by_mathematics(answer: str, gold: str) -> bool:
    """Of tidied values without units."""
    try:
        return _same(answer, gold)
    except MemoryError:
        raise
    except Exception:
        # The answer's doing, unless the gold one fails by itself: no text may buy that it is not scored.
        if answer == gold:
            raise
        by_mathematics(gold, gold)
        return False


def _same(answer: str, gold: str) -> bool:
    ours, theirs = listing(answer), listing(gold)
    kinds = {ours.kind, theirs.kind}
    if kinds == {"set", "ordered"}:
        return False
    if "ordered" in kinds and "one" not in kinds:
        brackets = {ours.brackets, theirs.brackets}
        fits = len(brackets) == 1 or ("list" in kinds and brackets & {"()", "[]"})
        return bool(fits) and len(ours.parts) == len(theirs.parts) and all(map(_same, ours.parts, theirs.parts))
    if not _verified(answer, gold):
        return False
    return "list" not in kinds or "set" in kinds or _as_often(ours, theirs)


def _verified(answer: str, gold: str) -> bool:
    if not (_stands_for_one(answer) and _stands_for_one(gold)):
        return False
    ours, theirs = parse(answer), parse(gold)
    if ours is None or theirs is None:
        return answer.replace(" ", "") == gold.replace(" ", "")
    ours, theirs = _solved(ours, theirs, answer), _solved(theirs, ours, gold)
    same = verify(theirs, ours, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True)
    return bool(same) and _close(ours, theirs)


def _stands_for_one(tidied: str) -> bool:
    """Not so where a number is said to be about another one, and is not."""
    if r"\approx" not in tidied:
        return True
    sides = [parse(side) for side in re.split(r"\\approx|=", tidied)]
    first, *others = [complex(side.doit().evalf()) for side in sides if getattr(side, "is_number", False)] or [0j]
    return all(abs(first - other) <= ROUNDING_ERROR * max(abs(first), abs(other)) for other in others)


def _solved(found: Any, other: Any, tidied: str) -> Any:
    """Inequalities joined by "or" as a set of numbers, where there is one to compare with."""
    if not (isinstance(found, sympy.FiniteSet) and isinstance(other, sympy.Union | sympy.Interval)):
        return found
    joined = len(listing(tidied).parts) > 1 and not re.search(r"[,;]|\band\b", tidied)
    solvable = all(isinstance(each, Relational | And) for each in found.args) and len(found.free_symbols) == 1
    return sympy.Union(*(each.as_set() for each in found.args)) if joined and solvable else found


def _as_often(ours: Listing, theirs: Listing) -> bool:
    """Sets forget how often a part is listed."""
    here, there = signed(ours.parts), signed(theirs.parts)
    if here is None or there is None or any(len(side) == 1 and _is_set(*side) for side in (here, there)):
        return True
    return len(here) == len(there) and all(
        sum(_verified(part, other) for other in here) == sum(_verified(part, other) for other in there)
        for part in (here if len(set(here)) < len(here) or len(set(there)) < len(there) else ())
    )


def _is_set(tidied: str) -> bool:
    return isinstance(parse(tidied), sympy.Set)


def _close(ours: Any, theirs: Any) -> bool:
    """Numbers that are equal after math-verify's rounding to six decimals must be so relative to their size, too."""
    if not (getattr(ours, "is_number", False) and getattr(theirs, "is_number", False)):
        return True
    if not (ours.has(sympy.Float) or theirs.has(sympy.Float)):
        return True
    if get_pct_val(ours) is not None or get_pct_val(theirs) is not None:
        return True
    a, b = (complex(x.doit().evalf()) for x in (ours, theirs))
    return abs(a - b) <= RELATIVE_ERROR * max(abs(a), abs(b))


@lru_cache(maxsize=256)
def parse(tidied: str) -> Any:
    """sympy's expression, or None."""
    latex = normalize_latex(strip_words(tidied), _NORMALIZE)
    parts = re.split(r"(?<![\\<>!:])=", latex)
    # x = 1/2 = 0.5 is an answer, if no other one is listed beside it.
    chain = len(parts) > 2 and "," not in latex and ";" not in latex
    for attempt in (latex, parts[-1]) if chain else (latex,):
        try:
            found = latex2sympy(attempt, is_real=not should_treat_as_complex(attempt), convert_degrees=False)
        except Exception:  # the parser raises anything on junk
            continue
        if r"\in " in latex and isinstance(found, sympy.Eq) and not isinstance(found.rhs, sympy.Set | sympy.Tuple):
            return None  # of a number nothing is a member
        return _with_imaginary_unit(found)
    return None


def _with_imaginary_unit(found: Any) -> Any:
    """An i that is the only letter is the imaginary unit."""
    symbols: set[Any] = getattr(found, "free_symbols", set())
    if {symbol.name for symbol in symbols} == {"i"}:
        try:
            return found.subs(dict.fromkeys(symbols, sympy.I))
        except (TypeError, ValueError):  # "i < 5": there it is a number like any other
            return found
    return found


def problem(gold: str) -> str | None:
    """Why a gold answer cannot be used, if it cannot."""
    tidied = tidy(gold)
    if not tidied:
        return "is empty"
    if too_much(gold):
        return "is longer or deeper than an answer may be"
    in_words = word_key(tidied) is not None or choice(tidied, strict=True) is not None or clock(tidied) is not None
    if not in_words and plain_integer(tidied) is None and parse(split_unit(tidied)[0]) is None:
        return "cannot be parsed"
    return None if in_words or _equals_itself(tidied) else "does not equal itself"


def _equals_itself(tidied: str) -> bool:
    """For mathematics, too."""
    value = split_unit(tidied)[0]
    return base_digits(tidied) is not None or by_mathematics(value, value)


def canonical(answer: str) -> str:
    """The same text for answers that are the same, as far as evaluation shows; for votes."""
    tidied = tidy(answer)
    if (words := word_key(tidied)) is not None:
        return words
    value = split_unit(tidied)[0]
    if (integer := plain_integer(value)) is not None:
        return integer
    found = None if too_much(answer) else parse(value)
    return value.replace(" ", "") if found is None else _canonical(found)


def _canonical(found: Any) -> str:
    if isinstance(found, sympy.Eq) and isinstance(found.lhs, sympy.Symbol):
        found = found.rhs
    found = found.doit()
    if getattr(found, "is_number", False):
        number = sympy.nsimplify(found, rational=True) if found.has(sympy.Float) else found
        return str(number) if number.is_Rational else str(number.evalf(6))
    return str(sympy.simplify(found)) if isinstance(found, sympy.Expr) else str(found)
