"""conf/ and the schema say the same, and the published models have the published number of
parameters."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from megatron5d.config.checks import run_checks
from megatron5d.config.checks.context import recommended
from megatron5d.config.convert import key_of, keys
from megatron5d.config.default_files import default_file
from megatron5d.config.load import CONF, load_config
from megatron5d.config.schema import Config, ModelConfig
from megatron5d.model.flops import parameter_count

GROUPS = [key for key in keys() if "." not in key]

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
# ranks their headers promise
EXPERIMENTS = {
    "quickstart": 16,
    "gpt2_124m": 8,
    "llama3_8b": 64,
    "llama3_70b": 256,
    "llama3_8b_128k": 128,
    "llama3_8b_to_128k": 128,
    "gpt2_xl": 16,
    "llama2_7b": 32,
    "llama2_70b": 256,
    "llama3_1b": 16,
    "llama3_405b": 2048,
    "qwen3_0_6b": 8,
    "qwen3_8b": 64,
    "gemma2_2b": 16,
    "gpt_oss_20b": 64,
    "qwen3_32b": 128,
    "qwen3_30b_a3b": 64,
    "qwen3_235b_a22b": 512,
    "mixtral_8x7b": 128,
    "mixtral_8x22b": 256,
    "deepseek_v2_lite": 32,
    "deepseek_v2": 512,
    "deepseek_v3": 2048,
}
EXPERIMENTS |= {  # as their headers name them, with the source
    f"published/{file.stem}": int(
        re.search(r" on (\d+) (?:G|T)PUs \(.+\)\.\n", file.read_text()).group(1)
    )
    for file in (CONF / "experiment" / "published").glob("*.yaml")
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
    assert [key_of(field) for field in Config.__dataclass_fields__.values()] == GROUPS


def test_nothing_said_is_the_schema():
    assert load_config([]) == Config()


def parameters(model: ModelConfig, experts: int | None = None) -> int:
    """Number of parameters from the architecture alone, tied matrices once; only so many experts a
    layer."""
    h, f, d = model.hidden_size, model.ffn_hidden_size, model.head_dim
    q, kv = model.num_heads * d, model.num_kv_heads * d
    norm = 2 * h if model.norm == "layernorm" else h
    branches = 4 if model.block_norm == "both" else 2
    if model.attention == "mla":
        a, dn, dr, dv = (
            model.num_heads,
            model.qk_nope_head_dim,
            model.qk_rope_head_dim,
            model.v_head_dim,
        )
        rq, r = model.q_lora_rank, model.kv_lora_rank
        queries = h * a * (dn + dr) if rq is None else h * rq + rq + rq * a * (dn + dr)
        attention = queries + h * (r + dr) + r + r * a * dn + r * a * dv + a * dv * h
    else:
        attention = h * q + 2 * h * kv + q * h
        attention += (q + 2 * kv) * model.qkv_bias + 2 * d * model.qk_norm
    attention += h * model.attention_out_bias + model.num_heads * model.attention_sinks
    matrices = 2 if model.activation in ("gelu", "gelu_tanh") else 3
    mlp = matrices * h * f + ((matrices - 1) * f + h) * model.mlp_bias
    embeddings = model.vocab_size * h * (1 if model.tie_embeddings else 2)
    positions = model.max_positions * h if model.position == "learned" else 0
    moe, E, last, ahead = 0, model.num_experts, model.num_layers - 1, model.num_mtp_layers
    if E:
        sparse = (E if experts is None else experts) * (
            model.moe_ffn_hidden_size or f
        ) + model.shared_ffn_hidden_size
        layers = [
            i
            for i in range(model.num_layers)
            if i >= model.first_k_dense and (i + 1) % model.moe_interval == 0
        ]
        layers += [last] * ahead * (last in layers)
        active = E if experts is None else experts
        biases = active * ((matrices - 1) * (model.moe_ffn_hidden_size or f) + h) * model.mlp_bias
        routers = E * (h + model.router_bias + model.router_linear_bias)
        moe = len(layers) * (matrices * h * sparse + biases + routers - mlp)
    norms = norm if model.parallel_block == "one_norm" else branches * norm
    blocks = (model.num_layers + ahead) * (attention + mlp + norms) + ahead * (2 * h * h + 3 * norm)
    return embeddings + positions + blocks + norm + moe


@pytest.mark.parametrize("name", MODELS)
def test_model_has_the_parameters_its_file_promises(name):
    model = configured(f"model={name}").model
    assert model.name == name
    promised = re.search(r"([\d,]{5,}) parameters", (CONF / "model" / f"{name}.yaml").read_text())
    assert promised is not None
    assert parameters(model) == int(promised.group(1).replace(",", ""))
    assert parameters(model) == PUBLISHED.get(name, parameters(model)) == parameter_count(model)
    active = re.search(
        r"([\d,]{5,})\s+of\s+them\s+active", (CONF / "model" / f"{name}.yaml").read_text()
    )
    if model.num_experts:
        assert active is not None
        counted = int(active.group(1).replace(",", ""))
        assert (
            counted == parameters(model, experts=model.top_k) == parameter_count(model, active=True)
        )


def test_all_published_models_are_there():
    assert {*PUBLISHED, *ROUNDED} <= set(MODELS)
    for name, billions in ROUNDED.items():
        assert parameter_count(configured(f"model={name}").model) / 1e9 == pytest.approx(
            billions, rel=2e-3
        )


def test_details_that_parameter_counts_do_not_show():
    llama, qwen, gpt2 = (
        configured(f"model={name}").model for name in ("llama3_1b", "qwen3_8b", "gpt2_xl")
    )
    scaling = llama.rope_scaling
    assert (scaling.type, scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor) == (
        "llama3",
        32.0,
        1.0,
        4.0,
    )
    assert (llama.rope_theta, llama.norm_eps, llama.max_positions) == (500000.0, 1e-5, 131072)
    assert (qwen.rope_theta, qwen.norm_eps, qwen.max_positions, qwen.qk_norm) == (
        1e6,
        1e-6,
        40960,
        True,
    )
    assert (gpt2.activation, gpt2.norm, gpt2.max_positions, gpt2.position) == (
        "gelu_tanh",
        "layernorm",
        1024,
        "learned",
    )


def test_each_experiment_is_promised_a_world():
    folder = CONF / "experiment"
    names = {file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml")}
    assert names == set(EXPERIMENTS)


def test_each_large_model_has_an_experiment_that_trains_it_sanely():
    """Without one, a model of 47 billion parameters is trained, and planned, in fp32 on 128
    tokens."""
    for name in MODELS:
        if parameter_count(configured(f"model={name}").model) < 500_000_000:
            continue
        own = next((each for each in (name, f"published/{name}") if each in EXPERIMENTS), None)
        named = re.search(
            r"experiment=\S+ model=.*[^.\n]", (CONF / "model" / f"{name}.yaml").read_text()
        )
        assert (own is None) != (named is None), (
            "an experiment of its own, or a header that says which to take"
        )
        words = [f"experiment={own}"] if own else [*named.group().split(), f"log.dir=runs/{name}"]
        config = configured(*words)
        train, log = config.train, config.log
        assert config.model == configured(f"model={name}").model
        assert config.precision.dtype == "bf16" and train.seq_len >= 1024
        assert train.gbs * train.seq_len >= 1 << 19 or own == "published/gpt3_175b", (
            "a benchmark of one replica"
        )
        assert config.model.num_experts == 0 or config.moe.balance != ["none"]
        assert (
            log.dir == f"runs/{own or name}"
            and log.jsonl
            and config.checkpoint.dir
            and log.wandb.name is None
        )


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_is_legal_on_the_ranks_it_promises(name, tmp_path, monkeypatch):
    """Once its data is there; without, that is all that is refused."""
    monkeypatch.chdir(tmp_path)
    config = configured(f"experiment={name}")
    faults = run_checks(config, EXPERIMENTS[name])
    assert {knob.partition(".")[0] for fault in faults for knob in fault.knobs} - {"init"} == {
        "data"
    }
    Path(config.init.from_checkpoint or "runs").mkdir(parents=True)
    prefixes = [*(config.data.train or ["corpus"]), *config.data.valid]
    for file in [f"{prefix}{end}" for prefix in prefixes for end in (".bin", ".idx")]:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_bytes(b"\0\0")
    if config.data.tokenizer:
        Path(config.data.tokenizer).write_bytes(b"\0\0")
    given = [] if config.data.train else ["data.train=corpus"]
    loaded = load_config([f"experiment={name}", *given], world=EXPERIMENTS[name])
    text = (CONF / "experiment" / f"{name}.yaml").read_text()
    assert any(f"{EXPERIMENTS[name]} {devices}" in text for devices in ("ranks", "GPUs", "TPUs"))
    assert loaded.model.name in (name, configured(f"experiment={name}").model.name)


def test_quickstart_is_a_mixture_of_experts_over_all_dimensions_at_once():
    config = configured("experiment=quickstart")
    parallel = config.parallel
    assert (parallel.tp, parallel.sp, parallel.cp, parallel.pp, parallel.ep, parallel.zero) == (
        2,
        True,
        2,
        2,
        4,
        1,
    )
    dp = EXPERIMENTS["quickstart"] // (parallel.tp * parallel.cp * parallel.pp)
    assert dp == 2 and config.train.gbs == config.train.mbs * dp, "one micro-batch a step"
    model, text = config.model, (CONF / "experiment" / "quickstart.yaml").read_text()
    assert (model.attention, model.num_experts, model.first_k_dense) == ("mla", 8, 1)
    assert f"{parameter_count(model):,} parameters" in text
    assert config.checkpoint.dir == f"{config.log.dir}/checkpoints"
    assert config.log.wandb.mode == "offline" and config.train.eval_every > 0


def test_the_context_recipe_stretches_what_the_short_one_trained():
    """One architecture but for Llama 3.1's stretching, as many tokens a step; cp by the method that
    sends least."""
    short, long = (configured(f"experiment={name}") for name in ("llama3_8b", "llama3_8b_to_128k"))
    assert long.init.from_checkpoint == short.checkpoint.dir
    scaling = configured("model=llama3_1b").model.rope_scaling
    assert long.model.rope_scaling == replace(scaling, factor=8.0)
    assert (
        replace(long.model, rope_scaling=short.model.rope_scaling, max_positions=8192)
        == short.model
    )
    assert long.train.gbs * long.train.seq_len == short.train.gbs * short.train.seq_len == 4 << 20
    assert (long.parallel.cp_method, long.parallel.cp_inner) == recommended(long)
