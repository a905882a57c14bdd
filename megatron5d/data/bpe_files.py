"""Byte-level BPE files: tiktoken's lists of base64 tokens, tekken.json, vocab.json with merges.txt.

A tiktoken file holds ranks alone. The pattern that splits text and the special tokens follow from
the number of ranks of the published vocabularies; for any other number, tokenizer_config.json
beside the file has to say them.

Source: openai/tiktoken, tiktoken_ext/openai_public.py; meta-llama/llama-models, llama3/tokenizer.py
    and llama4/tokenizer.py; QwenLM/Qwen, tokenization_qwen.py; MoonshotAI/Kimi-K2,
    tokenization_kimi.py; mistralai/mistral-common, tokens/tokenizers/tekken.py.
"""

import base64
import binascii
import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron5d.data.special_tokens import FilesBeside, read_object

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
CL100K_PATTERN = (
    CONTRACTIONS
    + r"""|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
QWEN2_PATTERN = CL100K_PATTERN.replace("{1,3}", "")


def _cased_pattern(not_han: str, first: str, after_signs: str) -> str:
    """Pattern that begins a new piece where small letters are followed by a capital
    one."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{not_han}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{not_han}]"
    words = [rf"[^\r\n\p{{L}}\p{{N}}]?{upper}{a}{lower}{b}{CONTRACTIONS}?" for a, b in ("*+", "+*")]
    signs = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n{after_signs}]*"
    return first + "|".join([*words, r"\p{N}{1,3}", signs, r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])


O200K_PATTERN = _cased_pattern("", "", "/")
KIMI_PATTERN = _cased_pattern(r"&&[^\p{Han}]", r"[\p{Han}]+|", "")
PATTERNS = {
    "gpt2": GPT2_PATTERN,
    "cl100k": CL100K_PATTERN,
    "o200k": O200K_PATTERN,
    "qwen2": QWEN2_PATTERN,
    "kimi": KIMI_PATTERN,
}


class Ranks(NamedTuple):
    """The content of a rank file."""

    ranks: dict[bytes, int]  # token -> id
    pattern: str  # the regular expression that splits text
    special: dict[str, int]  # special token -> id
    normal_form: bool = False  # text is brought into NFC first
    adds_bos: bool = False  # texts begin with the begin-of-text token
    in_text: frozenset[str] = frozenset()  # of `special`: tokens that a text may hold


class Published(NamedTuple):
    """A vocabulary that is known by its number of ranks."""

    name: str
    pattern: str
    special: dict[str, int]
    normal_form: bool = False


def _from(first: int, names: Sequence[str]) -> dict[str, int]:
    return {name: first + i for i, name in enumerate(names)}


def _reserved(kind: str, *numbers: int) -> list[str]:
    return [f"<|{kind}reserved_special_token_{i}|>" for i in range(*numbers)]


_TEXT = ["<|begin_of_text|>", "<|end_of_text|>"]
LLAMA3_SPECIAL = [
    *_TEXT,
    *_reserved("", 2),
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
    *_reserved("", 2, 246),
]
LLAMA4_SPECIAL = [
    *_TEXT,
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|header_start|>",
    "<|header_end|>",
    "<|eom|>",
    "<|eot|>",
    "<|step|>",
    *_reserved("text_post_train_", 6),
    "<|python_start|>",
    "<|python_end|>",
    "<|finetune_right_pad|>",
    *_reserved("text_post_train_", 8, 69),
    "<|image_start|>",
    "<|image_end|>",
    *_reserved("vision_", 2),
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
    *_reserved("vision_", 2, 6),
    "<|image|>",
    *_reserved("vision_", 6, 7),
    "<|patch|>",
    *_reserved("vision_", 7, 1048),
    *_reserved("reasoning_", 8),
    "<|reasoning_thinking_start|>",
    "<|reasoning_thinking_end|>",
    *_reserved("", 904),
]
QWEN_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|extra_{i}|>" for i in range(205)),
]
KIMI_SPECIAL = ["[BOS]", "[EOS]", *(f"<|reserved_token_{163_584 + i}|>" for i in range(2, 256))]
_CL100K_SPECIAL = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]

# ranks in the file -> vocabulary
PUBLISHED: dict[int, Published] = {
    50_256: Published("GPT-2", GPT2_PATTERN, {"<|endoftext|>": 50_256}),
    # the file leaves a gap at 50256
    50_280: Published("p50k_base", GPT2_PATTERN, {"<|endoftext|>": 50_256}),
    100_256: Published(
        "cl100k_base",
        CL100K_PATTERN,
        {**_from(100_257, _CL100K_SPECIAL), "<|endofprompt|>": 100_276},
    ),
    128_000: Published("Llama 3", CL100K_PATTERN, _from(128_000, LLAMA3_SPECIAL)),
    151_643: Published("Qwen", QWEN2_PATTERN, _from(151_643, QWEN_SPECIAL), normal_form=True),
    163_584: Published("Kimi K2", KIMI_PATTERN, _from(163_584, KIMI_SPECIAL)),
    199_998: Published(
        "o200k_base", O200K_PATTERN, {"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018}
    ),
    200_000: Published("Llama 4", O200K_PATTERN, _from(200_000, LLAMA4_SPECIAL)),
}


def looks_like_ranks(head: bytes) -> bool:
    """Whether a file with this beginning is a list of base64 tokens and ranks."""
    return re.fullmatch(rb"[A-Za-z0-9+/]+={0,2} \d+\r?", head.split(b"\n", 1)[0]) is not None


def read_ranks(path: Path) -> Ranks:
    """Reads a tiktoken file.

    The `pattern` in tokenizer_config.json beside it (a regular expression, or a name of PATTERNS)
    replaces the published one and nothing else; the special tokens that the files beside it add go
    before the published ones.

    Raises:
        ValueError: a line is not a base64 token and a rank (names the line), two tokens have the
            same rank, a single byte is not a token, or the vocabulary is none of PUBLISHED and no
            pattern is given.
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
    _check_whole(path, ranks)
    published, beside, used_ids = PUBLISHED.get(len(ranks)), FilesBeside(path), set(ranks.values())
    pattern = beside.config.get("pattern")
    if published is None and pattern is None:
        raise ValueError(_unknown(path, len(ranks), max(ranks.values()) + 1))
    known = published or Published("", "", {})
    added = {token: number for token, number in beside.added().items() if number not in used_ids}
    pattern = known.pattern if pattern is None else PATTERNS.get(str(pattern), str(pattern))
    special = {**known.special, **added}
    return Ranks(
        ranks,
        pattern,
        special,
        known.normal_form,
        adds_bos=published is not None,
        in_text=frozenset(t for t in special if not beside.flags(t).get("special", True)),
    )


def _unknown(path: Path, count: int, after: int) -> str:
    known = ", ".join(f"{size} {encoding.name}" for size, encoding in PUBLISHED.items())
    eod = "<|endoftext|>"
    example = {
        "pattern": "cl100k",
        "added_tokens_decoder": {str(after): {"content": eod}},
        "eos_token": eod,
    }
    return (
        f"{path}: a vocabulary of {count} ranks is none of those known here ({known}), and a rank "
        "file says neither "
        "which pattern splits text nor which special tokens there are. Put the model's "
        "tokenizer.json beside it and "
        f"name the folder, or write both into {path.with_name('tokenizer_config.json')}, for "
        "instance "
        f"{json.dumps(example)} (pattern: {', '.join(PATTERNS)}, or a regular expression)"
    )


def _check_whole(path: Path, ranks: dict[bytes, int]) -> None:
    if len(set(ranks.values())) != len(ranks):
        raise ValueError(
            f"{path}: {len(ranks)} tokens share {len(set(ranks.values()))} ranks; each rank is one "
            "token's"
        )
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(
            f"{path}: {len(missing)} of the 256 bytes are no tokens (0x{missing[0]:02x} is the "
            "first), and a text that "
            "has them could not be encoded: the file is not whole"
        )


# of a tekken.json that lists none, versions 1 and 2
TEKKEN_SPECIAL = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
]


def read_tekken(path: Path, content: dict[str, Any]) -> Ranks:
    """Reads a tekken.json: special tokens have the first ids, the rank r has id r + number of
    special tokens.

    Raises:
        ValueError: something is missing or of the wrong kind.
    """
    try:
        config, listed = content["config"], content.get("special_tokens")
        num_special, size = (
            int(config["default_num_special_tokens"]),
            int(config["default_vocab_size"]),
        )
        special = (
            {token["token_str"]: int(token["rank"]) for token in listed}
            if listed
            else _from(0, TEKKEN_SPECIAL)
        )
        used_ids = set(special.values())
        special |= {f"<SPECIAL_{i}>": i for i in range(num_special) if i not in used_ids}
        tokens = content["vocab"][: size - num_special]  # more are in the file than are in use
        ranks = {
            base64.b64decode(token["token_bytes"]): int(token["rank"]) + num_special
            for token in tokens
        }
        pattern = str(config["pattern"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a tekken.json: {type(error).__name__} {error}") from error
    _check_whole(path, ranks)
    return Ranks(ranks, pattern, special, adds_bos=True)


# ends of the two names: of transformers, of Megatron's gpt2-vocab.json too, and of OpenAI
PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast", "")
QWEN2_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")


def pair_of(path: Path) -> tuple[Path, Path] | None:
    """(vocabulary, merges) to which a file belongs by its name; None = neither, or one
    is missing."""
    for ends in PAIRS:
        for end in ends:
            if path.name.endswith(end):
                begin = path.name.removesuffix(end)
                vocab, merges = (path.with_name(begin + suffix) for suffix in ends)
                if vocab.is_file() and merges.is_file():
                    return vocab, merges
    return None


def byte_level(
    model: Any, pattern: str | None, *, normal_form: bool = False, add_prefix_space: bool = False
) -> Any:
    """A `tokenizers.Tokenizer` that splits text by a pattern and writes bytes as GPT-2
    does.

    Args:
        model: a `tokenizers.models.BPE`.
        pattern: None = GPT-2's, as the package has it.
        normal_form: text is brought into NFC first.
        add_prefix_space: a text begins with a space.
    """
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC() if normal_form else None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=add_prefix_space, use_regex=pattern is None
    )
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_level_bpe(vocab: Path, merges: Path, beside: FilesBeside) -> Any:
    """The `tokenizers.Tokenizer` of a pair.

    Text is split as the folder's `tokenizer_class` does, GPT-2's or Qwen2's; where none is named,
    the number of tokens says whether it is Qwen's.

    Raises:
        ValueError: a file is damaged, the class is another, or an added token cannot have its id.
    """
    from tokenizers import AddedToken, models

    named = str(beside.config.get("tokenizer_class") or "")
    tokens = read_object(vocab)
    qwen2 = named in QWEN2_CLASSES or (
        not named and len(tokens) in (n for n in PUBLISHED if PUBLISHED[n].normal_form)
    )
    if not qwen2 and named not in GPT2_CLASSES:
        raise ValueError(
            f"{vocab}: tokenizer_class {named} may split text in its own way; write its "
            "tokenizer.json beside it: "
            f"transformers.AutoTokenizer.from_pretrained({str(vocab.parent)!r}).save_pretrained(...)"
        )
    try:
        bpe = models.BPE.from_file(str(vocab), str(merges))
    except Exception as error:  # the package raises bare Exception
        raise ValueError(f"{vocab} and {merges.name} are no byte-level BPE: {error}") from error
    space = bool(beside.config.get("add_prefix_space"))
    model = byte_level(
        bpe, QWEN2_PATTERN if qwen2 else None, normal_form=qwen2, add_prefix_space=space
    )
    added = beside.added()
    if qwen2 and not added.keys() - tokens.keys():
        missing = [token for token in QWEN_SPECIAL[:3] if token not in tokens]
        model.add_special_tokens([AddedToken(token, normalized=False) for token in missing])
    for token, number in add_listed(model, beside).items():
        raise ValueError(
            f"{vocab}: the added token {token!r} has id {number}; the next free one is "
            f"{_next_id(model)}"
        )
    return model


def add_listed(model: Any, beside: FilesBeside) -> dict[str, int]:
    """Adds to a `tokenizers.Tokenizer` the tokens that the files beside it list, as transformers
    does.

    Returns:
        Tokens that are missing still, with their ids, since these are not the next free ones.
    """
    from tokenizers import AddedToken

    known, missing = model.get_vocab(with_added_tokens=True), {}
    present = model.get_added_tokens_decoder()
    for token, number in sorted(beside.added().items(), key=lambda item: item[1]):
        if number in present or known.get(token, number) != number:
            continue
        if token not in known and number != _next_id(model):
            missing[token] = number
            continue
        flags = beside.flags(token)
        add = model.add_special_tokens if flags.get("special") else model.add_tokens
        add([AddedToken(token, **{"normalized": False, **flags})])
    return missing


def _next_id(model: Any) -> int:
    """Id of the next token that is added."""
    added = model.get_added_tokens_decoder()
    return max(model.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1)


def switch_off(model: Any) -> str:
    """Turns off what is random in a `tokenizers.Tokenizer`; says what, "" = nothing was on."""
    # BPE dropout, and the sampling of a unigram model
    names = [n for n in ("dropout", "nbest_size", "alpha") if getattr(model.model, n, None)]
    words = ", ".join(f"{name} {getattr(model.model, name):g}" for name in names)
    for name in names:
        setattr(model.model, name, None)
    return words


def mark_special(model: Any, names: Collection[str]) -> None:
    """Makes tokens of a `tokenizers.Tokenizer` special, unless they are."""
    from tokenizers import AddedToken

    special = {t.content for t in model.get_added_tokens_decoder().values() if t.special}
    ordered = sorted(set(names) - special, key=model.token_to_id)
    model.add_special_tokens([AddedToken(name, normalized=False) for name in ordered])


def byte_signs() -> dict[int, str]:
    """Character with which GPT-2's vocabularies write each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(unprintable)
    }
