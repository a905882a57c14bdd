"""A run that starts from a Hugging Face folder against transformers and torch.optim.AdamW, step by
step in fp64."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hf_folders import random_model, tiny_config
from runs import records, train_on_ranks
from transformers_fp64 import model_in_fp64

from megatron5d.checkpoint.hf.import_config import model_config_from_hf
from megatron5d.config.load import load_config
from megatron5d.data.indexed_dataset import IndexedWriter

transformers = pytest.importorskip("transformers")

STEPS, GBS, SEQ, VOCAB, WARMUP, LR, MIN_LR = 6, 8, 16, 61, 2, 1e-2, 1e-3
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**TINY, attention_bias=True),
    "mistral": lambda: transformers.MistralConfig(**TINY, sliding_window=5),
    "qwen2": lambda: transformers.Qwen2Config(**TINY),
    "qwen3": lambda: transformers.Qwen3Config(**TINY, head_dim=16, tie_word_embeddings=True),
    "gemma2": lambda: transformers.Gemma2Config(
        **TINY | {"hidden_size": 64}, head_dim=12, pad_token_id=None, sliding_window=5
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **TINY | {"hidden_size": 64},
        head_dim=12,
        pad_token_id=None,
        sliding_window=5,
        sliding_window_pattern=2,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        vocab_size=VOCAB,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    ),
}
LAYOUTS = {
    "one": (1, []),
    "tp, sp": (2, ["parallel.tp=2", "parallel.sp=true"]),
    "dp, zero": (2, ["parallel.zero=3"]),
}


def write_tokens(prefix):
    """Documents of random tokens in Megatron's format, by its published layout; returns them end to
    end."""
    generator = np.random.default_rng(0)
    documents = [
        generator.integers(0, VOCAB, n).astype(np.uint16) for n in generator.integers(5, 90, 60)
    ]
    lengths = np.array([len(document) for document in documents], np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths[:-1] * 2)]).astype(np.int64)
    header = b"MMIDIDX\0\0" + np.uint64(1).tobytes() + bytes([8])
    header += np.uint64(len(documents)).tobytes() + np.uint64(len(documents) + 1).tobytes()
    index = (
        header
        + lengths.tobytes()
        + offsets.tobytes()
        + np.arange(len(documents) + 1, dtype=np.int64).tobytes()
    )
    prefix.with_suffix(".idx").write_bytes(index)
    tokens = np.concatenate(documents)
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    return torch.from_numpy(tokens.astype(np.int64))


def rate(step):
    if step <= WARMUP:
        return LR * step / WARMUP
    return MIN_LR + (LR - MIN_LR) * 0.5 * (
        1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))
    )


def reference(model, tokens):
    """(loss, gradient norm before clipping) of each step."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    curve = []
    for step in range(STEPS):
        rows = [tokens[i * SEQ : (i + 1) * SEQ + 1] for i in range(step * GBS, (step + 1) * GBS)]
        batch = torch.stack(rows)
        logits = model(batch[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = rate(step + 1)
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    return curve


@pytest.fixture(scope="module", params=list(CONFIGS))
def case(request, tmp_path_factory):
    """(folder, data prefix, the reference's curve)"""
    folder = tmp_path_factory.mktemp("hf")
    tokens = write_tokens(folder / "data")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]()).save_pretrained(folder)
    with model_in_fp64(folder) as model:
        curve = reference(model.train(), tokens)
    return folder, folder / "data", curve


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_loss_and_gradient_norm_of_every_step(case, layout, tmp_path):
    folder, prefix, wanted = case
    world, overrides = LAYOUTS[layout]
    words = [
        f"model.from_hf={folder}",
        f"init.from_hf={folder}",
        f"data.train=[{prefix}]",
        "data.order=sequential",
        f"train.steps={STEPS}",
        f"train.gbs={GBS}",
        "train.mbs=2",
        f"train.seq_len={SEQ}",
        f"optim.lr={LR}",
        f"optim.min_lr={MIN_LR}",
        f"optim.warmup_steps={WARMUP}",
        "optim.clip=0.5",
        "precision.dtype=fp64",
        f"log.jsonl={tmp_path / 'log.jsonl'}",
        "log.progress=false",
        *overrides,
    ]
    config = load_config(words, world=world, model_readers={"from_hf": model_config_from_hf})
    assert train_on_ranks(config, world) == [0] * world
    got = [(record["loss"], record["grad_norm"]) for record in records(tmp_path / "log.jsonl")]
    assert len(got) == STEPS and wanted[-1][0] != wanted[0][0]
    np.testing.assert_allclose(got, wanted, rtol=1e-9)


GAPS = [
    (0, 0, 3),
    (1, 5, SEQ),
    (2, 0, SEQ),
    (3, 6, 10),
    (4, 2, 4),
    (4, 9, 11),
    (6, 0, 1),
    (6, 7, 8),
]
DOCUMENTS = [SEQ * 3 + 3, SEQ * 3 + 10, SEQ * 4 + 9, SEQ * 5, SEQ * 7 + 5]  # where they begin
# family, keys of the run, and layout
PADDED = {
    **{
        family: (family, [], "one")
        for family in ("mistral", "gemma2", "gpt2", "gpt_oss", "qwen3_moe", "deepseek_v3")
    },
    **{f"llama {layout}": ("llama", [], layout) for layout in LAYOUTS},
    "documents": ("gpt2", ["data.document_mask=true"], "one"),
    "documents tp, sp": ("llama", ["data.document_mask=true"], "tp, sp"),
    "bidirectional": ("llama", ["model.attention_causal=false"], "one"),
}


def padded_corpus(prefix):
    """Rows with padding at either end, between tokens and throughout, by itself and in documents of
    an .idx."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (GBS + 1, SEQ)).astype(np.int32)
    writer = IndexedWriter(prefix, np.int32)
    for document in np.split(tokens.flatten(), DOCUMENTS):
        writer.add_document(document)
    writer.finalize()
    for row, begin, end in GAPS:
        tokens[row, begin:end] = -100
    tokens.tofile(f"{prefix}.bin")
    return torch.from_numpy(tokens.flatten().astype(np.int64))


def visible_and_positions(is_token, keys):
    """Mask `[b, 1, s, s]` and positions `[b, s]`, by loops over what the keys of a run mean."""
    positions = torch.arange(SEQ).repeat(GBS, 1)
    owner = torch.zeros_like(positions)
    if "data.document_mask=true" in keys:
        for row in range(GBS):
            firsts: dict[int, int] = {}
            for p in range(SEQ):
                owner[row, p] = sum(begin <= row * SEQ + p for begin in DOCUMENTS)
                if is_token[row, p]:
                    positions[row, p] = p - firsts.setdefault(int(owner[row, p]), p)
    visible = is_token[:, None, :] & (owner[:, :, None] == owner[:, None, :])
    if "model.attention_causal=false" not in keys:
        visible = visible.tril()
    return (visible | torch.eye(SEQ, dtype=torch.bool))[:, None], positions


@pytest.mark.parametrize("case", PADDED)
def test_padding_as_transformers_leaves_it_out(case, tmp_path):
    """It is no key, and all else stays visible: loss and gradient norm."""
    family, keys, layout = PADDED[case]
    flat = padded_corpus(tmp_path / "data")
    hf_config = CONFIGS[family]() if family in CONFIGS else tiny_config(family)
    random_model(hf_config).save_pretrained(tmp_path)
    batch = torch.stack([flat[i * SEQ : (i + 1) * SEQ + 1] for i in range(GBS)])
    inputs, is_token = batch[:, :-1].clamp(min=0), batch[:, :-1] != -100
    labels = batch[:, 1:].masked_fill(~is_token, -100)
    visible, positions = visible_and_positions(is_token, keys)
    with model_in_fp64(tmp_path) as model:
        mask = is_token.long()
        if keys:
            mask = torch.zeros(visible.shape, dtype=torch.float64)
            mask.masked_fill_(~visible, torch.finfo(torch.float64).min)
        logits = model(inputs, attention_mask=mask, position_ids=positions).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    world, overrides = LAYOUTS[layout]
    words = [
        f"model.from_hf={tmp_path}",
        f"init.from_hf={tmp_path}",
        f"data.train=[{tmp_path / 'data'}]",
        "train.steps=1",
        "data.order=sequential",
        f"train.gbs={GBS}",
        f"train.seq_len={SEQ}",
        "moe.balance=[none]",
        "precision.dtype=fp64",
        f"log.jsonl={tmp_path / 'log.jsonl'}",
        "log.progress=false",
        *keys,
        *overrides,
    ]
    config = load_config(words, world=world, model_readers={"from_hf": model_config_from_hf})
    assert train_on_ranks(config, world) == [0] * world
    (record,) = records(tmp_path / "log.jsonl")
    assert record["tokens"] == (labels != -100).sum()
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-9)
    assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-9)
