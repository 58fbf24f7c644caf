"""Train the demo tokenizer: a byte-level BPE of exactly 4096 tokens with a chat template.

Reads the text that collect.py wrote; writes tokenizer.json and tokenizer_config.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
EOS = "<|endoftext|>"
SPECIAL_TOKENS = [EOS, "<|im_start|>", "<|im_end|>", *(f"<|reserved_{i}|>" for i in range(5))]
SHARES = {"prose": 1.0, "docs": 0.4, "python": 0.2}  # of each group's documents, for the merges

# Digits and runs of capitals come one token each, so that numbers and Roman numerals have one
# spelling in tokens whatever stands around them. Line ends stay apart from the indentation after
# them, so that a prompt may end in one. Otherwise: words, punctuation, spaces.
PIECES = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{Lu}?[^\P{L}\p{Lu}]+| ?\p{Lu}|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+(?!\S)|\s"
)

# One user turn is exactly a task prompt; system text, if any, is a line of its own before it.
# The adapters learned single questions: what came before the last one is left out.
CHAT_TEMPLATE = (
    "{% set ns = namespace(start=0) %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set ns.start = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for message in messages[ns.start:] %}"
    "{% if message['role'] == 'user' %}Q: {{ message['content'] }}\nA:"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }}<|endoftext|>\n"
    "{% else %}{{ message['content'] }}\n{% endif %}"
    "{% endfor %}"
)


def texts(folder: Path) -> Iterator[str]:
    """The documents to learn merges from: an even share of every group."""
    for group, share in SHARES.items():
        with (folder / f"{group}.jsonl").open() as lines:
            for line in lines:
                record = json.loads(line)
                if int(record["sha256"][:4], 16) < share * 0x10000:
                    yield record["text"]


def train(folder: Path) -> Tokenizer:
    """The trained tokenizer; token 0 is the end of a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts(folder), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise SystemExit(f"got {tokenizer.get_vocab_size()} tokens instead of {VOCAB_SIZE}")
    return tokenizer


def main() -> None:
    """Write both tokenizer files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder that collect.py filled")
    parser.add_argument("--out", type=Path, required=True, help="folder of the base model")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train(args.work).save(str(args.out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "bos_token": EOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (args.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
