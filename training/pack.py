"""Encode the collected text into token files: {group}.{train,heldout}.u16.xz, little-endian uint16.

Every document ends in the end token. A small share of the documents, chosen by their hash, is held
out. The group "drills" is made here from a seed; it has no held-out part.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training.drills import drill

HELDOUT_SHARES = {"prose": 0.04, "docs": 0.01, "python": 0.01}  # of each group's documents
NUM_DRILLS = 150_000
BATCH = 512
EOS_ID = 0


def read(path: Path) -> Iterator[tuple[bool, str]]:
    """(is held out, text) of each document of a group."""
    share = HELDOUT_SHARES[path.stem]
    with path.open() as lines:
        for line in lines:
            record = json.loads(line)
            yield int(record["sha256"][:8], 16) < share * 2**32, record["text"]


def common_words(path: Path, count: int) -> list[str]:
    """The most frequent lower-case words of a group."""
    words: Counter[str] = Counter()
    for _, text in read(path):
        words.update(re.findall(r"\b[a-z]{3,9}\b", text))
    return [word for word, _ in words.most_common(count)]


def encode(tokenizer: Tokenizer, texts: list[str]) -> NDArray[np.uint16]:
    """All texts as one row of ids, each followed by the end token."""
    ids: list[int] = []
    for start in range(0, len(texts), BATCH):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + BATCH]):
            ids.extend(encoding.ids)
            ids.append(EOS_ID)
    return np.asarray(ids, dtype="<u2")


def write(path: Path, ids: NDArray[np.uint16]) -> None:
    """Compress one token file."""
    path.write_bytes(lzma.compress(ids.tobytes(), preset=4))
    print(f"{path.name}: {ids.size:,} tokens, {path.stat().st_size:,} bytes", flush=True)


def main() -> None:
    """Write every token file and the record of the sources beside them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder that collect.py filled")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for the token files")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    counts = {}
    for group in HELDOUT_SHARES:
        rows = list(read(args.work / f"{group}.jsonl"))
        for split, is_heldout in (("train", False), ("heldout", True)):
            ids = encode(tokenizer, [text for held, text in rows if held == is_heldout])
            counts[f"{group}.{split}"] = ids.size
            write(args.out / f"{group}.{split}.u16.xz", ids)
    rng, words = random.Random(args.seed), common_words(args.work / "prose.jsonl", 3000)
    ids = encode(tokenizer, [drill(rng, words) for _ in range(NUM_DRILLS)])
    counts["drills.train"] = ids.size
    write(args.out / "drills.train.u16.xz", ids)
    sources = json.loads((args.work / "sources.json").read_text())
    listing = json.dumps({"sources": sources, "tokens": counts}, indent=1)
    (args.out / "data.json").write_text(listing + "\n")


if __name__ == "__main__":
    main()
