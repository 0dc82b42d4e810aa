"""One `generate` call of the engine: the loop over windows, and what the host knows between them.

Axes: B rows of a window, E hidden size, L longest response.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparrow.engine.decode import Drawing, RolloutModel, Stepper, append_drawn
from sparrow.engine.prefill import prefill
from sparrow.engine.rows import Rows
from sparrow.engine.scheduler import Admission, Preemption, Request, Scheduler
from sparrow.engine.stop import StopStrings
from sparrow.engine.transcript import Transcript
from sparrow.engine.window import Look
from sparrow.protocols import KVCache


@dataclass
class EngineStats:
    """Counters of one `generate` call.

    Attributes:
        preemptions: times a sequence gave way because the pool ran dry.
        swapped_tokens: cached tokens that were copied to the host for it.
        peak_blocks: most blocks of the pool in use at once.
    """

    preemptions: int = 0
    swapped_tokens: int = 0
    peak_blocks: int = 0


@dataclass
class Swapped:
    """What a preempted sequence needs to go on exactly where it was.

    Its keys and values are copied, not recomputed: a dense prefill of its tokens would not give those that it was
    decoded with, where layers above the first sparse one saw only some pages.
    """

    kv: Any
    last_token: int


class Generation:
    """The state of one `generate` call; `window` until `done`.

    Args:
        uniforms: random numbers of a sequence [max_new_tokens], by prompt and sample.
        stop: None where no strings end a response.
        steps: decode steps of a window.
        prefill_tokens: tokens of a prefill pass.
    """

    def __init__(
        self,
        model: RolloutModel,
        cache: KVCache,
        scheduler: Scheduler,
        rows: Rows,
        stepper: Stepper,
        drawing: Drawing,
        uniforms: Callable[[int, int], Tensor],
        stop: StopStrings | None,
        steps: int,
        prefill_tokens: int,
    ) -> None:
        self.model, self.cache, self.scheduler, self.rows = model, cache, scheduler, rows
        self.stepper, self.drawing, self.uniforms, self.stop = stepper, drawing, uniforms, stop
        self.steps, self.prefill_tokens = steps, prefill_tokens
        self.transcript, self.stats = Transcript(), EngineStats()
        self.num_tokens = self.num_finished = 0
        self.terminated: set[int] = set()  # sequences that ended by themselves
        self._prompt_hidden: dict[int, Tensor] = {}  # by prompt, while its samples are admitted
        self._swapped: dict[Request, Swapped] = {}

    @property
    def done(self) -> bool:
        return self.scheduler.done

    def window(self) -> None:
        """Makes room, admits, decodes, and takes one look at what came out."""
        grown, preempted = self.scheduler.grow(self.steps)
        for preemption in preempted:
            self._swap_out(preemption)
        if grown:
            self.rows.set_blocks({request.row: request.blocks for request in grown})
        if admitted := self.scheduler.admit(self.steps):
            self._admit(admitted)
        self._decode(self.scheduler.active)
        self._take(list(self.scheduler.active))
        self.stats.peak_blocks = self.scheduler.allocator.peak_used

    def _swap_out(self, preemption: Preemption) -> None:
        request = preemption.request
        last_token = int(self.rows.last_token_R[preemption.row])
        self._swapped[request] = Swapped(self.cache.swap_out(preemption.blocks), last_token)
        self.stats.preemptions += 1
        self.stats.swapped_tokens += request.total_length - 1

    def _admit(self, admitted: list[Admission]) -> None:
        """Fills rows and blocks of resumed and new sequences, and samples the first tokens of the new ones."""
        for admission in admitted:
            if admission.resumed:
                self._resume(admission.request)
        prompts = [admission.request.prompt for admission in admitted if admission.prefill]
        self._prompt_hidden |= prefill(self.model, self.cache, prompts, self.prefill_tokens, self.rows.device)
        if new := [admission for admission in admitted if not admission.resumed]:
            self._start(new)

    def _resume(self, request: Request) -> None:
        swapped = self._swapped.pop(request)
        saved_blocks = -(-(request.total_length - 1) // self.cache.block_size)
        self.cache.swap_in(swapped.kv, request.blocks[:saved_blocks])
        self._start_row(request, request.response_length, swapped.last_token)

    def _start(self, admitted: list[Admission]) -> None:
        requests = [admission.request for admission in admitted]
        for admission, request in zip(admitted, requests, strict=True):
            if admission.copy is not None:
                self.cache.copy_block(*admission.copy)
            self._start_row(request)
            request.response_length = 1
        rows_B = torch.tensor([request.row for request in requests], device=self.rows.device)
        hidden_BE = torch.stack([self._prompt_hidden[request.prompt.index] for request in requests])
        append_drawn(self.model, self.rows, rows_B, hidden_BE, self.drawing)
        for prompt in [request.prompt for request in requests if request.prompt.waiting == 0]:
            self._prompt_hidden.pop(prompt.index, None)

    def _start_row(self, request: Request, length: int = 0, last_token: int = 0) -> None:
        uniforms_L = self.uniforms(request.prompt.index, request.sample)
        prompt_length = len(request.prompt.tokens)
        self.rows.start(request.row, request.blocks, prompt_length, uniforms_L, length, last_token, request.limit)

    def _decode(self, active: list[Request]) -> None:
        steps = min(self.steps, max(request.limit - request.response_length for request in active))
        if steps:
            last = [len(r.prompt.tokens) + min(r.response_length + steps - 1, r.limit) for r in active]
            self.stepper.run([request.row for request in active], max(last), steps)

    def _take(self, active: list[Request]) -> None:
        """Looks at the active rows, takes over what they gained and lets those that ended leave."""
        look = self.rows.look([request.row for request in active])
        sequences = [request.prompt.index * self.scheduler.num_samples + request.sample for request in active]
        if self.stop is not None:
            self._apply_stop(self.stop, sequences, look)
        sequences_B = torch.tensor(sequences)
        self.transcript.add(sequences_B, look.new_B, look.outputs)
        self.terminated.update(sequences_B[look.terminated_B].tolist())
        self.num_tokens += int(look.new_B.sum())
        for request, length, done in zip(active, look.length_B.tolist(), look.done_B.tolist(), strict=True):
            request.response_length = length
            if done:
                self.scheduler.finish(request)
                self.num_finished += 1

    @staticmethod
    def _apply_stop(stop: StopStrings, sequences: list[int], look: Look) -> None:
        """Ends responses at their stop string: what they gained after it is taken off the look."""
        for row, (sequence, new) in enumerate(zip(sequences, look.new_B.tolist(), strict=True)):
            kept = stop.kept(sequence, look.outputs["tokens"][row, :new].tolist())
            if kept is not None:
                look.length_B[row] = look.start_length_B[row] + kept
                look.done_B[row] = look.terminated_B[row] = True
