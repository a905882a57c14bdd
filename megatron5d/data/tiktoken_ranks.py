"""Reads tiktoken files, and knows what they do not say: the pattern that splits text, and the special tokens.

The number of ranks in a file tells which published vocabulary it is. Any other vocabulary gets the cl100k pattern and
one special token after the last rank.

Source: openai/tiktoken, tiktoken_ext/openai_public.py; meta-llama/llama-models, llama3/tokenizer.py.
"""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
CL100K_PATTERN = (
    CONTRACTIONS + r"""|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K_PATTERN = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{CONTRACTIONS}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{CONTRACTIONS}?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
LLAMA3_RANKS = 128_000
LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>"]
LLAMA3_NUM_SPECIAL = 256

# ranks in the file -> (pattern, special tokens)
PUBLISHED: dict[int, tuple[str, dict[str, int]]] = {
    50256: (GPT2_PATTERN, {"<|endoftext|>": 50256}),
    50280: (GPT2_PATTERN, {"<|endoftext|>": 50256}),  # p50k_base leaves a gap at 50256
    100256: (CL100K_PATTERN, {"<|endoftext|>": 100257, "<|endofprompt|>": 100276}),
    199998: (O200K_PATTERN, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
    LLAMA3_RANKS: (
        CL100K_PATTERN,
        {
            (LLAMA3_SPECIAL[i] if i < len(LLAMA3_SPECIAL) else f"<|special_{i}|>"): LLAMA3_RANKS + i
            for i in range(LLAMA3_NUM_SPECIAL)
        },
    ),
}


def looks_like_ranks(head: bytes) -> bool:
    """Whether a file with this beginning is a list of base64 tokens and ranks."""
    return re.fullmatch(rb"[A-Za-z0-9+/]+={0,2} \d+\r?", head.split(b"\n", 1)[0]) is not None


def read_ranks(path: Path) -> tuple[dict[bytes, int], str, dict[str, int]]:
    """Reads a tiktoken file.

    Args:
        path: of the file.

    Returns:
        token -> rank; the pattern that splits text; special token -> id.

    Raises:
        ValueError: a line is not a base64 token and a rank (names the line), two tokens have the same rank, or a single
            byte is not a token.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"{path}:{number}: {line[:60]!r} is not 'base64-token rank'") from None
    if len(set(ranks.values())) != len(ranks):
        raise ValueError(
            f"{path}: {len(ranks)} tokens share {len(set(ranks.values()))} ranks; each rank is one token's"
        )
    if lacking := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(
            f"{path}: {len(lacking)} of the 256 bytes are no tokens (0x{lacking[0]:02x} is the first), and a text that "
            "has them could not be encoded: the file is not whole"
        )
    after = max(ranks.values()) + 1
    return ranks, *PUBLISHED.get(len(ranks), (CL100K_PATTERN, {"<|endoftext|>": after}))
