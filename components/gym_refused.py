"""The families of reasoning-gym 0.1.25 that are not offered, and why."""

from __future__ import annotations

_REASONS = {
    "its scorer hands the answer to sympy, which evaluates it as Python": (
        "intermediate_integration polynomial_multiplication simple_integration"
    ),
    "its entries depend on the order of hashing, so that processes would not train on the same": (
        "codeio isomorphic_strings knight_swap ransom_note"
    ),
    "making an entry seeds numpy's global generator, which is the run's": "pool_matrix",
    "its entries are drawn up in advance, as many as its size: there is no endless stream": (
        "acre gsm_symbolic list_functions word_ladder"
    ),
    "its entries have no right answer, so that its scorer cannot be checked": "boxnet propositional_logic rush_hour",
    "its gold answer is rounded or measured by distance, so that a wrong one near it counts": (
        "advanced_geometry coin_flip complex_arithmetic decimal_arithmetic number_format polynomial_equations "
        "power_function"
    ),
    "several answers are right, and its scorer knows one": "sentence_reordering tsumego",
    "a right answer has many spellings, and its scorer reads too few or too many of them": (
        "emoji_mystery fraction_simplification group_anagrams palindrome_partitioning prime_factorization "
        "time_intervals"
    ),
    "it has not been vetted": "arc_agi futoshiki rearc rubiks_cube survo",
    "it is a mixture; give several families with weights": "composite",
}
REFUSED: dict[str, str] = {name: reason for reason, names in _REASONS.items() for name in names.split()}
