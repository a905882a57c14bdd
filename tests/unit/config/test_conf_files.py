"""conf/ matches the schema, and published models have the published number of parameters."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from megatron5d.config.checks import run_checks
from megatron5d.config.checks.context import recommended
from megatron5d.config.convert import group_names, key_of
from megatron5d.config.default_files import default_file
from megatron5d.config.load import CONF, load_config
from megatron5d.config.schema import Config, ModelConfig, RopeScaling
from megatron5d.model.flops import parameter_count

GROUPS = group_names()[:-1]  # without experiment

# Sum of the tensors in each release's safetensors files, tied and shared matrices once.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2_xl": 1_557_611_200,
    "llama_7b": 6_738_415_616,
    "llama_13b": 13_015_864_320,
    "llama_33b": 32_528_943_616,
    "llama_65b": 65_285_660_672,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen3_0_6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "qwen3_32b": 32_762_123_264,
    "gemma2_2b": 2_614_341_888,
    "gemma3_1b": 999_885_952,
    "gpt_oss_20b": 20_914_757_184,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "deepseek_67b": 67_425_001_472,
    "dots_llm1": 142_774_381_696,
    "seed_oss_36b": 36_151_104_512,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v2": 235_741_434_880,
    # fp8 and bf16 tensors, and the routers' biases; the prediction layer's embedding and head are
    # the model's
    "deepseek_v3": 680_571_043_840 + 3_918_786_560 + 59 * 256 - 2 * 129280 * 7168,
}
# Billions, as rounded in the papers.
ROUNDED = {
    "palm_8b": 8.63,
    "palm_62b": 62.50,
    "palm_540b": 540.35,
    "gpt3_175b": 174.6,
    "mt_nlg_530b": 529.6,
    "gpt_1t": 1008.0,
    "kimi_k2": 1026.4,
    "moonlight_16b": 15.96,
    "glm4_7_flash": 29.9,
    "hy_v3": 295.0,
}
MODELS = sorted(file.stem for file in (CONF / "model").glob("*.yaml") if file.stem != "default")
EXPERIMENT_FILES = {
    file.relative_to(CONF / "experiment").with_suffix("").as_posix(): file
    for file in (CONF / "experiment").rglob("*.yaml")
}
# as their headers say, those of published runs with the source
EXPERIMENTS = {
    name: int(
        re.search(
            r" on (\d+) (?:G|T)PUs \(.+\)\.\n"
            if name.startswith("published/")
            else r" (?:on|over) (\d+) (?:GPUs|ranks)",
            file.read_text(),
        )[1]
    )
    for name, file in EXPERIMENT_FILES.items()
}


@cache
def configured(*words: str) -> Config:
    return load_config(words)


@pytest.mark.parametrize("group", GROUPS)
def test_default_files_are_written_from_the_schema(group):
    text = (CONF / group / "default.yaml").read_text()
    assert text == default_file(group), "run python -m megatron5d.config.default_files"
    assert max(map(len, text.splitlines())) <= 100


def test_groups_are_the_fields_of_the_configuration():
    folders = {path.name for path in CONF.iterdir() if path.is_dir()}
    assert folders == {*GROUPS, "experiment"}
    fields = [key_of(field) for field in Config.__dataclass_fields__.values()]
    assert fields == [*GROUPS, "plugins"]


def test_no_overrides_give_the_defaults():
    assert load_config([]) == Config()


def attention_parameters(model: ModelConfig) -> int:
    h, a, d = model.hidden_size, model.num_heads, model.head_dim
    if model.attention == "mla":
        rq, r = model.q_lora_rank, model.kv_lora_rank
        dn, dr, dv = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
        queries = h * a * (dn + dr) if rq is None else h * rq + rq + rq * a * (dn + dr)
        count = queries + h * (r + dr) + r + r * a * dn + r * a * dv + a * dv * h
    else:
        q, kv = a * d, model.num_kv_heads * d
        count = h * q + 2 * h * kv + q * h + (q + 2 * kv) * model.qkv_bias + 2 * d * model.qk_norm
    return count + h * model.attention_out_bias + a * model.attention_sinks


def parameters(model: ModelConfig, experts: int | None = None) -> int:
    """Number of parameters by the architecture alone, tied matrices once.

    Args:
        experts: count only this many per layer; None = all.
    """
    h, f = model.hidden_size, model.ffn_hidden_size
    norm = 2 * h if model.norm == "layernorm" else h
    norms = {"one_norm": 1}.get(model.parallel_block, 4 if model.block_norm == "both" else 2)
    matrices = 2 if model.activation in ("gelu", "gelu_tanh") else 3

    def mlp(features: int, copies: int = 1) -> int:
        biases = ((matrices - 1) * features + h) * model.mlp_bias
        return copies * (matrices * h * features + biases)

    embeddings = model.vocab_size * h * (1 if model.tie_embeddings else 2)
    positions = model.max_positions * h if model.position == "learned" else 0
    last, mtp_layers, E = model.num_layers - 1, model.num_mtp_layers, model.num_experts
    moe_layers = [
        i
        for i in range(model.num_layers)
        if E and i >= model.first_k_dense and (i + 1) % model.moe_interval == 0
    ]
    moe_layers += [last] * mtp_layers * (last in moe_layers)
    moe = mlp(model.moe_ffn_hidden_size or f, E if experts is None else experts)
    moe += matrices * h * model.shared_ffn_hidden_size
    moe += E * (h + model.router_bias + model.router_linear_bias)
    block = attention_parameters(model) + mlp(f) + norms * norm
    blocks = (model.num_layers + mtp_layers) * block + len(moe_layers) * (moe - mlp(f))
    return embeddings + positions + blocks + mtp_layers * (2 * h * h + 3 * norm) + norm


def promised(name: str, pattern: str) -> int | None:
    """Number in the header of a model's file."""
    match = re.search(rf"([\d,]{{5,}})\s+{pattern}", (CONF / "model" / f"{name}.yaml").read_text())
    return match and int(match[1].replace(",", ""))


@pytest.mark.parametrize("name", MODELS)
def test_model_has_the_parameters_its_file_promises(name):
    model = configured(f"model={name}").model
    assert model.name == name
    assert parameters(model) == promised(name, "parameters") == parameter_count(model)
    assert parameters(model) == PUBLISHED.get(name, parameters(model))
    if model.num_experts:
        active = promised(name, r"of\s+them\s+active")
        counts = parameters(model, experts=model.top_k), parameter_count(model, active=True)
        assert counts == (active, active)


def test_all_published_models_are_there():
    assert {*PUBLISHED, *ROUNDED} <= set(MODELS)
    for name, billions in ROUNDED.items():
        count = parameter_count(configured(f"model={name}").model)
        assert count / 1e9 == pytest.approx(billions, rel=2e-3)


def test_details_that_parameter_counts_do_not_show():
    llama, qwen, gpt2 = (
        configured(f"model={name}").model for name in ("llama3_1b", "qwen3_8b", "gpt2_xl")
    )
    expected = RopeScaling("llama3", 32.0, low_freq_factor=1.0, high_freq_factor=4.0)
    assert llama.rope_scaling == expected
    assert (llama.rope_theta, llama.norm_eps, llama.max_positions) == (5e5, 1e-5, 131072)
    assert (qwen.rope_theta, qwen.norm_eps, qwen.max_positions) == (1e6, 1e-6, 40960)
    assert qwen.qk_norm and gpt2.max_positions == 1024
    assert (gpt2.activation, gpt2.norm, gpt2.position) == ("gelu_tanh", "layernorm", "learned")


def test_each_large_model_has_an_experiment_that_trains_it_sanely():
    """Without one, a model of 47 billion parameters would train in fp32 on 128 tokens."""
    for name in MODELS:
        model = configured(f"model={name}").model
        if parameter_count(model) < 500_000_000:
            continue
        text = (CONF / "model" / f"{name}.yaml").read_text()
        own = next(
            (option for option in (name, f"published/{name}") if option in EXPERIMENTS), None
        )
        named = re.search(r"experiment=\S+ model=.*[^.\n]", text)
        assert (own is None) != (named is None), "an experiment, or a header that names one"
        words = [f"experiment={own}"] if own else [*named.group().split(), f"log.dir=runs/{name}"]
        config = configured(*words)
        train, log = config.train, config.log
        assert config.model == model
        assert config.precision.dtype == "bf16" and train.seq_len >= 1024
        one_replica = own == "published/gpt3_175b"  # a benchmark
        assert train.gbs * train.seq_len >= 1 << 19 or one_replica
        assert model.num_experts == 0 or config.moe.balance != ["none"]
        assert log.dir == f"runs/{own or name}" and log.wandb.name is None
        assert log.jsonl and config.checkpoint.dir


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_is_legal_on_the_ranks_of_its_header(name, tmp_path, monkeypatch):
    """Missing data is the only fault, and none is left once it is there."""
    monkeypatch.chdir(tmp_path)
    config = configured(f"experiment={name}")
    faults = run_checks(config, EXPERIMENTS[name])
    groups = {knob.partition(".")[0] for fault in faults for knob in fault.knobs}
    assert groups - {"init"} == {"data"}
    Path(config.init.from_checkpoint or "runs").mkdir(parents=True)
    prefixes = [*(config.data.train or ["corpus"]), *config.data.valid]
    files = [f"{prefix}{suffix}" for prefix in prefixes for suffix in (".bin", ".idx")]
    for file in map(Path, [*files, config.data.tokenizer or "tokenizer"]):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"\0\0")
    data = [] if config.data.train else ["data.train=corpus"]
    load_config([f"experiment={name}", *data], world=EXPERIMENTS[name])


def test_quickstart_is_a_moe_over_all_dimensions_at_once():
    config = configured("experiment=quickstart")
    p, model = config.parallel, config.model
    assert (p.tp, p.sp, p.cp, p.pp, p.ep, p.zero) == (2, True, 2, 2, 4, 1)
    dp = EXPERIMENTS["quickstart"] // (p.tp * p.cp * p.pp)
    assert dp == 2 and config.train.gbs == 3 * config.train.mbs * dp, "warm-up, 1F1B, drain"
    assert (model.attention, model.num_experts, model.first_k_dense) == ("mla", 8, 1)
    count = f"{parameter_count(model):,} parameters"
    assert count in EXPERIMENT_FILES["quickstart"].read_text()
    assert config.checkpoint.dir == f"{config.log.dir}/checkpoints"
    assert config.log.wandb.mode == "offline" and config.train.eval_every > 0


def test_the_long_context_recipe_continues_the_short_one():
    """One architecture but for Llama 3.1's scaling, and as many tokens per step."""
    short, long = (configured(f"experiment={name}") for name in ("llama3_8b", "llama3_8b_to_128k"))
    assert long.init.from_checkpoint == short.checkpoint.dir
    scaling = replace(configured("model=llama3_1b").model.rope_scaling, factor=8.0)
    stretched = replace(short.model, rope_scaling=scaling, max_positions=long.model.max_positions)
    assert long.model == stretched and short.model.max_positions == 8192
    assert long.train.gbs * long.train.seq_len == short.train.gbs * short.train.seq_len == 4 << 20
    assert (long.parallel.cp_method, long.parallel.cp_inner) == recommended(long)
