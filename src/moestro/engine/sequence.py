"""One continuation being made: its tokens, how many of them have gone through the model, and the pages that hold them.
No torch."""

from __future__ import annotations

from itertools import count

from moestro.engine.request import FinishReason, Request

_SERIALS = count()

PENDING = -1  # stands for a token that the device is still choosing


class Sequence:
    """The state of one completion of a request.

    token_ids: prompt, then output. num_computed: how many of them, from the start, are in the KV cache; a preemption
    sets it back to 0 and keeps the tokens. The last token is not computed until it is fed to the step that chooses the
    next one.
    pending_row: while the last token is PENDING, its row among the tokens that the step in flight chooses.
    serial: no other sequence of the process has it.
    uses_long_rope: fixed for the whole sequence, so that a recomputed token gets the position encoding it had; pages
    are shared only among sequences that agree on it.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        *,
        seed: int,
        end_ids: frozenset[int] = frozenset(),
        max_tokens: int = 1,
        uses_long_rope: bool = False,
    ) -> None:
        self.request = request
        self.index = index
        self.seed = seed
        self.end_ids = end_ids
        self.max_tokens = max_tokens
        self.uses_long_rope = uses_long_rope
        self.namespace = ("long_rope",) if uses_long_rope else ()
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt = len(request.prompt_token_ids)
        self.num_computed = 0
        self.num_cached = 0
        self.num_preemptions = 0
        self.pending_row = -1
        self.serial = next(_SERIALS)
        self.pages: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.request.request_id, self.index

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_to_compute(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def is_pending(self) -> bool:
        """Whether the last token is not known yet."""
        return self.token_ids[-1] == PENDING

    @property
    def will_end(self) -> bool:
        """Whether the pending token is the last one, whatever it will be."""
        return self.is_pending and self.num_output >= self.max_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the logits of the prompt's own positions are still needed."""
        return self.request.params.prompt_logprobs is not None and self.index == 0 and self.num_output == 0

    def append_pending(self, row: int) -> None:
        """Add a place for the token that the step in flight chooses."""
        self.token_ids.append(PENDING)
        self.pending_row = row

    def append(self, token_id: int) -> None:
        """Add a chosen token, in the pending place if there is one, and decide whether it ends the sequence."""
        if self.is_pending:
            self.token_ids.pop()
        self.token_ids.append(token_id)
        params = self.request.params
        ends = (token_id in self.end_ids and not params.ignore_eos) or token_id in params.stop_token_ids
        if ends and self.num_output > params.min_tokens:
            self.finish("stop", token_id)
        elif self.num_output >= self.max_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        if self.finish_reason is None:
            self.finish_reason, self.stop_reason = reason, stop_reason
