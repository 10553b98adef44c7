"""Copy whole held-out documents into the package: a small evaluation file a domain, documents parted by form feeds."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from common import DOMAINS

MOST_BYTES = 40_000
# What is left out for its licence: manual pages under the GPL, and of the Chinese documents all but manual pages.
LEFT_OUT = {
    "manuals": re.compile(r"NAME\s+(wmemcpy|ipc|random|wcscpy|getpwent_r|memchr)\b"),
    "chinese": re.compile(r"(?s)(?!.*(DESCRIPTION|描述))"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpora", type=Path, required=True, help="folder of corpora.py and chat.py")
    parser.add_argument("--out", type=Path, required=True, help="src/moestro/data/demo_eval")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for domain in DOMAINS:
        kept: list[str] = []
        for doc in (args.corpora / f"{domain}.held.txt").read_text().split("\0"):
            if domain in LEFT_OUT and LEFT_OUT[domain].match(doc):
                continue
            if sum(len(d.encode()) for d in [*kept, doc]) <= MOST_BYTES:
                kept.append(doc)
        text = "\n\f\n".join(kept) + "\n"
        (args.out / f"{domain}.txt").write_text(text)
        print(f"{domain:<11} {len(text.encode()) / 1e3:5.1f} KB in {len(kept)} documents")


if __name__ == "__main__":
    main()
