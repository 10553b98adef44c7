"""Split every FFN of the dense model into a shared expert and routed ones, from measured activations.

Shared: the neurons with the largest mean |activation| times the length of their column in the down projection. The
rest are grouped into equal clusters of neurons that fire for the same tokens (balanced k-means on the cosine
co-activation of each token's top tenth). The router is a least-squares fit from the FFN's input to the logarithm of
each expert's output norm; the down projections are then refitted, by ridge regression, so that the sparse output
comes close to the dense one.

Writes order [L, F] (neurons in their new order), router [L, E, D] and down [L, D, F] (refitted) as safetensors.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from common import (
    DOMAINS,
    ROW_TOKENS,
    SEED,
    Corpora,
    Runner,
    Split,
    Weights,
    attention,
    dense_ffn,
    layer_parts,
    neuron_mask,
    read_dense,
    rms_norm,
    rope_tables,
    route,
    save_tokenizer,
)
from safetensors.torch import load_file, save_file
from torch import nn

TOP_SHARE = 0.1
ROUTER_RIDGE = 1e-3
DOWN_RIDGE = 0.03
LOGIT_STD = 0.3  # experts' weights start within about a third of each other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--corpora", type=Path, required=True, help="folder of corpora.py")
    parser.add_argument("--split", type=Split.parse, required=True, help="shared,experts,expert width,top k")
    parser.add_argument("--random", choices=("no", "experts", "all"), default="no", help="draw neurons at random")
    parser.add_argument("--without", nargs="*", default=[], help="domains to leave out (trials before chat.py has run)")
    parser.add_argument("--rows", type=int, default=10, help=f"rows of {ROW_TOKENS} tokens a domain to measure on")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, weights = read_dense(args.gguf)
    weights = {name: w.to(device) for name, w in weights.items()}
    save_tokenizer(args.gguf, args.corpora)
    domains = tuple(d for d in DOMAINS if d not in args.without)
    train = Corpora(args.corpora, args.corpora / "tokenizer.json", "train", domains)
    runner = Runner(shape, None, device, torch.float32)
    start = time.time()
    made = carve(runner, weights, calibration_rows(train, args.rows, device), args.split, args.random)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous().cpu() for k, v in made.items()}, args.out)
    print(f"carved {args.split} (random: {args.random}) in {time.time() - start:.1f} s", flush=True)


def calibration_rows(train: Corpora, rows: int, device: torch.device) -> torch.Tensor:
    rng = np.random.default_rng(SEED)
    return torch.from_numpy(np.concatenate([train.rows(rng, d, rows, ROW_TOKENS) for d in train.streams])).to(device)


@torch.no_grad()
def carve(runner: Runner, weights: Weights, ids_BT: torch.Tensor, split: Split, random: str = "no") -> Weights:
    """order, router and down of every layer; see the module's text."""
    shape = runner.shape
    cos, sin = rope_tables(shape, ids_BT.shape[1], runner.device)
    x_BTD = nn.functional.embedding(ids_BT, weights["embed"]).float()
    rng = np.random.default_rng(SEED)
    orders, routers, downs = [], [], []
    for i in range(shape.num_layers):
        norms, attn, ffn = layer_parts(weights, i, sparse=False)
        after = [x + attention(rms_norm(x, norms[0], shape.eps), attn, cos, sin, shape) for x in x_BTD.split(16)]
        x_BTD = torch.cat(after)
        input_TD = rms_norm(x_BTD, norms[1], shape.eps).reshape(-1, shape.width)
        order, router, down = carve_layer(input_TD, *ffn, split, random, rng)
        orders.append(order.short())
        routers.append(router)
        downs.append(down)
        x_BTD = x_BTD + dense_ffn(input_TD, ffn).view_as(x_BTD)
    return {"order": torch.stack(orders), "router": torch.stack(routers), "down": torch.stack(downs)}


def carve_layer(x_TD, gate_FD, up_FD, down_DF, split: Split, random: str, rng: np.random.Generator):
    """(order [F], router [E, D], refitted down [D, F] in the new order) of one layer."""
    hidden_TF = nn.functional.silu(x_TD @ gate_FD.T) * (x_TD @ up_FD.T)
    strength_TF = hidden_TF.abs() * down_DF.norm(dim=0)
    by_importance = strength_TF.mean(dim=0).argsort(descending=True)
    if random == "all":
        order = torch.from_numpy(rng.permutation(split.neurons)).to(x_TD.device)
    elif random == "experts":
        rest = by_importance[split.shared :]
        order = torch.cat(
            (by_importance[: split.shared], rest[torch.from_numpy(rng.permutation(len(rest))).to(rest.device)])
        )
    else:
        rest = by_importance[split.shared :]
        groups = cluster(strength_TF, rest, split, rng)
        order = torch.cat((by_importance[: split.shared], rest[groups]))
    hidden_TF, down_DF = hidden_TF[:, order], down_DF[:, order]
    router = fit_router(x_TD, hidden_TF, down_DF, split)
    _, chosen = route(x_TD, router, split)
    masked_TF = hidden_TF * neuron_mask(x_TD, chosen, torch.zeros_like(x_TD[0]), split)
    return order, router, refit_down(masked_TF, hidden_TF @ down_DF.T, down_DF)


def cluster(strength_TF, rest: torch.Tensor, split: Split, rng: np.random.Generator, rounds: int = 12) -> torch.Tensor:
    """Positions within rest, experts one after another: balanced spherical k-means on who fires together."""
    top = strength_TF.topk(int(TOP_SHARE * strength_TF.shape[1]), dim=1).indices
    fired_TF = torch.zeros_like(strength_TF).scatter_(1, top, 1.0)[:, rest]
    fired_TF = fired_TF / fired_TF.norm(dim=0).clamp(min=1)
    likeness_RR = fired_TF.T @ fired_TF
    value, vector = torch.linalg.eigh(likeness_RR.double())
    point_RC = (vector[:, -128:] * value[-128:].clamp(min=0).sqrt()).float()
    point_RC = nn.functional.normalize(point_RC, dim=1)
    centre_EC = point_RC[first_centres(point_RC, split.num_experts, rng)]
    for _ in range(rounds):
        owner = assign_evenly((point_RC @ centre_EC.T).cpu().numpy(), split.expert_width)
        owner = torch.from_numpy(owner).to(rest.device)
        sums = torch.zeros_like(centre_EC).index_add_(0, owner, point_RC)
        centre_EC = nn.functional.normalize(sums, dim=1)
    return owner.argsort(stable=True)


def first_centres(point_RC: torch.Tensor, count: int, rng: np.random.Generator) -> list[int]:
    """k-means++: far apart, by chance."""
    chosen = [int(rng.integers(len(point_RC)))]
    while len(chosen) < count:
        distance = (1 - (point_RC @ point_RC[chosen].T).amax(dim=1)).clamp(min=0).double().cpu().numpy()
        chosen.append(int(rng.choice(len(point_RC), p=distance / distance.sum())))
    return chosen


def assign_evenly(likeness_RE: np.ndarray, size: int) -> np.ndarray:
    """Give every row to a column, `size` rows each, most certain pairs first."""
    rows, columns = likeness_RE.shape
    owner, free = np.full(rows, -1), np.full(columns, size)
    for flat in np.argsort(-likeness_RE, axis=None, kind="stable"):
        row, column = divmod(int(flat), columns)
        if owner[row] < 0 and free[column]:
            owner[row] = column
            free[column] -= 1
    return owner


def fit_router(x_TD, hidden_TF, down_DF, split: Split) -> torch.Tensor:
    """Ridge regression without bias to log output norms, centred a token; scaled to LOGIT_STD."""
    routed_TEN = hidden_TF[:, split.shared :].unflatten(1, (split.num_experts, split.expert_width))
    routed_DEN = down_DF[:, split.shared :].unflatten(1, (split.num_experts, split.expert_width))
    norms_TE = torch.stack(
        [(routed_TEN[:, e] @ routed_DEN[:, e].T).norm(dim=1) for e in range(split.num_experts)], dim=1
    )
    target = norms_TE.clamp(min=1e-6).log()
    target = target - target.mean(dim=1, keepdim=True)
    gram = (x_TD.T @ x_TD).double()
    gram += ROUTER_RIDGE * gram.diagonal().mean() * torch.eye(len(gram), device=gram.device)
    router_ED = torch.linalg.solve(gram, (x_TD.T @ target).double()).T.float()
    logits = x_TD @ router_ED.T
    return router_ED * (LOGIT_STD / (logits - logits.mean(dim=1, keepdim=True)).std())


def refit_down(masked_TF, output_TD, down_DF) -> torch.Tensor:
    """down plus the ridge solution for what is missing; tokens weighted by 1 / |output|."""
    weight_T1 = 1 / output_TD.norm(dim=1, keepdim=True).clamp(min=1e-3)
    missing_TD = output_TD - masked_TF @ down_DF.T
    gram = ((masked_TF * weight_T1).T @ masked_TF).double()
    gram += torch.diag(DOWN_RIDGE * gram.diagonal() + 1e-9)
    change = torch.linalg.solve(gram, ((masked_TF * weight_T1).T @ missing_TD).double())
    return down_DF + change.T.float()


def load_carved(path: Path, weights: Weights, refit: bool) -> Weights:
    """Weights of the sparse model before training."""
    from common import permute_neurons

    made = {k: v.to(weights["embed"].device) for k, v in load_file(path).items()}
    out = permute_neurons(weights, made["order"].long())
    for i in range(len(made["order"])):
        out[f"{i}.router"] = made["router"][i]
        out[f"{i}.shared_gate"] = torch.zeros_like(made["router"][i, 0])
        if refit:
            out[f"{i}.down"] = made["down"][i]
    return out


if __name__ == "__main__":
    main()
