"""Turns the tokenizer of a run into the files from which transformers' AutoTokenizer gets the ids
of training.

A tokenizer.json leaves as it is; a sentencepiece model and a tiktoken file become one. Special
tokens, chat templates and the rest of what the source's folder says about tokens leave with it. The
class is always named: without a name transformers takes that of the model's family, with its own
way of splitting text.
"""

import json
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from megatron5d.data.bpe_files import Ranks, add_listed, byte_level, byte_signs, pair_of, switch_off
from megatron5d.data.special_tokens import FilesBeside, read_object
from megatron5d.data.tokenizer import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    load_tokenizer,
    tokenizer_file,
)

SETTINGS = "tokenizer_config.json"
SIDE_FILES = (
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATES = "additional_chat_templates"
# Texts on which converted tokenizers went wrong: blanks, digits, apostrophes, line ends, scripts,
# marks.
PROBES = (
    "hello 1234 years",
    " two  spaces\n",
    "don't ask, I'LL DON'T",
    "x=3.14",
    "the year 1999 had",
    "   ",
    "",
    "\n\n\n a\t\tb\r\n",
    "a\n  b\n\n    c  \n",
    "12345678 1 22 333",
    "naïve café e\u0301 Ångström ﬁ ½",
    "日本語のテキスト 中文 한국어",
    "مرحبا שלום नमस्ते",
    "🙂👩\u200d👩\u200d👧 \U0001f1eb\U0001f1f7",
    "\u00a0nb\u2003sp\u3000",
    "'s 're 'LL 'ſ",
    "CamelCaseWords snake_case __init__",
    "<|x|> <0x0A> [a]",
    "a" * 60 + " " * 33 + "!" * 17,
    "\u2581under \u2581",
    "\x00\x07",
    "١٢٣ ४५६",
    "http://a.b/c?d=e&f#g\n",
)
BLANK = "\u2581"  # what sentencepiece writes for one
_LEARNED, _USER, _UNKNOWN, _CONTROL = 1, 4, 2, 3  # types of sentencepiece's pieces
_UNIGRAM, _BPE = 1, 2  # types of sentencepiece's models


def exported_tokenizer(source: Path, eod: int | None, config: dict[str, Any]) -> dict[str, str]:
    """Files of a tokenizer, checked to give the ids of training.

    Args:
        source: a file or folder that `load_tokenizer` reads.
        eod: what ended documents in training; None = what the source names.
        config: the config.json beside it, on which AutoTokenizer's choice of a class depends.

    Returns:
        Content by name in the folder.

    Raises:
        ValueError: the source cannot be read or converted, or transformers would give other ids;
            says which.
    """
    ours, file = load_tokenizer(source, eod), tokenizer_file(source)
    settings, backend = read_object(file.parent / SETTINGS), _backend(file)
    # a class of the source's own; what is in tokenizer.json now
    for key in ("auto_map", "pattern"):
        settings.pop(key, None)
    named = read_object(file.parent / SIDE_FILES[0]) | settings
    usual = _usual_tokens(file, ours, backend)
    if (
        eod is not None and ours.eod not in backend.get_added_tokens_decoder()
    ):  # an ordinary token, which would no longer come of text
        usual["eos_token"] = None
    for key, token in usual.items():
        if token is not None and not named.get(key):
            settings[key] = token
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(ours, SentencePieceTokenizer):  # tokens are cut out before blanks are replaced
        for token in (settings.get("added_tokens_decoder") or {}).values():
            token["normalized"] = False
    files = {
        "tokenizer.json": backend.to_str(pretty=True),
        SETTINGS: json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
    }
    for path in [file.parent / name for name in SIDE_FILES] + sorted(
        (file.parent / TEMPLATES).glob("*.jinja")
    ):
        if path.is_file():
            files[str(path.relative_to(file.parent))] = path.read_text(encoding="utf-8")
    _check_ids(file, files, ours, config)
    return files


def special_tokens(source: Path) -> dict[str, int]:
    """Tokens of a tokenizer that never come of text, such as those of chat templates,
    with their ids."""
    added = _backend(tokenizer_file(source)).get_added_tokens_decoder()
    return {token.content: i for i, token in added.items()}


def _usual_tokens(file: Path, ours: Tokenizer, backend: Any) -> dict[str, str | None]:
    """Special tokens for a folder that names none: those of a sentencepiece model, or what
    ended documents."""
    end, begin = (None if i is None else backend.id_to_token(i) for i in (ours.eod, ours.bos))
    if not isinstance(ours, SentencePieceTokenizer):
        return {"eos_token": end, "bos_token": begin}
    spec = _proto(file, ours).trainer_spec
    ids = {"bos_token": spec.bos_id, "unk_token": spec.unk_id, "pad_token": spec.pad_id}
    return {"eos_token": end} | {
        key: backend.id_to_token(i) if i >= 0 else None for key, i in ids.items()
    }


def _backend(file: Path) -> Any:
    """A `tokenizers.Tokenizer` of a tokenizer file."""
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError(
            f"{file} is written as a tokenizer.json, which takes the package tokenizers: pip "
            "install 'megatron5d[data]'"
        ) from error
    ours = load_tokenizer(file)
    if isinstance(ours, SentencePieceTokenizer):
        return _with_added(_from_sentencepiece(file, ours), file)
    if isinstance(ours, TiktokenTokenizer):
        return _from_ranks(ours.ranks)
    assert isinstance(ours, HuggingFaceTokenizer)
    if pair_of(file):
        return tokenizers.Tokenizer.from_str(ours.serialized())
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.no_truncation()
    backend.no_padding()
    add_listed(backend, FilesBeside(file))
    switch_off(backend)
    return backend


def _with_added(backend: Any, file: Path) -> Any:
    """Adds the tokens that a folder keeps beside its model: added_tokens.json,
    added_tokens_decoder."""
    beside = FilesBeside(file)
    add_listed(backend, beside)
    for token, i in beside.added().items():
        if (actual := backend.token_to_id(token)) != i:
            raise ValueError(
                f"{file.parent} gives the token {token!r} id {i}, and with {file.name} it "
                f"becomes {'no token' if actual is None else actual}: a "
                "tokenizer.json made by transformers, of the same folder, can leave instead"
            )
    return backend


def _proto(file: Path, ours: SentencePieceTokenizer) -> Any:
    try:
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
    except ImportError as error:
        raise ValueError(
            f"{file} is written as a tokenizer.json, which takes protobuf: {error}"
        ) from error
    return ModelProto.FromString(ours.serialized())


def _from_sentencepiece(file: Path, ours: SentencePieceTokenizer) -> Any:
    """Makes BPE or unigram with sentencepiece's own way of writing blanks; user-defined pieces are
    cut out first."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers

    proto = _proto(file, ours)
    rules, pieces = proto.normalizer_spec, proto.pieces
    user_defined = sorted(
        (piece.piece for piece in pieces if piece.type == _USER), key=len, reverse=True
    )
    backend = Tokenizer(_sentencepiece_model(file, proto, ignore_merges=bool(user_defined)))
    backend.normalizer = _normalizer(rules)
    splits = []
    if user_defined:
        pattern = Regex("|".join(map(_literal, user_defined)))
        splits.append(pre_tokenizers.Split(pattern, "isolated"))
    if proto.trainer_spec.model_type == _UNIGRAM:
        # A text that spells the name of a byte does not mean the byte.
        splits.append(pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "merged_with_previous"))
    if splits:
        backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    strip = [decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    special = [piece.piece for piece in pieces if piece.type in (_CONTROL, _UNKNOWN)]
    backend.add_special_tokens(
        [AddedToken(piece, normalized=False, special=True) for piece in special]
    )
    _add_ends(backend, file.parent, proto.trainer_spec)
    return backend


def _normalizer(rules: Any) -> Any:
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps += [
            normalizers.Replace(Regex(rf"\A +|[ {BLANK}]+\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(BLANK))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", BLANK)])


def _sentencepiece_model(file: Path, proto: Any, ignore_merges: bool) -> Any:
    """The BPE or unigram model of `tokenizers` with the pieces of a sentencepiece model."""
    from tokenizers import models

    pieces, fallback = proto.pieces, proto.trainer_spec.byte_fallback
    unknown = next((i for i, piece in enumerate(pieces) if piece.type == _UNKNOWN), None)
    if proto.trainer_spec.model_type == _BPE:
        ranks = {piece.piece: -piece.score for piece in pieces if piece.type == _LEARNED}
        return models.BPE(
            {piece.piece: i for i, piece in enumerate(pieces)},
            _merges(ranks, len),
            unk_token=None if unknown is None else pieces[unknown].piece,
            fuse_unk=True,
            byte_fallback=fallback,
            ignore_merges=ignore_merges,
        )
    if proto.trainer_spec.model_type == _UNIGRAM:
        scores = [(piece.piece, piece.score) for piece in pieces]
        return models.Unigram(scores, unk_id=unknown, byte_fallback=fallback)
    raise ValueError(
        f"{file}: tokenizer.json has no equivalent of sentencepiece models of words or characters"
    )


def _literal(text: str) -> str:
    """Regular expression for a text, in every dialect."""
    return "".join(letter if letter.isalnum() else f"\\x{{{ord(letter):x}}}" for letter in text)


def _add_ends(backend: Any, folder: Path, spec: Any) -> None:
    """Makes texts begin and end as the folder's settings say; a bare model file says nothing, and
    training adds no token."""
    from tokenizers.processors import TemplateProcessing

    settings = read_object(folder / SETTINGS)
    # which adds <s> unless told otherwise
    by_class = str(settings.get("tokenizer_class")).startswith("Llama")
    rules = ((spec.bos_id, "add_bos_token", by_class), (spec.eos_id, "add_eos_token", False))
    first, last = (
        [backend.id_to_token(i)] if i >= 0 and settings.get(key, usual) else []
        for i, key, usual in rules
    )
    if first or last:
        single, second = [*first, "$A", *last], [f"{token}:1" for token in (*first, "$B", *last)]
        tokens = [(token, backend.token_to_id(token)) for token in {*first, *last}]
        backend.post_processor = TemplateProcessing(single, single + second, tokens)


def _merges(ranks: dict[Any, float], order: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    """All pairs of tokens that make up a token, the lowest rank first; ties by the order of
    the parts."""
    merges = []
    for token, rank in ranks.items():
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        merges += [(rank, order(a), order(b), a, b) for a, b in cuts if a in ranks and b in ranks]
    return [(a, b) for *_, a, b in sorted(merges)]


def _from_ranks(encoding: Ranks) -> Any:
    """Byte-level BPE with tiktoken's pattern; a piece that is a token stays whole, as there."""
    from tokenizers import AddedToken, models

    ranks, pattern, special, normal_form, *_ = encoding
    signs = byte_signs()

    def spelled(token: bytes) -> str:
        return "".join(signs[byte] for byte in token)

    merges = [(spelled(a), spelled(b)) for a, b in _merges(dict(ranks), lambda token: ranks[token])]
    ids = {spelled(token): rank for token, rank in ranks.items()} | special
    backend = byte_level(
        models.BPE(ids, merges, ignore_merges=True), pattern, normal_form=normal_form
    )
    for name in sorted(special, key=lambda name: special[name]):
        add = backend.add_tokens if name in encoding.in_text else backend.add_special_tokens
        add([AddedToken(name, normalized=False)])
    return backend


def sample_texts(
    ours: Tokenizer, ids: list[int], added: list[str], special: Collection[str]
) -> Iterator[str]:
    """Yields PROBES, up to 4,000 tokens of the vocabulary eight at a time, and up to 4,000 added
    tokens between words; none with a special token's name, which transformers reads from text."""
    ids, added = ids[:: max(1, len(ids) // 4000)], added[:: max(1, len(added) // 4000)]
    groups = (ours.decode(ids[at : at + 8]) for at in range(0, len(ids), 8))
    between = (f"{name}a{name}the {name} b\n{name}" for name in added)
    for text in (*PROBES, *groups, *between):
        if not any(name in text for name in special):
            yield text


def _check_ids(file: Path, files: dict[str, str], ours: Tokenizer, config: dict[str, Any]) -> None:
    """Compares the ids of the written files with those of training, by transformers where it is
    installed."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(files["tokenizer.json"])
    added = backend.get_added_tokens_decoder()
    ends = {ours.token(i) for i in (ours.eod, ours.bos) if i is not None}
    special = {token.content for token in added.values() if token.special}
    special |= FilesBeside(file).special | ends
    in_text = [token.content for token in added.values() if not token.special]
    if isinstance(ours, SentencePieceTokenizer):
        in_text += [piece.piece for piece in _proto(file, ours).pieces if piece.type == _USER]
    # ids may leave gaps
    ids = sorted(set(backend.get_vocab(with_added_tokens=True).values()) - set(added))

    encoders: dict[str, Callable[[str], list[int]]] = {
        "the package tokenizers": lambda text: backend.encode(text, add_special_tokens=False).ids
    }
    if theirs := _by_transformers(files, config):
        encoders["transformers' AutoTokenizer"] = theirs
    for name, encode in encoders.items():
        for text in sample_texts(ours, ids, in_text, special):
            expected, actual = ours.encode(text), encode(text)
            if expected != actual:
                raise ValueError(
                    f"{file} leaves with other ids than those of training: {name} makes "
                    f"{actual[:12]} of {text[:60]!r}, "
                    f"training {expected[:12]}"
                )


def _by_transformers(
    files: dict[str, str], config: dict[str, Any]
) -> Callable[[str], list[int]] | None:
    """AutoTokenizer's encoding of the files to be written; None where transformers is not
    installed."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        for name, content in ({"config.json": json.dumps(config)} | files).items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(content, encoding="utf-8")
        try:
            theirs = AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # of whatever kind the tokenizer's class raises
            raise ValueError(
                f"transformers does not read the tokenizer that would be written: {error}"
            ) from error
    return lambda text: theirs(text, add_special_tokens=False).input_ids
