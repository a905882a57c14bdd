"""transformers' own tiny models, saved by themselves, into the local parameters of every rank, and
back."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron5d.checkpoint.hf.export_config import hf_config_from_model
from megatron5d.checkpoint.hf.import_config import read_hf_config, read_model_config
from megatron5d.checkpoint.hf.safetensors_folder import (
    SafetensorsFolder,
    save_folder,
    stored_tensors,
)
from megatron5d.checkpoint.hf.tensor_table import hf_entries
from megatron5d.checkpoint.hf.weights import folder_notes, hf_weights, load_hf_weights
from megatron5d.checkpoint.load import WEIGHT_PREFIX
from megatron5d.config.schema import ModelConfig
from megatron5d.topology.shard_spec import Piece, ShardSpec, new_parameter

transformers = pytest.importorskip("transformers")

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
NEOX = {key: size for key, size in TINY.items() if key != "num_key_value_heads"}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 20, "vocab_size": 61, "n_inner": 48}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**TINY),
    "llama, biases, tied": lambda: transformers.LlamaConfig(
        **TINY, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama, MQA": lambda: transformers.LlamaConfig(**TINY | {"num_key_value_heads": 1}),
    "mistral, window": lambda: transformers.MistralConfig(**TINY, sliding_window=5),
    "qwen2, window, tied": lambda: transformers.Qwen2Config(
        **TINY,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=0,
        tie_word_embeddings=True,
    ),
    "qwen3": lambda: transformers.Qwen3Config(**TINY, head_dim=16),
    "qwen3, biases, tied": lambda: transformers.Qwen3Config(
        **TINY, head_dim=16, attention_bias=True, tie_word_embeddings=True
    ),
    "qwen3, window in one layer": lambda: transformers.Qwen3Config(
        **TINY, head_dim=16, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "olmo2, biases": lambda: transformers.Olmo2Config(**TINY, pad_token_id=0, attention_bias=True),
    "gemma": lambda: transformers.GemmaConfig(**TINY, head_dim=16, pad_token_id=0),
    "gemma2": lambda: transformers.Gemma2Config(
        **TINY, head_dim=16, pad_token_id=0, sliding_window=5
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **TINY, head_dim=16, pad_token_id=0, sliding_window=5, sliding_window_pattern=2
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**NEOX),
    "gpt_neox, one after the other": lambda: transformers.GPTNeoXConfig(
        **NEOX, use_parallel_residual=False, attention_bias=False, rotary_pct=0.5
    ),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "gpt2, untied": lambda: transformers.GPT2Config(**GPT2, tie_word_embeddings=False),
}


def make(case):
    """A model of the family with every parameter random, biases and norms too."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[case]())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """case -> (the model's tensors by name, folder in one file, folder in many)."""
    made = {}
    for case in FAMILIES:
        model = make(case)
        single, sharded = tmp_path_factory.mktemp("single"), tmp_path_factory.mktemp("sharded")
        model.save_pretrained(single)
        model.save_pretrained(sharded, max_shard_size="20KB")
        assert len(list(sharded.glob("*.safetensors"))) > 3
        made[case] = (dict(model.state_dict()), single, sharded)
    return made


def test_a_language_model_beside_a_vision_tower(tmp_path):
    """Gemma 3 from 4B on: what is not the language model is told and left alone."""
    text = FAMILIES["gemma3"]()
    vision = transformers.SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    both = transformers.Gemma3ForConditionalGeneration(config)
    both.save_pretrained(tmp_path)
    model = read_model_config(tmp_path)
    assert (model.num_layers, model.window_rope_theta) == (text.num_hidden_layers, 1e4)
    state = both.model.language_model.state_dict()
    wanted = whole_tensors(model, {f"model.{name}": tensor for name, tensor in state.items()})
    with SafetensorsFolder(tmp_path) as stored:
        ours = hf_weights(model, stored, torch.float32)
        assert ours.keys() == {WEIGHT_PREFIX + name for name in wanted}
        for name, tensor in wanted.items():
            lazy = ours[WEIGHT_PREFIX + name]
            for offset in lazy.shards:
                part = lazy.values(offset)
                assert torch.equal(part, rectangle({name: tensor}, name, offset, part.shape))
        (told,) = folder_notes(model, stored)
    num_other = len(load_file(tmp_path / "model.safetensors")) - len(state)
    assert f"{num_other} tensors outside its language model are not read" in told


def rectangle(tensors, name, offset, shape):
    return tensors[name][
        tuple(slice(start, start + extent) for start, extent in zip(offset, shape))
    ]


def whole_tensors(config: ModelConfig, theirs: dict) -> dict[str, torch.Tensor]:
    """Our global tensors, put together by hand from the model's own state."""
    if config.norm == "layernorm":
        return (whole_gpt2 if config.position == "learned" else whole_neox)(config, theirs)
    ours = {
        "embedding.weight": theirs["model.embed_tokens.weight"],
        "final_norm.weight": theirs["model.norm.weight"],
    }
    if not config.tie_embeddings:
        ours["head.weight"] = theirs["lm_head.weight"]
    for i in range(config.num_layers):
        layer = {
            key.removeprefix(f"model.layers.{i}."): t
            for key, t in theirs.items()
            if f".layers.{i}." in key
        }
        for kind in ("weight", "bias"):

            def cat(*names, kind=kind, layer=layer):
                return torch.cat([layer[f"{name}.{kind}"] for name in names])

            if f"self_attn.q_proj.{kind}" in layer:
                qkv = cat("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
                ours[f"layers.{i}.attention.qkv.{kind}"] = qkv
            if f"self_attn.o_proj.{kind}" in layer:
                ours[f"layers.{i}.attention.out.{kind}"] = cat("self_attn.o_proj")
            if f"mlp.up_proj.{kind}" in layer:
                ours[f"layers.{i}.mlp.up.{kind}"] = cat("mlp.gate_proj", "mlp.up_proj")
                ours[f"layers.{i}.mlp.down.{kind}"] = cat("mlp.down_proj")
        if config.block_norm == "post":
            ours[f"layers.{i}.attention.post_norm.weight"] = layer[
                "post_attention_layernorm.weight"
            ]
            ours[f"layers.{i}.mlp.post_norm.weight"] = layer["post_feedforward_layernorm.weight"]
        elif config.block_norm == "both":
            ours[f"layers.{i}.attention.norm.weight"] = layer["input_layernorm.weight"]
            ours[f"layers.{i}.attention.post_norm.weight"] = layer[
                "post_attention_layernorm.weight"
            ]
            ours[f"layers.{i}.mlp.norm.weight"] = layer["pre_feedforward_layernorm.weight"]
            ours[f"layers.{i}.mlp.post_norm.weight"] = layer["post_feedforward_layernorm.weight"]
        else:
            ours[f"layers.{i}.attention.norm.weight"] = layer["input_layernorm.weight"]
            ours[f"layers.{i}.mlp.norm.weight"] = layer["post_attention_layernorm.weight"]
        if config.qk_norm:
            ours[f"layers.{i}.attention.q_norm.weight"] = layer["self_attn.q_norm.weight"]
            ours[f"layers.{i}.attention.k_norm.weight"] = layer["self_attn.k_norm.weight"]
    return ours


def whole_gpt2(config: ModelConfig, theirs: dict) -> dict[str, torch.Tensor]:
    names = {
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
        "attention.norm": "ln_1",
        "mlp.norm": "ln_2",
    }
    ours = {
        f"layers.{i}.{name}.{kind}": theirs[f"transformer.h.{i}.{hf}.{kind}"].t()
        for i in range(config.num_layers)
        for name, hf in names.items()
        for kind in ("weight", "bias")
    }
    ours |= {
        f"final_norm.{kind}": theirs[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")
    }
    ours["embedding.weight"] = theirs["transformer.wte.weight"]
    ours["position_embedding.weight"] = theirs["transformer.wpe.weight"]
    if not config.tie_embeddings:
        ours["head.weight"] = theirs["lm_head.weight"]
    return ours


def whole_neox(config: ModelConfig, theirs: dict) -> dict[str, torch.Tensor]:
    """The fused projection has q, k and v of the first head, then of the second, ..."""
    names = {
        "attention.out": "attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
        "attention.norm": "input_layernorm",
        "mlp.norm": "post_attention_layernorm",
        "attention.qkv": "attention.query_key_value",
    }
    ours, d = {}, config.head_dim
    for i in range(config.num_layers):
        for name, hf in names.items():
            for kind in ("weight", "bias"):
                if (key := f"gpt_neox.layers.{i}.{hf}.{kind}") in theirs:
                    ours[f"layers.{i}.{name}.{kind}"] = theirs[key]
        for kind in ("weight", "bias"):
            if (key := f"layers.{i}.attention.qkv.{kind}") in ours:
                heads = ours[key].split(d)  # q, k, v, q, k, v, ...
                ours[key] = torch.cat([*heads[0::3], *heads[1::3], *heads[2::3]])
    ours |= {
        f"final_norm.{kind}": theirs[f"gpt_neox.final_layer_norm.{kind}"]
        for kind in ("weight", "bias")
    }
    head = theirs.get("embed_out.weight", theirs.get("lm_head.weight"))  # renamed in memory alone
    return ours | {"embedding.weight": theirs["gpt_neox.embed_in.weight"], "head.weight": head}


@dataclass
class Cut:
    """How Megatron cuts one tensor: blocks of rows dealt out over ranks, or columns, or nothing."""

    config: ModelConfig
    tp: int
    rank: int

    def rows(self, name: str) -> list[tuple[int, int]] | None:
        """(start, stop) of this rank's rows, None where rows are not cut."""
        c, tp, rank = self.config, self.tp, self.rank
        if "attention.qkv" in name:
            d, heads, start, blocks = c.head_dim, c.num_heads // tp, 0, []
            blocks.append((rank * heads * d, (rank + 1) * heads * d))
            for part in (0, 1):
                start = (c.num_heads + part * c.num_kv_heads) * d
                first = rank * c.num_kv_heads // tp
                count = max(1, c.num_kv_heads // tp)
                blocks.append((start + first * d, start + (first + count) * d))
            return blocks
        if "mlp.up" in name:
            f = c.ffn_hidden_size
            parts = (0, f) if c.gated else (0,)
            return [(start + rank * f // tp, start + (rank + 1) * f // tp) for start in parts]
        if name in ("embedding.weight", "head.weight"):
            share = -(-c.vocab_size // tp)
            return [(rank * share, min((rank + 1) * share, c.vocab_size))]
        return None

    def expected(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        rows = self.rows(name)
        if rows is not None:
            local = torch.cat([whole[start:stop] for start, stop in rows])
            if name in ("embedding.weight", "head.weight"):
                padding = -(-self.config.vocab_size // self.tp) - len(local)
                local = torch.cat([local, whole.new_zeros(padding, whole.shape[1])])
            return local
        if name.endswith(("attention.out.weight", "mlp.down.weight")):
            return whole.chunk(self.tp, dim=1)[self.rank]
        return whole

    def parameter(self, name: str, whole: torch.Tensor, dtype: torch.dtype) -> torch.nn.Parameter:
        """What the model would hold of it, filled with a wrong value."""
        shape, rows = tuple(whole.shape), self.rows(name)
        local = tuple(self.expected(name, whole).shape)
        inner = (0,) * (len(shape) - 1)
        if rows is None:
            column = self.rank * local[1] if len(shape) == 2 and local[1] < shape[1] else 0
            pieces = [Piece((0, column)[: len(shape)], local)]
        else:
            pieces, row = [], 0
            for start, stop in rows:
                pieces.append(Piece((start, *inner), (stop - start, *shape[1:]), row))
                row += stop - start
        parameter = new_parameter(local, ShardSpec(name, shape, tuple(pieces)), dtype, "cpu")
        parameter.data.fill_(-99)
        return parameter


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("case", list(FAMILIES))
def test_every_rectangle_lands_on_every_rank(folders, case, tp):
    theirs, single, sharded = folders[case]
    config = read_model_config(single)
    whole = whole_tensors(config, theirs)
    for rank in range(tp):
        cut = Cut(config, tp, rank)
        parameters = {
            name: cut.parameter(name, tensor, torch.float64) for name, tensor in whole.items()
        }
        assert load_hf_weights(parameters.values(), config, sharded if rank % 2 else single) == []
        for name, tensor in whole.items():
            assert torch.equal(parameters[name].data, cut.expected(name, tensor).double()), (
                name,
                rank,
            )


@pytest.mark.parametrize("case", list(FAMILIES))
def test_a_stage_loads_its_layer_alone(folders, case):
    """A pipeline rank has some parameters only; the table is still checked against the whole
    folder."""
    theirs, _, sharded = folders[case]
    config = read_model_config(sharded)
    whole = {
        name: t for name, t in whole_tensors(config, theirs).items() if name.startswith("layers.1.")
    }
    parameters = {
        name: Cut(config, 1, 0).parameter(name, t, torch.float32) for name, t in whole.items()
    }
    load_hf_weights(parameters.values(), config, sharded)
    assert all(torch.equal(parameters[name].data, whole[name]) for name in whole)


@pytest.mark.parametrize("case", list(FAMILIES))
def test_export_loads_in_transformers_with_equal_logits(folders, case, tmp_path):
    """Out of global tensors, some KB a file, and nothing of the original folder."""
    theirs, single, _ = folders[case]
    config = read_model_config(single)
    whole = whole_tensors(config, theirs)
    entries = hf_entries(config, read_hf_config(single)["model_type"])
    tensors = stored_tensors(entries, lambda *part: rectangle(whole, *part), torch.float32)
    save_folder(tmp_path, tensors, max_shard_bytes=20_000)
    (tmp_path / "config.json").write_text(json.dumps(hf_config_from_model(config, "fp32")))
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert (
        not report["missing_keys"]
        and not report["unexpected_keys"]
        and not report["mismatched_keys"]
    )
    ids = torch.randint(0, config.vocab_size, (2, 20))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, make(case)(ids).logits)


def test_bare_gpt2_with_its_masks(folders, tmp_path):
    """As on the hub: no `transformer.` prefix, causal masks among the weights."""
    theirs, single, _ = folders["gpt2"]
    tensors = {
        name.removeprefix("transformer."): t
        for name, t in load_file(single / "model.safetensors").items()
    }
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 20, 20) for i in range(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((single / "config.json").read_text())
    config = read_model_config(tmp_path)
    whole = whole_tensors(config, theirs)
    parameters = {
        name: Cut(config, 1, 0).parameter(name, t, torch.float32) for name, t in whole.items()
    }
    load_hf_weights(parameters.values(), config, tmp_path)
    assert all(torch.equal(parameters[name].data, whole[name]) for name in whole)


def test_a_head_beside_tied_embeddings_must_be_the_embedding(folders, tmp_path):
    theirs, single, _ = folders["llama, biases, tied"]
    config = read_model_config(single)
    parameter = Cut(config, 2, 1).parameter(
        "embedding.weight", theirs["model.embed_tokens.weight"], torch.float32
    )
    tensors = load_file(single / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((single / "config.json").read_text())
    load_hf_weights([parameter], config, tmp_path)
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="model.tie_embeddings"):
        load_hf_weights([parameter], config, tmp_path)


def test_the_wrong_model_is_refused_with_every_key(folders):
    """Another width, a layer more, no biases: missing, unexpected and shapes in one message."""
    _, single, _ = folders["llama, biases, tied"]
    changes = {"num_layers": 3, "ffn_hidden_size": 40, "qkv_bias": False}
    with pytest.raises(ValueError) as error:
        load_hf_weights([], replace(read_model_config(single), **changes), single)
    message = str(error.value)
    for line in (
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.mlp.gate_proj.weight: [48, 32] on disk, [40, 32] by the configuration",
    ):
        assert line in message
    assert (
        message.index("missing") < message.index("unexpected") < message.index("of another shape")
    )


def test_a_silent_difference_is_said(folders):
    """Same shapes, another function: the caller gets a line to log for each field."""
    theirs, single, _ = folders["llama"]
    config = replace(read_model_config(single), rope_theta=123.0, name="mine", max_positions=999)
    (line,) = load_hf_weights([], config, single)
    assert "model.rope_theta: 123.0 here, 10000.0 in" in line
