"""What an optimiser may try on the scorers of reasoning-gym. Run by anything, the worst of them makes an empty file."""

from __future__ import annotations

from pathlib import Path

JUNK = [
    "", " ", "asdf", "0", "-1", "1.0", "1e400", "nan", "inf", "None", "null", "true", "True and False", "[]", "{}",
    "[[]]", '{"score": 1.0}', "[" * 2000, "x" * 10_000, "1" * 10_000, "é∑🙂\u202e\x00", "٣", "１２", "\ud800",
    "\n\n", "<answer>",
    "9**9**9**9", "10**10**10", "9" * 5000, "1/0", "0/0", "-" * 3000 + "1", "(" * 150 + "1" + ")" * 150, "Q" * 64,
    "is is is is", "a, b, c", "1,1,1", "_ _ _\n_ _ _", "->", "→", "A=1", "up", "infeasible?", "[fill A]",
]  # fmt: skip

# In the grammar of their family, and wrong for every example or next to it.
WRONG = {
    "cryptarithm": ["A=1", "A=1,B=2,C=3", "A=1,A=2", "Z=0,Y=0"],
    "graph_color": ['{"0": 1}', '{"0": 1, "1": 1, "2": 1}', '{"999": 0}', '{"0": 999}'],
    "jugs": ['["fill A"]', '["empty A"]', '["pour A->B"]', '["pour Z->A"]', '["fill A", "empty A"]', '["fill Q"]'],
    "kakurasu": ["0", "1 1 1 1", "0 0 0 0\n0 0 0 0\n0 0 0 0\n0 0 0 0", "0 0 0 0 0\n" * 5],
    "knights_knaves": ["X is a hero", "Zoey is a hero, and Zoey is a villain", "A is a b"],
    "palindrome_generation": ["a", "aa", "zzzz", "abcdef", "aaaaaaaaaaaaaaaaaaaaaaaaaaaa"],
    "quantum_lock": ["A", "B", "C → C → C → C → C → C → C → C → C → C → C → C → C → C"],
    "shortest_path": ["up up up up up up up up up up", "left right left right left right", "down " * 200 + "down"],
    "sokoban": ["U", "LLLLLLLLLLLLLLLLLLLL", "UDLR" * 100],
    "tower_of_hanoi": [
        "Move disk 1 from Peg 1 to Peg 2", "Move disk 9 from Peg 1 to Peg 3", "Move disk 0 from Peg 0 to Peg 0",
        "Move disk 99 from Peg 98 to Peg 97",
    ],
}  # fmt: skip


def injections(mark: Path) -> list[str]:
    """Each makes the file `mark` where it is evaluated, executed or sympified."""
    touch = f"open({str(mark)!r}, 'w')"
    return [
        touch,
        f"__import__('pathlib').Path({str(mark)!r}).touch()",
        f"__import__('os').system({f'touch {mark}'!r})",
        f"[{touch} for _ in (1,)]",
        f"(lambda: {touch})()",
        f"eval({touch!r})",
        f"exec({touch!r})",
        f"().__class__.__base__.__subclasses__() and {touch}",
        f"sympify({touch!r})",
        f"Symbol('x').subs(1, {touch})",
        f"S({touch!r})",
        f"parse_expr({touch!r})",
        f"f'{{{touch}}}'",
        f"1 if {touch} else 0",
        f"24 + 0*len([{touch}])",
        f"import os; {touch}",
        f"```python\n{touch}\n```",
        f"cos\n__reduce__\n(S'{mark}'\ntR.",
        f'{{"py/object": "os.system", "command": "touch {mark}"}}',
        f"!!python/object/apply:os.system ['touch {mark}']",
        f"$(touch {mark})",
        f"`touch {mark}`",
        f"; touch {mark} #",
        "().__class__.__bases__[0].__subclasses__()",
        "globals()['entry']['answer']",
        "type('', (str,), {'__eq__': lambda *_: True})()",
    ]
