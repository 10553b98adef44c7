"""Build the text corpora of the demo model from Debian packages: one file a domain for training, one held out.

Documents are separated by a NUL. A document is held out by the hash of its name, so that training and held-out text
never share a file. Arithmetic is generated; prompts for the chat corpus (see chat.py) are written alongside.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import random
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGES = (  # noqa: SIM905 - one name a line would be longer and no clearer
    "python3.11-doc anarchism debian-reference-en debian-policy developers-reference dict-jargon debian-handbook "
    "manpages manpages-dev git-man perl-doc libpython3.11-stdlib libpython3.11-minimal libpython3.11-testsuite "
    "python3-django python3-networkx wordnet-base dict-gcide manpages-zh debian-reference-zh-cn fortunes-zh"
).split()
TRAIN_BYTES = {
    "prose": 22e6,
    "manuals": 16e6,
    "code": 30e6,
    "dictionary": 18e6,
    "chinese": 10e6,
    "arithmetic": 5e6,
}
HELD_OUT_BYTES = {
    "prose": 130e3,
    "manuals": 120e3,
    "code": 110e3,
    "dictionary": 130e3,
    "chinese": 60e3,
    "arithmetic": 60e3,
}
# Held-out text comes from these packages alone: their licences let small parts travel with moestro (see its NOTICE).
HELD_OUT_FROM = {
    "prose": ("python3.11-doc",),
    "manuals": ("manpages", "manpages-dev"),
    "code": ("libpython3.11-stdlib", "libpython3.11-minimal"),
    "dictionary": ("wordnet-base",),
    "chinese": ("manpages-zh", "fortunes-zh"),
}
DOC_BYTES = 40_000
SEED = 7

Doc = tuple[str, str, str]  # package, name, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=Path, required=True, help="folder for the packages, unpacked in PACKAGES/x")
    parser.add_argument("--out", type=Path, required=True, help="folder for DOMAIN.train.txt, DOMAIN.held.txt, prompts")
    parser.add_argument("--download", action="store_true", help="fetch the packages with apt-get first and unpack them")
    args = parser.parse_args()
    if args.download:
        download(args.packages)
    root = args.packages / "x"
    args.out.mkdir(parents=True, exist_ok=True)
    sources = {
        "prose": prose(root),
        "manuals": manuals(root),
        "code": code(root),
        "dictionary": dictionary(root),
        "chinese": chinese(root),
        "arithmetic": arithmetic(),
    }
    for domain, docs in sources.items():
        write_domain(args.out, domain, docs)
    write_prompts(root, args.out)


def download(folder: Path) -> None:
    debs = folder / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", "-qq", *PACKAGES], cwd=debs, check=True)
    for deb in sorted(debs.glob("*.deb")):
        target = folder / "x" / deb.name.split("_")[0]
        target.mkdir(parents=True, exist_ok=True)
        subprocess.run(["dpkg", "-x", str(deb), str(target)], check=True)


def write_domain(out: Path, domain: str, docs: Iterable[Doc]) -> None:
    """Documents in the order of their names' hashes, up to the domain's sizes."""
    ordered = sorted(docs, key=lambda d: _rank(d[0] + d[1]))
    held_from = HELD_OUT_FROM.get(domain)
    parts: dict[str, list[str]] = {"held": [], "train": []}
    sizes = {"held": 0, "train": 0}
    limits = {"held": HELD_OUT_BYTES[domain], "train": TRAIN_BYTES[domain]}
    for package, name, text in ordered:
        text = text.replace("\0", "").strip()[:DOC_BYTES]
        if len(text) < 200:
            continue
        may = held_from is None or package in held_from
        part = "held" if may and sizes["held"] < limits["held"] and _rank(name + "?") % 4 == 0 else "train"
        if part == "held":
            text = text[:12_000]  # more documents rather than long ones
        if sizes[part] < limits[part]:
            parts[part].append(text)
            sizes[part] += len(text.encode())
    for part, texts in parts.items():
        (out / f"{domain}.{part}.txt").write_text("\0".join(texts))
    print(f"{domain:<11} train {sizes['train'] / 1e6:6.2f} MB in {len(parts['train'])} documents, "
          f"held out {sizes['held'] / 1e3:6.1f} KB in {len(parts['held'])}")  # fmt: skip


def _rank(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _files(root: Path, package: str, pattern: str) -> Iterator[tuple[str, str, Path]]:
    for path in sorted((root / package).rglob(pattern)):
        if path.is_file() and not path.is_symlink():
            yield package, str(path.relative_to(root / package)), path


def _read(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        data = gzip.decompress(data)
    return data.decode("utf-8", errors="replace")


def prose(root: Path) -> Iterator[Doc]:
    for package, name, path in _files(root, "python3.11-doc", "*.rst.txt"):
        if "changelog" not in name:
            yield package, name, _read(path)
    for package in ("anarchism", "debian-reference-en", "debian-policy", "developers-reference"):
        for _, name, path in _files(root, package, "*.html"):
            yield package, name, _from_html(_read(path))
    for _, name, path in _files(root, "debian-handbook", "*.html"):
        if "/en-US/" in name:
            yield "debian-handbook", name, _from_html(_read(path))
    for _, name, path in _files(root, "dict-jargon", "*.dict.dz"):
        text = _read(path)
        for i in range(0, len(text), 20_000):
            yield "dict-jargon", f"{name}:{i}", text[i : i + 20_000]


def manuals(root: Path) -> Iterator[Doc]:
    for package in ("manpages", "manpages-dev", "git-man", "perl-doc"):
        for _, name, path in _files(root, package, "*.gz"):
            if "/man/" in name:
                yield package, name, _from_roff(_read(path))


def code(root: Path) -> Iterator[Doc]:
    for package in (
        "libpython3.11-stdlib",
        "libpython3.11-minimal",
        "libpython3.11-testsuite",
        "python3-django",
        "python3-networkx",
    ):
        for _, name, path in _files(root, package, "*.py"):
            yield package, name, _read(path)


def dictionary(root: Path) -> Iterator[Doc]:
    for part in ("noun", "verb", "adj", "adv"):
        entries = []
        for line in _read(root / f"wordnet-base/usr/share/wordnet/data.{part}").splitlines():
            if not line.startswith("  "):
                head, _, gloss = line.partition(" | ")
                fields = head.split(" ")
                words = [fields[4 + 2 * i].replace("_", " ") for i in range(int(fields[3], 16))]
                entries.append(f"{', '.join(words)} ({part}): {gloss.strip()}")
        for i in range(0, len(entries), 50):
            yield "wordnet-base", f"{part}:{i}", "\n".join(entries[i : i + 50])
    text = _read(root / "dict-gcide/usr/share/dictd/gcide.dict.dz")
    # Entries taken over from WordNet would leak its held-out glosses.
    entries = [e for e in re.split(r"\n\n(?=\S)", text) if "WordNet" not in e]
    for i in range(0, len(entries), 40):
        yield "dict-gcide", str(i), "\n\n".join(entries[i : i + 40])


def chinese(root: Path) -> Iterator[Doc]:
    for package, name, path in _files(root, "manpages-zh", "*.gz"):
        if "zh_CN/" in name:
            text = _from_roff(_read(path))
            if sum("\u4e00" <= c <= "\u9fff" for c in text) > 0.2 * len(text):
                yield package, name, text
    for package, name, path in _files(root, "debian-reference-zh-cn", "ch*.html"):
        yield package, name, _from_html(_read(path))
    for kind in ("tang300", "song100", "chinese"):
        text = re.sub(r"\x1b\[\d*m", "", _read(root / f"fortunes-zh/usr/share/games/fortunes/{kind}"))
        pieces = text.split("\n%\n")
        for i in range(0, len(pieces), 10):
            yield "fortunes-zh", f"{kind}:{i}", "\n\n".join(pieces[i : i + 10])


def arithmetic() -> Iterator[Doc]:
    rng = random.Random(SEED)
    for i in range(4000):
        yield "generated", str(i), "\n".join(_sum(rng) for _ in range(40))


def _sum(rng: random.Random) -> str:
    a, b, c = rng.randint(2, 10 ** rng.randint(1, 3)), rng.randint(2, 10 ** rng.randint(1, 3)), rng.randint(2, 12)
    who, what = rng.choice(("Anna", "Ben", "Mei", "Omar", "Lucy", "Tom")), rng.choice(("apples", "coins", "books"))
    return rng.choice(
        (
            f"{a} + {b} = {a + b}",
            f"{a + b} - {b} = {a}",
            f"{a} * {c} = {a * c}",
            f"{a * c} / {c} = {a}",
            f"Question: What is {a} plus {b}?\nAnswer: {a} + {b} = {a + b}.",
            f"Question: {who} has {a} {what} and gets {b} more. How many {what} does {who} have?\n"
            f"Answer: {a} + {b} = {a + b} {what}.",
            f"Question: {who} puts {c} {what} into each of {a} boxes. How many {what} are there?\n"
            f"Answer: {a} * {c} = {a * c} {what}.",
            f"{a} is {'greater than' if a > b else 'less than' if a < b else 'equal to'} {b}.",
            f"({a} + {b}) * {c} = {a + b} * {c} = {(a + b) * c}",
            f"Count on by {c}: " + ", ".join(str(a + c * i) for i in range(6)),
            f"{c * 10}% of {a * 10} is {a * c}.",
            f"{a * c} = {a} * {c}, so the remainder of {a * c + 1} divided by {c} is 1.",
        )
    )


def _from_html(text: str) -> str:
    text = re.sub(r"(?s)<(script|style|head)\b.*?</\1>", "", text)
    text = re.sub(r"(?i)</?(p|div|li|h\d|tr|table|ul|ol|dl|dt|dd|pre|blockquote)\b[^>]*>|<br[^>]*>", "\n", text)
    text = html.unescape(re.sub(r"<[^>]+>", "", text))
    return re.sub(r"\n\s*\n+", "\n\n", text)


def _from_roff(text: str) -> str:
    """The words of a manual page: headings, paragraphs and fonts' arguments; tables and conditionals are dropped."""
    lines = []
    skipping = False
    for line in text.splitlines():
        if line.startswith((".TS", ".ig", ".de", ".nr", ".if", ".ie", ".el")):
            skipping = line.startswith((".TS", ".ig", ".de"))
            continue
        if skipping:
            skipping = not line.startswith((".TE", ".."))
            continue
        if line.startswith((".", "'")):
            macro, _, rest = line[1:].strip().partition(" ")
            if macro in ("SH", "SS"):
                lines += ["", rest.strip('"'), ""]
            elif macro in ("B", "I", "SM", "SB"):
                lines.append(rest.replace('"', ""))
            elif macro in ("BR", "RB", "IR", "RI", "BI", "IB"):
                lines.append("".join(a or b for a, b in re.findall(r'"([^"]*)"|(\S+)', rest)))
            elif macro in ("PP", "TP", "IP", "LP", "P", "sp"):
                lines.append("")
                if macro == "IP" and rest:
                    lines.append(rest.partition(" ")[0].strip('"'))
            continue
        if not re.match(r"\\+[$hkn(]", line):  # bodies of macros
            lines.append(line)
    text = "\n".join(lines)
    text = re.sub(r"\\f\(?..?|\\[&,/|^c%:]|\\s[-+]?\d", lambda m: m[0][3:] if m[0].startswith("\\f") else "", text)
    named = {"aq": "'", "dq": '"', "lq": '"', "rq": '"', "em": "-", "en": "-", "ti": "~", "ha": "^", "bu": "*"}
    text = re.sub(r"\\\((..)|\\\[(\w+)\]", lambda m: named.get(m[1] or m[2], ""), text)
    text = re.sub(r"\\\*\S|\\\".*", "", text).replace("\\-", "-").replace("\\e", "\\").replace("\\ ", " ")
    return re.sub(r"\n\n+", "\n\n", text)


_ASK = (
    "What is {x}?",
    "Explain {x} to a child.",
    "Tell me about {x}.",
    "Why is {x} important?",
    "Write a short story about {x}.",
    "Give me three facts about {x}.",
    "Write a poem about {x}.",
    "What is the difference between {x} and {y}?",
    "Write an email to a colleague about {x}.",
    "List five uses of {x}.",
    "How does {x} work?",
    "Summarize the history of {x}.",
    "Use the word {x} in a sentence.",
    "Write a Python function that works with {x} and {y}.",
    "Write a Python class for a {x}.",
    "How can I learn more about {x}?",
    "Give an example of {x}.",
    "Is {x} good or bad? Explain.",
)
_ASK_NUMBER = (
    "What is {a} + {b}?",
    "What is {a} times {b}?",
    "Write a Python program that prints the numbers from {a} to {b}.",
)


def write_prompts(root: Path, out: Path) -> None:
    """Questions about common nouns of WordNet, one a line."""
    nouns = []
    for line in _read(root / "wordnet-base/usr/share/wordnet/index.noun").splitlines():
        fields = line.split()
        if line.startswith("  ") or not fields[0].isalpha() or len(fields[0]) < 3:
            continue
        # Pointer symbols come between; of the two counts behind them, senses and tagged senses, the second.
        if int(fields[4 + int(fields[3]) + 1]) >= 1:
            nouns.append(fields[0])
    rng = random.Random(SEED)
    lines = []
    for _ in range(12_000):
        if rng.random() < 0.06:
            lines.append(rng.choice(_ASK_NUMBER).format(a=rng.randint(1, 99), b=rng.randint(2, 99)))
        else:
            lines.append(rng.choice(_ASK).format(x=rng.choice(nouns), y=rng.choice(nouns)))
    (out / "prompts.txt").write_text("\n".join(dict.fromkeys(lines)))
    print(f"prompts     {len(lines)} over {len(nouns)} nouns")


if __name__ == "__main__":
    main()
