"""Which tokens of which sequences the next step computes. Pure policy over page counts: no torch, no clock.

A step is planned, run elsewhere, and committed. Sequences are served in order of arrival: running ones first, then
waiting ones while the token budget, the sequence limit and the pages last. A sequence is admitted only when all of its
tokens and one more fit beside what the running ones have been promised, and takes the pages of its tokens at once; so a
prompt cut into chunks never gets stuck half way, and only growth can run out of pages. Then the youngest running
sequence gives up its pages, keeps its tokens, and starts again later.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count

from moestro.engine.sequence import Sequence
from moestro.kv.pages import PagePool


@dataclass(frozen=True)
class ScheduledSequence:
    """A sequence's share of one step.

    start: index in the sequence of the first token computed. num_tokens: how many are computed. num_logits: how many of
    the last ones need logits: 0 inside a prompt, 1 at its end or when decoding, more when several tokens are verified
    or a prompt is scored.
    samples: whether the last of them chooses a new token.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_logits: int
    samples: bool


@dataclass(frozen=True)
class StepPlan:
    """What one step computes, in order."""

    scheduled: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)


@dataclass
class SchedulerStats:
    """Counters since start; they only rise. Hits of resumed sequences are counted apart (C71)."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    resumed_prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class Scheduler:
    """Owns the waiting and running sequences and their pages."""

    def __init__(self, pool: PagePool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        assert 1 <= max_num_seqs <= max_num_batched_tokens, "every running sequence must be able to advance in a step"
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.stats = SchedulerStats()
        self._arrivals: dict[tuple[str, int], int] = {}
        self._next_arrival = count()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. The caller has checked that it fits the pool on its own."""
        assert self.pool.pages_for(sequence.num_prompt + 1) <= self.pool.num_pages
        self._arrivals[sequence.key] = next(self._next_arrival)
        self.waiting.append(sequence)

    def plan_step(self) -> StepPlan:
        """Choose the next step's work; preempts and admits as needed. An empty plan means that there is nothing to
        do.
        """
        budget = self.max_num_batched_tokens
        scheduled: list[ScheduledSequence] = []
        preempted = self._grow_running()
        for sequence in sorted(
            self.running, key=lambda s: s.num_to_compute > 1
        ):  # decoding ones first: they wait for no prompt
            if budget == 0:
                break
            if not sequence.will_end:
                budget -= self._schedule(sequence, budget, scheduled)
        if not preempted:
            self._admit(budget, scheduled)
        return StepPlan(tuple(scheduled))

    def run_ahead(self, plan: StepPlan) -> None:
        """Take a step that is in flight as computed, so that the next one can be planned: each sequence that chooses a
        token gets a pending one. `commit` follows when the tokens are known.
        """
        row = 0
        for item in plan.scheduled:
            if not item.sequence.finished:
                item.sequence.num_computed = item.start + item.num_tokens
                if item.samples:
                    item.sequence.append_pending(row)
            row += item.samples

    def commit(self, plan: StepPlan, chosen: Seq[Seq[int]], *, ran_ahead: bool = False) -> None:
        """Take in what the step computed. chosen: the tokens chosen for each scheduled sequence, in order; empty inside
        a prompt. ran_ahead: whether `run_ahead` was called for it.

        Tokens after an end are dropped. Finished sequences keep their pages until `collect_finished`.
        """
        for item, token_ids in zip(plan.scheduled, chosen, strict=True):
            sequence = item.sequence
            if sequence.finished:
                continue  # aborted, ended by the step before, or its logits were not numbers
            end = item.start + item.num_tokens
            before, full = item.start // self.pool.page_size, end // self.pool.page_size
            if not ran_ahead:
                sequence.num_computed = end
            if full > before and len(sequence.pages) >= full:  # no pages: preempted while the step was in flight
                tokens = sequence.token_ids[: full * self.pool.page_size]
                self.pool.register(sequence.pages[:full], tokens, sequence.namespace)
            for token_id in token_ids:
                sequence.append(token_id)
                self.stats.generation_tokens += 1
                if sequence.finished:
                    break

    def collect_finished(self) -> list[Sequence]:
        """Remove and return the sequences that have a finish reason, wherever they are, and free their pages."""
        done = [s for s in (*self.running, *self.waiting) if s.finished]
        for sequence in done:
            (self.running if sequence in self.running else self.waiting).remove(sequence)
            self._release(sequence)
            del self._arrivals[sequence.key]
            reason = str(sequence.finish_reason)
            self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1
        return done

    def _schedule(self, sequence: Sequence, budget: int, scheduled: list[ScheduledSequence]) -> int:
        num_tokens = min(sequence.num_to_compute, budget)
        ends = num_tokens == sequence.num_to_compute
        num_logits = num_tokens if sequence.wants_prompt_logprobs else int(ends)
        scheduled.append(ScheduledSequence(sequence, sequence.num_computed, num_tokens, num_logits, ends))
        return num_tokens

    def _grow_running(self) -> bool:
        """Give every running sequence the pages of all its tokens, oldest first; whether any had to be preempted for
        it.
        """
        before = self.stats.preemptions
        for sequence in [s for s in self.running if not s.will_end]:
            while sequence in self.running and not self._grow(sequence):
                self._preempt(self.running[-1])
        return self.stats.preemptions > before

    def _grow(self, sequence: Sequence) -> bool:
        missing = self.pool.pages_for(len(sequence.token_ids)) - len(sequence.pages)
        pages = self.pool.allocate(max(0, missing))
        if pages is None:
            return False
        sequence.pages += pages
        return True

    def _admit(self, budget: int, scheduled: list[ScheduledSequence]) -> None:
        for sequence in list(self.waiting):
            if budget == 0 or len(self.running) >= self.max_num_seqs:
                return
            if self._waits_for_sibling(sequence):
                continue
            if not self._take_pages(sequence):
                return  # in order of arrival: a smaller one behind it must not starve it
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=self._arrival)
            budget -= self._schedule(sequence, budget, scheduled)

    def _waits_for_sibling(self, sequence: Sequence) -> bool:
        """Whether another completion of the same prompt is computing it now; its pages can be shared in a moment."""
        if self.pool.prefixes is None or sequence.num_prompt < self.pool.page_size:
            return False
        return any(
            s.request is sequence.request and s.num_computed < s.num_prompt - s.num_prompt % self.pool.page_size
            for s in self.running
        )

    def _take_pages(self, sequence: Sequence) -> bool:
        """Give a waiting sequence pages for all its tokens, found prefix pages first, if one more token would fit
        too.
        """
        reusable = (
            [] if sequence.wants_prompt_logprobs else self.pool.match(sequence.token_ids[:-1], sequence.namespace)
        )
        needed = self.pool.pages_for(len(sequence.token_ids) + 1) - len(reusable)
        promised = sum(max(0, self.pool.pages_for(len(s.token_ids) + 1) - len(s.pages)) for s in self.running)
        if needed + promised > self.pool.num_available - self.pool.num_idle(reusable):
            return False
        self.pool.share(reusable)
        fresh = self.pool.allocate(self.pool.pages_for(len(sequence.token_ids)) - len(reusable))
        assert fresh is not None
        sequence.pages = reusable + fresh
        sequence.num_computed = len(reusable) * self.pool.page_size
        self._count_admission(sequence)
        return True

    def _count_admission(self, sequence: Sequence) -> None:
        if sequence.num_preemptions:
            self.stats.resumed_prefix_hits += sequence.num_computed
            return
        sequence.num_cached = sequence.num_computed
        self.stats.prefix_hits += sequence.num_computed
        self.stats.prefix_queries += sequence.num_prompt
        self.stats.prompt_tokens += sequence.num_prompt

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.stats.preemptions += 1
        insort(self.waiting, sequence, key=self._arrival)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages = []

    def _arrival(self, sequence: Sequence) -> int:
        return self._arrivals[sequence.key]
