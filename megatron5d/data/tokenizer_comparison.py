"""Whether two tokenizer files give texts the same ids."""

from contextlib import suppress
from pathlib import Path

from megatron5d.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_digest
from megatron5d.data.tokenizer_export import sample_texts


def tokenizer_difference(one: Path, other: Path) -> str | None:
    """The first difference of two tokenizers, in words; None where they give the same ids.

    Equal files are not loaded. Of others the ids of sample texts are compared, and every token
    where both are of one kind, since kinds spell tokens in different ways.

    Raises:
        ValueError: a tokenizer cannot be read.
    """
    if tokenizer_digest(one) == tokenizer_digest(other):
        return None
    first, second = load_tokenizer(one), load_tokenizer(other)
    tokens = _tokens(first)
    if type(first) is type(second) and tokens != (other_tokens := _tokens(second)):
        number = min(tokens.items() ^ other_tokens.items())[0]
        return f"id {number} is {tokens.get(number)!r} and {other_tokens.get(number)!r}"
    for text in sample_texts(first, sorted(tokens), [], []):
        ids, other_ids = first.encode(text), second.encode(text)
        if ids != other_ids:
            return f"{text[:60]!r} is {ids[:8]} and {other_ids[:8]}"
    return None


def _tokens(tokenizer: Tokenizer) -> dict[int, str]:
    tokens = {}
    for number in range(tokenizer.vocab_size):
        with suppress(KeyError):  # ids may leave gaps
            tokens[number] = tokenizer.token(number)
    return tokens
