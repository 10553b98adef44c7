"""Draw docs/demo-model's pictures, as SVG, from the files of evaluate.py and train.py."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

COLOURS = {
    "prose": "#4e79a7",
    "manuals": "#76b7b2",
    "code": "#59a14f",
    "dictionary": "#b07aa1",
    "chinese": "#e15759",
    "arithmetic": "#edc948",
    "chat": "#f28e2b",
}
LEAST, MOST = 1.0, 4.0  # ratios drawn white and in full colour
STYLE = 'font-family="sans-serif" font-size="11"'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figures", type=Path, required=True, help="JSON of evaluate.py")
    parser.add_argument("--row", required=True, help="which of its rows to draw the experts of")
    parser.add_argument(
        "--logs", type=Path, nargs="*", default=[], help="log.jsonl of trainings; the name is the label"
    )
    parser.add_argument("--dense", type=json.loads, help="the dense model's perplexities on the logs' held-out tokens")
    parser.add_argument("--out", type=Path, required=True, help="folder for experts.svg and training.svg")
    args = parser.parse_args()
    row = json.loads(args.figures.read_text())[args.row]
    (args.out / "experts.svg").write_text(experts(row["share"], list(row["domains"])))
    if args.logs:
        (args.out / "training.svg").write_text(training(args.logs, args.dense))


def experts(share_LED: list, domains: list[str]) -> str:
    """A square an expert and layer: colour, the domain of its largest share; strength, that share over its overall."""
    size, left, top = 20, 60, 70
    num_layers, num_experts = len(share_LED), len(share_LED[0])
    width, height = left + num_experts * size + 10, top + num_layers * size + 30
    parts = []
    for i, domain in enumerate(domains):
        x = left + i * 72
        parts.append(f'<rect x="{x}" y="12" width="11" height="11" fill="{COLOURS[domain]}"/>')
        parts.append(f'<text x="{x + 14}" y="22">{domain}</text>')
    parts.append(
        f'<text x="{left}" y="42">strength: share of the domain\'s tokens over the share of all, 1 to 4; dot: '
    )
    parts.append("3 or more</text>")
    for layer, experts_ED in enumerate(share_LED):
        y = top + layer * size
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{layer}</text>')
        # Sorted by domain and strength: the order of a layer's experts means nothing.
        cells = sorted(
            ((domains[max(range(len(s)), key=s.__getitem__)], max(s) * len(s) / max(sum(s), 1e-9)) for s in experts_ED),
            key=lambda cell: (domains.index(cell[0]), -cell[1]),
        )
        for column, (domain, ratio) in enumerate(cells):
            x = left + column * size
            strength = min(max((ratio - LEAST) / (MOST - LEAST), 0), 1)
            parts.append(f'<rect x="{x}" y="{y}" width="{size - 2}" height="{size - 2}" fill="{COLOURS[domain]}" '
                         f'fill-opacity="{strength:.2f}" stroke="#ddd"/>')  # fmt: skip
            if ratio >= 3:
                parts.append(f'<circle cx="{x + size / 2 - 1}" cy="{y + size / 2 - 1}" r="2"/>')
    parts.append(f'<text x="14" y="{top - 8}">layer</text>')
    parts.append(f'<text x="{left}" y="{height - 10}">experts of the layer, grouped by domain</text>')
    return _svg(width, height, parts)


def training(logs: list[Path], dense: dict[str, float]) -> str:
    """Held-out perplexity over the dense model's, by minutes of training; a panel a domain."""
    runs = []
    for path in logs:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        runs.append((path.stem, [(x["seconds"] / 60, x["held_out"]) for x in lines if "held_out" in x]))
    panel, height, low, high, minutes = 240, 230, 0.9, 1.5, 15.0
    parts = []
    for i, (domain, perplexity) in enumerate(dense.items()):
        left = 45 + i * (panel + 60)

        def at(x: float, y: float, left: float = left) -> tuple[float, float]:
            return left + x / minutes * panel, 30 + (high - min(y, high)) / (high - low) * (height - 70)

        parts.append(f'<text x="{left}" y="18" font-weight="bold">{domain}</text>')
        for level in (0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5):
            _, y = at(0, level)
            parts.append(f'<path d="M{left} {y:.1f}h{panel}" stroke="{"#888" if level in (1.0, 1.1) else "#e4e4e4"}"/>')
            parts.append(f'<text x="{left - 4}" y="{y + 4:.1f}" text-anchor="end">{level:.1f}</text>')
        for minute in (0, 5, 10, 15):
            parts.append(f'<text x="{at(minute, low)[0]:.1f}" y="{height - 22}" text-anchor="middle">{minute}</text>')
        for (name, points), colour in zip(runs, COLOURS.values(), strict=False):
            places = [at(x, held[domain] / perplexity) for x, held in points]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in places]
            parts.append(f'<text x="{places[-1][0] + 5:.1f}" y="{places[-1][1] - 5:.1f}" fill="{colour}">{name}</text>')
    parts.append(f'<text x="45" y="{height - 6}">minutes of training; perplexity over the dense model\'s</text>')
    return _svg(45 + len(dense) * (panel + 60) + 15, height, parts)


def _svg(width: int, height: int, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {STYLE}>'
    return "\n".join((head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>", ""))


if __name__ == "__main__":
    main()
