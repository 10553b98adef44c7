"""From the names in a checkpoint to the tensors of spec/tensors.py, and back.

A rule's pattern is a published name in which {layer} and {expert} stand for numbers and (a|b) for spellings of the
same thing, the published one first. Lookup takes the numbers out of a name and asks a dictionary, so a hundred thousand
names take well under a second. No torch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from moestro.spec.fields import ModelSpec
from moestro.spec.tensors import TensorSpec

Transform = Literal["same", "transpose", "interleaved", "interleaved_transpose", "fused"]

# The body of the model is found under these in the wild; the longest that fits is taken off.
PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.", "")


@dataclass(frozen=True)
class Rule:
    """One kind of checkpoint tensor.

    pattern: its name. target: the tensor it goes to, or is a part of. rows: the row block of the target that it fills.
    transform: how it lies in the checkpoint, against the target:
        "same"; "transpose" the last two axes swapped; "interleaved" the rows of the two blocks alternate;
        "interleaved_transpose" both (gpt-oss); "fused" all experts in one tensor, "same" or "transpose" by its shape.
    published: the form in which the family's models are released; others are accepted on reading.
    """

    pattern: str
    target: str
    rows: str | None = None
    transform: Transform = "same"
    published: bool = True


@dataclass(frozen=True)
class Source:
    """Where one checkpoint tensor goes: expert and rows are None when it covers all of them."""

    target: str
    expert: int | None = None
    rows: str | None = None
    transform: Transform = "same"


@dataclass(frozen=True)
class Skip:
    """A checkpoint tensor that is left out on purpose, and why."""

    reason: str


class NameMap:
    """All names of one family.

    rules: the tensors that are used. skips: patterns of those that are not needed, with the reason.
    """

    def __init__(self, rules: Iterable[Rule], skips: Iterable[tuple[str, str]] = ()) -> None:
        self.rules = tuple(rules)
        self._by_template: dict[str, Rule] = {}
        for rule in self.rules:
            for name in _spellings(rule.pattern):
                assert name not in self._by_template, f"two rules for {name}"
                self._by_template[name] = rule
        self._skips = {name: reason for pattern, reason in skips for name in _spellings(pattern)}

    def match(self, name: str, spec: ModelSpec) -> Source | Skip | None:
        """What to do with a tensor of this name; None when the family does not know it.

        Layers after the last one are skipped when the config declares them as next-token-prediction layers.
        """
        template, numbers = _template(name)
        if template.startswith("layers.#.") and numbers[0] >= spec.num_layers:
            declared = numbers[0] < spec.num_layers + spec.num_mtp_layers
            return Skip("next-token-prediction layer") if declared else None
        if template in self._skips:
            return Skip(self._skips[template])
        rule = self._by_template.get(template)
        if rule is None:
            return None
        expert = numbers[1] if "{expert}" in rule.pattern else None
        target = rule.target.replace("{layer}", str(numbers[0])) if numbers else rule.target
        return Source(target, expert, rule.rows, rule.transform)

    def published(self, target: str, tensor: TensorSpec) -> Iterator[tuple[str, Source]]:
        """The released checkpoint's tensors that make up `target`, in order of experts and rows."""
        layer = target.split(".")[1] if target.startswith("layers.") else ""
        for rule in self.rules:
            if not rule.published or rule.target.replace("{layer}", layer) != target:
                continue
            name = _first_spelling(rule.pattern).replace("{layer}", layer)
            if "{expert}" in rule.pattern:
                for expert in range(tensor.shape[0]):
                    yield name.replace("{expert}", str(expert)), Source(target, expert, rule.rows, rule.transform)
            else:
                yield name, Source(target, None, rule.rows, rule.transform)


def source_shape(source: Source, tensor: TensorSpec) -> tuple[int, ...]:
    """The shape that a checkpoint tensor must have to go to `tensor` as `source` says."""
    shape = list(tensor.shape)
    if source.rows is not None:
        shape[row_axis(tensor)] = dict(tensor.rows)[source.rows]
    if source.expert is not None:
        del shape[0]
    if source.transform in ("transpose", "interleaved_transpose"):
        shape[-1], shape[-2] = shape[-2], shape[-1]
    return tuple(shape)


def row_axis(tensor: TensorSpec) -> int:
    """The axis of the row blocks: the first one behind the expert axis."""
    return 1 if tensor.role == "expert" else 0


# {expert} only behind "experts."; a number that is written in another way than Python would write it is no index.
_NUMBER = re.compile(r"(?<=\.)(0|[1-9][0-9]{0,8})(?=\.)")


def _template(name: str) -> tuple[str, list[int]]:
    for prefix in PREFIXES:
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    return _NUMBER.sub("#", name), [int(number) for number in _NUMBER.findall(name)]


def _spellings(pattern: str) -> Iterator[str]:
    """All names of a pattern as templates, without prefix."""
    parts = re.split(r"\(([^)]*)\)", pattern)
    choices = [part.split("|") if i % 2 else [part] for i, part in enumerate(parts)]
    for combination in itertools.product(*choices):
        yield "".join(combination).removeprefix("model.").replace("{layer}", "#").replace("{expert}", "#")


def _first_spelling(pattern: str) -> str:
    return re.sub(r"\(([^)|]*)[^)]*\)", r"\1", pattern)


_LAYER = "model.layers.{layer}."

ROTARY_BUFFERS = (
    ("model.layers.{layer}.self_attn.rotary_emb.inv_freq", "rotary buffer"),
    ("model.rotary_emb.inv_freq", "rotary buffer"),
)


def frame() -> list[Rule]:
    """Embedding, norms and head, which all families name alike."""
    return [
        Rule("model.embed_tokens.weight", "embed.weight"),
        Rule("model.norm.weight", "norm.weight"),
        Rule("model.norm.bias", "norm.bias"),
        Rule("lm_head.weight", "head.weight"),
        Rule("lm_head.bias", "head.bias"),
        *(
            Rule(f"{_LAYER}{theirs}.{kind}", f"layers.{{layer}}.{ours}.{kind}")
            for theirs, ours in (("input_layernorm", "attn_norm"), ("post_attention_layernorm", "mlp_norm"))
            for kind in ("weight", "bias")
        ),
    ]


def gqa() -> list[Rule]:
    """Grouped-query attention, with all the extras a family may have."""
    ours = "layers.{layer}.attn."
    return [
        *(
            Rule(f"{_LAYER}self_attn.{rows}_proj.{kind}", f"{ours}qkv.{kind}", rows)
            for rows in ("q", "k", "v")
            for kind in ("weight", "bias")
        ),
        *(Rule(f"{_LAYER}self_attn.o_proj.{kind}", f"{ours}o.{kind}") for kind in ("weight", "bias")),
        *(Rule(f"{_LAYER}self_attn.{name}.weight", f"{ours}{name}.weight") for name in ("q_norm", "k_norm")),
        Rule(f"{_LAYER}self_attn.sinks", f"{ours}sinks"),
    ]


def mla() -> list[Rule]:
    """Multi-head latent attention (DeepSeek-V2 on)."""
    names = {
        "q_proj": "q",
        "q_a_proj": "q_a",
        "q_a_layernorm": "q_a_norm",
        "q_b_proj": "q_b",
        "kv_a_proj_with_mqa": "kv_a",
        "kv_a_layernorm": "kv_a_norm",
        "kv_b_proj": "kv_b",
        "o_proj": "o",
    }
    biased = {"q_a_proj", "kv_a_proj_with_mqa", "o_proj"}
    return [
        Rule(f"{_LAYER}self_attn.{theirs}.{kind}", f"layers.{{layer}}.attn.{ours}.{kind}")
        for theirs, ours in names.items()
        for kind in ("weight", "bias")
        if kind == "weight" or theirs in biased
    ]


def dense_mlp() -> list[Rule]:
    return _gated_mlp("mlp", "mlp")


def shared_expert(name: str) -> list[Rule]:
    """The shared experts under their module name, with the gate that Qwen2-MoE puts before them."""
    return [
        *_gated_mlp(f"mlp.{name}", "moe.shared"),
        Rule(f"{_LAYER}mlp.{name}_gate.weight", "layers.{layer}.moe.shared_gate.weight"),
    ]


def experts(block: str, gate: str, up: str, down: str) -> list[Rule]:
    """One tensor an expert and projection, as released; or all experts of a layer in one, as transformers 5 holds them.

    block: the spellings of the MoE module; gate, up, down: those of the projections.
    """
    theirs, ours = f"{_LAYER}{block}.experts", "layers.{layer}.moe.experts."
    return [
        Rule(f"{theirs}.{{expert}}.{gate}.weight", f"{ours}gate_up.weight", "gate"),
        Rule(f"{theirs}.{{expert}}.{up}.weight", f"{ours}gate_up.weight", "up"),
        Rule(f"{theirs}.{{expert}}.{down}.weight", f"{ours}down.weight"),
        *fused_experts(block),
    ]


def fused_experts(block: str) -> list[Rule]:
    theirs, ours = f"{_LAYER}{block}.experts", "layers.{layer}.moe.experts."
    return [
        Rule(f"{theirs}.(gate_up_proj|gate_up_proj.weight)", f"{ours}gate_up.weight", None, "fused", published=False),
        Rule(f"{theirs}.(down_proj|down_proj.weight)", f"{ours}down.weight", None, "fused", published=False),
    ]


def router(block: str, gate: str) -> list[Rule]:
    """The router's projection and the bias that corrects its choice."""
    theirs = f"{_LAYER}{block}"
    return [
        Rule(f"{theirs}.{gate}.weight", "layers.{layer}.moe.router.weight"),
        Rule(f"{theirs}.{gate}.bias", "layers.{layer}.moe.router.bias"),
        Rule(f"{theirs}.(gate.|)e_score_correction_bias", "layers.{layer}.moe.selection_bias"),
    ]


def _gated_mlp(theirs: str, ours: str) -> list[Rule]:
    return [
        Rule(f"{_LAYER}{theirs}.gate_proj.weight", f"layers.{{layer}}.{ours}.gate_up.weight", "gate"),
        Rule(f"{_LAYER}{theirs}.up_proj.weight", f"layers.{{layer}}.{ours}.gate_up.weight", "up"),
        Rule(f"{_LAYER}{theirs}.down_proj.weight", f"layers.{{layer}}.{ours}.down.weight"),
    ]
