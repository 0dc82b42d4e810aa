"""Prepares a published data set: prompts with gold answers that are checked, as JSONL, and a manifest that counts.

    tune run sparrow_prepare --config prepare/gsm8k source=copies/gsm8k

Needs no network where `source` is a local copy. docs/tasks.md lists the data sets.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from sparrow.components.gold import OutsideDates, UnusableGold
from sparrow.components.reward import combine_rewards
from sparrow.components.tables import open_table
from sparrow.errors import UserError
from sparrow.launch import check_stop, run_recipe
from sparrow.recipes.prepare_config import PrepareConfig, check
from sparrow.recipes.prepare_output import (
    ExamplesFile,
    Ledger,
    as_line,
    excluded_questions,
    source_files,
    write_manifest,
)
from sparrow.recipes.prepare_rows import Draft, make_draft, reward_columns, row_id
from sparrow.training import distributed

BATCH = 256


class SparrowPrepare:
    """From a local copy of a public data set to prompts and gold answers, each of which scores 1 against itself."""

    def __init__(self, cfg: PrepareConfig) -> None:
        check(cfg)
        self.cfg = cfg
        self.output = Path(cfg.output).expanduser()
        self.ledger = Ledger()
        self.golds: dict[str, str] = {}  # of each question, by its fingerprint
        self.conflicting: set[str] = set()
        self.ids: set[str] = set()
        self.unknown: list[str] = []  # ids under `drop` that no row has
        self.reward: Any = None
        self.gold: Any = None
        self.file: ExamplesFile | None = None

    def setup(self) -> None:
        """Everything that can be missing, before the first row is read."""
        if distributed.world_size() > 1:
            raise UserError("sparrow_prepare: one process is enough; leave --nproc_per_node out")
        cfg = self.cfg
        if self.output.is_dir():
            raise UserError(f"output: {self.output} is a folder; name a file")
        self.table = open_table(cfg.source, cfg.subset, cfg.split, cfg.revision)
        self.excluded = excluded_questions(cfg.exclude)
        self.gold = cfg.gold.build()
        self.reward = cfg.reward.build() if cfg.reward is not None else None
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self.file = ExamplesFile(self.output)
        except OSError as error:
            raise UserError(f"output: {self.output} cannot be written: {error.strerror}") from None

    def train(self) -> None:
        """Reads, checks and writes, some hundred rows at a time."""
        assert self.file is not None
        drafts = self._drafts()
        while batch := list(islice(drafts, BATCH)):
            check_stop()
            for draft, line in self._checked(batch):
                self.file.add(draft, line)
        digest = self.file.finish(self.conflicting, self.ledger)
        manifest = self.output.with_name(self.output.name + ".manifest.json")
        cfg = self.cfg
        content = {
            key: getattr(cfg, key) for key in ("name", "licence", "origin", "subset", "split", "revision", "limit")
        }
        content |= {"files": source_files(self.table), "output_sha256": digest}
        write_manifest(manifest, content, self.ledger)
        print("\n".join(self.ledger.lines()))
        if self.unknown:
            print(f"drop: no row has the id {', '.join(map(repr, self.unknown))}")
        print(f"examples  {self.output}\nmanifest  {manifest}", flush=True)

    def _drafts(self) -> Iterator[tuple[Draft, str]]:
        """The examples that need a reward to be judged, each with its line."""
        unlisted = set(self.cfg.drop)
        for number, (where, row) in enumerate(self.table.rows(self.cfg.limit)):
            self.ledger.read += 1
            name = row_id(self.cfg, row, number, where)
            if name in self.cfg.drop:
                unlisted.discard(name)
                self.ledger.drop(name, "listed", self.cfg.drop[name])
                continue
            try:
                draft = make_draft(self.cfg, self.gold, row, name, where)
                line = as_line(draft)
            except OutsideDates as error:
                self.ledger.drop(name, "dates", str(error))
                continue
            except UnusableGold as error:
                self.ledger.drop(name, "unusable", str(error))
                continue
            if self._is_new(draft):
                self._claim(name, where)
                yield draft, line
        self.unknown = sorted(unlisted)

    def _is_new(self, draft: Draft) -> bool:
        if draft.fingerprint in self.excluded:
            self.ledger.drop(draft.id, "excluded")
            return False
        if draft.fingerprint not in self.golds:
            self.golds[draft.fingerprint] = draft.gold
            return True
        same = self.golds[draft.fingerprint] == draft.gold
        if not same:
            self.conflicting.add(draft.fingerprint)
        self.ledger.drop(draft.id, "repeated" if same else "conflicting")
        return False

    def _claim(self, name: str, where: str) -> None:
        if name in self.ids:
            raise UserError(f"{where}: id: {name!r} stands twice, with different questions; name another column")
        self.ids.add(name)

    def _checked(self, batch: list[tuple[Draft, str]]) -> Iterator[tuple[Draft, str]]:
        """Those whose gold answer scores 1 against itself, as far as the reward and the data set can tell."""
        problems = self._problems([draft for draft, _ in batch])
        sound = [pair for pair, problem in zip(batch, problems, strict=True) if problem is None]
        for (draft, _), problem in zip(batch, problems, strict=True):
            if problem is not None:
                self.ledger.drop(draft.id, "gold", problem)
        unsolved = self._unsolved([draft for draft, _ in sound])
        for draft, line in sound:
            if draft.id in unsolved:
                self.ledger.drop(draft.id, "solution")
            else:
                yield draft, line

    def _problems(self, drafts: list[Draft]) -> list[str | None]:
        if not hasattr(self.reward, "problems"):
            return [None] * len(drafts)
        found: list[str | None] = self.reward.problems(reward_columns(drafts))
        if len(found) != len(drafts):
            raise UserError(f"reward: problems() returned {len(found)} values for {len(drafts)} examples")
        return found

    def _unsolved(self, drafts: list[Draft]) -> set[str]:
        """Ids of those that have solutions, of which none scores 1; all programs of one round are run together."""
        left = [draft for draft in drafts if draft.solutions[: self.cfg.solutions]]
        for number in range(self.cfg.solutions):
            trying = [draft for draft in left if number < len(draft.solutions)]
            if not trying:
                break
            programs = [f"```python\n{draft.solutions[number]}\n```" for draft in trying]
            run: dict[str, list[Any]] = {"completion_lengths": [0] * len(trying), "truncated": [False] * len(trying)}
            scores, _ = combine_rewards([("reward", 1.0, self.reward)], programs, reward_columns(trying) | run)
            solved = {draft.id for draft, score in zip(trying, scores.tolist(), strict=True) if score == 1.0}
            left = [draft for draft in left if draft.id not in solved]
        return {draft.id for draft in left}

    def cleanup(self) -> None:
        if self.file is not None:
            self.file.close()
        for part in (self.reward, self.gold):
            if hasattr(part, "close"):
                part.close()


def main(argv: Sequence[str] | None = None) -> int:
    return run_recipe(SparrowPrepare, PrepareConfig, argv)


if __name__ == "__main__":
    sys.exit(main())
