"""Train the carved model to predict what the dense one predicts, on one GPU; resumes from its own checkpoint.

Loss: KL(dense || sparse) over the whole vocabulary, computed from both models on the fly, a little cross entropy with
the text if asked for, and a weak load-balance loss. All weights but the embedding are trained (AdamW, cosine). Rows are
drawn by domain in fixed shares. In the last part of the training the weights' changes go through the rounding that the
shipped file will have, so that the model learns to live with it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from carve import load_carved
from common import DOMAINS, ROW_TOKENS, SEED, Corpora, Runner, Split, Weights, evaluate, permute_neurons, read_dense
from delta import round_change, rounded_names
from safetensors.torch import load_file, save_file

SHARES = {
    "prose": 0.16,
    "manuals": 0.10,
    "code": 0.14,
    "dictionary": 0.12,
    "chinese": 0.06,
    "arithmetic": 0.04,
    "chat": 0.28,
    "web": 0.10,
}
BETAS = (0.9, 0.95)
WARMUP = 0.03
SAVE_EVERY_S = 300


def main() -> None:
    args = parse()
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # rounding sees four shapes, with and without gradients
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, dense = read_dense(args.gguf)
    dense = {name: w.to(device) for name, w in dense.items()}
    weights = load_carved(args.carved, dense, refit=True)
    order = load_file(args.carved)["order"].long()
    base = permute_neurons(dense, order)
    Trainer(args, shape, dense, base, weights, device).run()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--carved", type=Path, required=True, help="file of carve.py")
    parser.add_argument("--split", type=Split.parse, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, state and log")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument(
        "--most-seconds", type=float, default=1e9, help="end by then, the schedule squeezed, if too slow"
    )
    parser.add_argument(
        "--reload-at", type=int, default=-1, help="step at which to read the corpora again (chat.py adds)"
    )
    parser.add_argument("--rows", type=int, default=32, help=f"rows of {ROW_TOKENS} tokens a step")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--balance", type=float, default=1e-3, help="weight of the load-balance loss")
    parser.add_argument("--text", type=float, default=0.0, help="share of the text itself in the target, 0 to 1")
    parser.add_argument("--round-bits", type=int, default=0, help="bits of a shipped weight change; 0: no rounding")
    parser.add_argument(
        "--round-from", type=float, default=0.8, help="part of the training from which changes are rounded"
    )
    parser.add_argument("--measure-every", type=int, default=250, help="steps between held-out measures")
    parser.add_argument("--measure-tokens", type=int, default=16384, help="held-out tokens a domain in those")
    parser.add_argument("--without", nargs="*", default=[], help="domains to leave out (trials before chat.py has run)")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    return parser.parse_args()


class Trainer:
    def __init__(self, args, shape, dense: Weights, base: Weights, weights: Weights, device: torch.device) -> None:
        self.args, self.shape, self.device = args, shape, device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        compiled = not args.eager
        self.student = Runner(shape, args.split, device, dtype, compiled)
        self.teacher = Runner(shape, None, device, dtype, compiled)
        self.measurer = Runner(shape, args.split, device, dtype)
        self.dense = {name: w.to(dtype) for name, w in dense.items()}
        self.base = base
        self.weights = {name: w.clone() for name, w in weights.items()}
        self.trained = {n: w.requires_grad_() for n, w in self.weights.items() if n != "embed"}
        self.head = dense["embed"].to(dtype)
        self.round = torch.compile(round_change, dynamic=False) if compiled else round_change
        self.distance = torch.compile(distance, dynamic=False) if compiled else distance
        routers = [w for n, w in self.trained.items() if n.endswith("router")]
        others = [w for n, w in self.trained.items() if not n.endswith("router")]
        self.optimiser = torch.optim.AdamW(
            [{"params": others, "scale": 1.0}, {"params": routers, "scale": 0.5}],
            lr=args.rate, betas=BETAS, weight_decay=0.0, fused=device.type == "cuda",
        )  # fmt: skip
        tokenizer = args.corpora / "tokenizer.json"
        self.shares = {d: share for d, share in SHARES.items() if d not in args.without}
        self.domains = tuple(d for d in DOMAINS if d not in args.without)
        self.train = self._corpora()
        self.held = Corpora(args.corpora, tokenizer, "held", self.domains)
        self.step = 0
        self.seconds = 0.0
        args.out.mkdir(parents=True, exist_ok=True)
        self._resume()
        if args.round_bits:
            self._try_rounding()

    def run(self) -> None:
        args = self.args
        began, saved = time.time() - self.seconds, time.time()
        while self._done() < 1:
            if self.step == args.reload_at:
                self.train = self._corpora()
            figures = self._step()
            self.step += 1
            self.seconds = time.time() - began
            if self.step % 50 == 0 or self._done() >= 1:
                self._log({k: float(v) for k, v in figures.items()})
            if self.step % args.measure_every == 0 or self._done() >= 1:
                self._measure()
            if time.time() - saved > SAVE_EVERY_S:
                self._save_state()
                saved = time.time()
        self._save_state()
        final = {name: w.detach().cpu() for name, w in self.weights.items() if name != "embed"}
        save_file({n: w.contiguous() for n, w in final.items()}, args.out / "weights.safetensors")
        print(f"done: {self.step} steps, {self.seconds:.0f} s", flush=True)

    def current(self) -> Weights:
        """The weights as they are used: with their changes rounded, once that has begun."""
        bits = self.args.round_bits
        if not bits or self._done() < self.args.round_from:
            return self.weights
        out = dict(self.weights)
        for name in rounded_names(self.shape.num_layers):
            out[name] = self.round(self.weights[name], self.base[name], bits)
        return out

    def _try_rounding(self) -> None:
        """Compile it and see it work now, not when most of the training is done."""
        for name in rounded_names(1):
            self.round(self.weights[name], self.base[name], self.args.round_bits).sum().backward()
        self.optimiser.zero_grad(set_to_none=True)

    def _step(self) -> dict[str, torch.Tensor]:
        args = self.args
        for group in self.optimiser.param_groups:
            group["lr"] = self._rate() * group["scale"]
        rng = np.random.default_rng((SEED, self.step))
        names = list(self.shares)
        share = np.array(list(self.shares.values()))
        domains = rng.choice(len(names), args.rows, p=share / share.sum())
        rows = np.concatenate([self.train.rows(rng, names[d], 1, ROW_TOKENS) for d in domains])
        ids = torch.from_numpy(rows).to(self.device)
        with torch.no_grad():
            theirs, _ = self.teacher.hidden(self.dense, ids)
        ours, balance = self.student.hidden(self.current(), ids)
        kl, nll = Distance.apply(
            ours[:, :-1].flatten(0, 1), theirs[:, :-1].flatten(0, 1), self.head, ids[:, 1:].flatten(), args.text,
            self.distance,
        )  # fmt: skip
        loss = kl.mean() + args.balance * balance
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(self.trained.values()), 1.0)
        self.optimiser.step()
        figures = {"kl": kl.detach().mean(), "nll": nll.mean(), "balance": balance.detach(), "norm": norm}
        if (self.step + 1) % 50 == 0:
            by_row = kl.detach().view(args.rows, -1).mean(1)
            picked = torch.from_numpy(domains).to(self.device)
            for d in set(domains.tolist()):
                figures[names[d]] = by_row[picked == d].mean()
        return figures

    def _done(self) -> float:
        """Part of the training that is behind us, 0 to 1."""
        return max(self.step / self.args.steps, self.seconds / self.args.most_seconds)

    def _corpora(self) -> Corpora:
        return Corpora(self.args.corpora, self.args.corpora / "tokenizer.json", "train", tuple(self.shares))

    def _rate(self) -> float:
        done = self._done()
        if done < WARMUP:
            return self.args.rate * (done + 1 / self.args.steps) / WARMUP
        return self.args.rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (done - WARMUP) / (1 - WARMUP))))

    def _measure(self) -> None:
        with torch.no_grad():
            found = evaluate(self.measurer, self.current(), self.held, self.domains, self.args.measure_tokens)
        special = found["specialisation"]
        self._log(
            {
                "held_out": {d: round(v["perplexity"], 3) for d, v in found["domains"].items()},
                **{k: special[k] for k in ("layers_at_2x", "layers_at_3x", "experts_unused")},
            }
        )

    def _log(self, figures: dict) -> None:
        line = {"step": self.step, "seconds": round(self.seconds, 1)}
        line |= {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
        with (self.args.out / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)

    def _save_state(self) -> None:
        state = {
            "weights": {n: w.detach() for n, w in self.trained.items()},
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        torch.save(state, self.args.out / "state.tmp")
        (self.args.out / "state.tmp").rename(self.args.out / "state.pt")

    def _resume(self) -> None:
        path = self.args.out / "state.pt"
        if not path.is_file():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        with torch.no_grad():
            for name, weight in self.trained.items():
                weight.copy_(state["weights"][name])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.seconds = state["step"], state["seconds"]
        print(f"resumed at step {self.step}", flush=True)


def distance(ours, theirs, head, labels, text: float):
    """(loss, negative log-likelihood, its gradient by the logits) of a few thousand tokens."""
    q = torch.log_softmax((ours @ head.T).float(), dim=-1)
    p = torch.log_softmax((theirs @ head.T).float(), dim=-1)
    nll = -q.gather(1, labels[:, None])[:, 0]
    loss = (1 - text) * (p.exp() * (p - q)).sum(-1) + text * nll
    target = (1 - text) * p.exp()
    grad = q.exp() - target
    grad = grad.scatter_add(1, labels[:, None], torch.full_like(nll, -text)[:, None]) if text else grad
    return loss, nll, grad.to(ours.dtype)


class Distance(torch.autograd.Function):
    """The loss of every token from final hidden states, in chunks, so that logits never exist for a whole step."""

    CHUNKS = 4

    @staticmethod
    def forward(ctx, ours_TD, theirs_TD, head_VD, labels_T, text: float, function):
        losses, nlls, grads = [], [], []
        pieces = (x.split(-(-len(ours_TD) // Distance.CHUNKS)) for x in (ours_TD, theirs_TD, labels_T))
        for ours, theirs, labels in zip(*pieces, strict=True):
            loss, nll, by_logits = function(ours, theirs, head_VD, labels, text)
            losses.append(loss)
            nlls.append(nll)
            grads.append(by_logits @ head_VD)
        ctx.save_for_backward(torch.cat(grads))
        nll = torch.cat(nlls)
        ctx.mark_non_differentiable(nll)
        return torch.cat(losses), nll

    @staticmethod
    def backward(ctx, by_loss_T, _):
        (grad_TD,) = ctx.saved_tensors
        return grad_TD * by_loss_T[:, None].to(grad_TD.dtype), None, None, None, None, None


if __name__ == "__main__":
    main()
