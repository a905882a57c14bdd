"""Every law fires on a configuration made to break it, stays silent on a sound one, and is healed by its own fix."""

import json
import re
import shlex
from random import Random

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from megatron5d.config.available import AVAILABLE
from megatron5d.config.convert import from_dict, keys, kind_of, leaves, to_dict
from megatron5d.config.laws import LAWS, broken_laws
from megatron5d.config.schema import Config

# law: the values that break it, as JSON; `world` is the number of ranks (8 where it is not said)
BREAKS = """
model-num-layers: model.num_layers=0
model-hidden-size: model.hidden_size=0
model-ffn-hidden-size: model.ffn_hidden_size=-4
model-num-heads: model.num_heads=0
model-num-kv-heads: model.num_kv_heads=0
model-head-dim: model.head_dim=0
model-vocab-size: model.vocab_size=0
model-max-positions: model.max_positions=0
model-attention-window: model.attention_window=0
model-rope-scaling-factor: model.rope_scaling.factor=0.5
model-rope-scaling-original-max-positions: model.rope_scaling.original_max_positions=0
parallel-tp: parallel.tp=0
parallel-cp: parallel.cp=0
parallel-cp-inner: parallel.cp_method="two_level" parallel.cp_inner=0
parallel-pp: parallel.pp=0
parallel-vpp: parallel.vpp=0
parallel-ep: parallel.ep=0
parallel-etp: parallel.etp=0
parallel-dp-replicate: parallel.dp_replicate=0
train-steps: train.steps=0
train-gbs: train.gbs=0
train-mbs: train.mbs=0
train-seq-len: train.seq_len=0
train-eval-batches: train.eval_batches=0
recompute-num-layers: recompute.num_layers=0 recompute.mode="full"
log-every: log.every=0
model-attention-softcap: model.attention_softcap=-1
model-logit-softcap: model.logit_softcap=-1
model-rope-scaling-mscale-all-dim: model.rope_scaling.mscale_all_dim=-1
train-z-loss: train.z_loss=-0.1
train-eval-every: train.eval_every=-1
train-stop-after: train.stop_after=-1
train-seed: train.seed=-1
optim-min-lr: optim.min_lr=-1e-5
optim-warmup-steps: optim.warmup_steps=-1
optim-decay-steps: optim.decay_steps=-1
optim-weight-decay: optim.weight_decay=-0.1
optim-clip: optim.clip=-1
moe-aux-coef: moe.aux_coef=-1
moe-z-coef: moe.z_coef=-1
moe-bias-rate: moe.bias_rate=-1
data-eod: data.eod=-1
data-prefetch: data.prefetch=-1
checkpoint-every: checkpoint.every=-1
checkpoint-keep: checkpoint.keep=-1
model-norm-eps: model.norm_eps=0
model-rope-theta: model.rope_theta=0
model-init-std: model.init_std=0
model-rope-scaling-low-freq-factor: model.rope_scaling.low_freq_factor=0
model-rope-scaling-high-freq-factor: model.rope_scaling.high_freq_factor=0
model-rope-scaling-beta-fast: model.rope_scaling.beta_fast=0
model-rope-scaling-beta-slow: model.rope_scaling.beta_slow=-2
model-rope-scaling-attention-factor: model.rope_scaling.attention_factor=0
model-rope-scaling-mscale: model.rope_scaling.mscale=0
optim-lr: optim.lr=0
optim-eps: optim.eps=0
parallel-timeout-s: parallel.timeout_s=0
moe-capacity-factor: moe.capacity_factor=0
log-peak-tflops: log.peak_tflops=0
model-norm: model.norm="rms"
model-activation: model.activation="relu"
model-position: model.position="rotary"
model-rope-scaling-type: model.rope_scaling.type="dynamic"
parallel-cp-method: parallel.cp_method="rings"
optim-name: optim.name="adam"
optim-schedule: optim.schedule="cosin"
optim-implementation: optim.implementation="fused"
precision-dtype: precision.dtype="fp16"
precision-fp8: precision.fp8="yes"
precision-grad-dtype: precision.grad_dtype="fp16"
recompute-mode: recompute.mode="all"
data-order: data.order="random"
log-wandb-mode: log.wandb.mode="on"
parallel-zero: parallel.zero=4
parallel-order: parallel.order=["tp","dp","cp"]
pipeline-schedule: pipeline.schedule="csv:1f1b"
pipeline-layout: pipeline.layout=[3,-1]
pipeline-split: pipeline.split="costs"
pipeline-embedding-layers: pipeline.embedding_layers=-1
pipeline-head-layers: pipeline.head_layers=-0.5
pipeline-evaluations: pipeline.evaluations=-1
pipeline-memory: pipeline.memory=0
pipeline-search-s: pipeline.search_s=0
pipeline-copies: pipeline.copies=3
train-gbs-ramp: train.gbs_ramp=[8,8]
optim-betas: optim.betas=[0.9,1.0]
moe-balance: moe.balance=["none","aux"]
world-fits: parallel.tp=3 model.num_heads=12 model.num_kv_heads=12
dp-replicate-divides-dp: parallel.dp_replicate=3
experts-fold: parallel.ep=3
model-num-experts: model.num_experts=-1
model-top-k: model.top_k=0
model-moe-ffn-hidden-size: model.moe_ffn_hidden_size=0
model-shared-ffn-hidden-size: model.shared_ffn_hidden_size=-1
model-first-k-dense: model.first_k_dense=-1
model-moe-interval: model.moe_interval=0
model-num-groups: model.num_groups=0
model-top-groups: model.top_groups=0
model-routed-scaling-factor: model.routed_scaling_factor=0
model-router-score: model.router_score="softmaks"
model-group-score: model.group_score="top2"
moe-drop-by: moe.drop_by="probs"
moe-log-every: moe.log_every=0
parallel-ep-inner: parallel.ep_inner=0
nodes-divide-ep: model.num_experts=8 parallel.ep=4 parallel.ep_inner=3
routing-needs-experts: parallel.ep=2 moe.balance=["aux","bias"] moe.capacity_factor=1.25
experts-have-layers: model.num_experts=8 model.first_k_dense=2
moe-layers-exist: model.num_experts=8 model.moe_layers=[1,2]
top-k-experts-exist: model.num_experts=4 model.top_k=8
groups-divide-experts: model.num_experts=8 model.num_groups=3
top-groups-exist: model.num_experts=8 model.num_groups=2 model.top_groups=4
top-groups-hold-top-k: model.num_experts=8 model.num_groups=4 model.top_groups=1 model.top_k=3
top2-needs-two: model.num_experts=8 model.num_groups=8 model.top_groups=4 model.group_score="top2_sum"
experts-have-no-biases: model.num_experts=8 model.mlp_bias=true
experts-split-over-ep: model.num_experts=6 parallel.ep=4
experts-split-over-etp: model.num_experts=8 parallel.etp=4 model.moe_ffn_hidden_size=18
shared-expert-splits-over-tp: model.num_experts=8 model.shared_ffn_hidden_size=33 parallel.tp=2
aux-coef-needs-aux: model.num_experts=8 moe.aux_coef=0.01 moe.balance=["bias"]
bias-rate-needs-bias: model.num_experts=8 moe.bias_rate=0.001
gbs-splits: train.gbs=12
sp-needs-tp: parallel.sp=true
heads-split-over-tp: parallel.tp=8 train.gbs=1 model.num_kv_heads=1
kv-heads-split-over-tp: parallel.tp=2 model.num_heads=6 model.num_kv_heads=3
ffn-splits-over-tp: parallel.tp=2 model.ffn_hidden_size=177
sequence-splits-over-tp: parallel.tp=4 parallel.sp=true train.seq_len=126
sequence-splits-over-cp: parallel.cp=2 train.seq_len=126
cp-splits-heads: parallel.cp=8 parallel.cp_method="ulysses"
cp-inner-needs-two-level: parallel.cp=4 parallel.cp_inner=2
cp-inner-divides-cp: parallel.cp=4 parallel.cp_inner=3 parallel.cp_method="two_level"
compress-needs-mla: parallel.cp=2 parallel.cp_compress_kv=true
compress-needs-blocks: parallel.cp=2 parallel.cp_compress_kv=true parallel.cp_method="allgather" model.attention="mla"
compress-saves: parallel.cp=2 parallel.cp_compress_kv=true model.attention="mla" model.kv_lora_rank=1216
vpp-needs-pp: parallel.vpp=2
stages-have-layers: parallel.pp=4
layout-counts-stages: parallel.pp=2 pipeline.layout=[1,1,0]
layout-sums-to-layers: parallel.pp=2 pipeline.layout=[2,1]
model-attention: model.attention="mha"
model-q-lora-rank: model.attention="mla" model.q_lora_rank=0
model-kv-lora-rank: model.kv_lora_rank=0
model-qk-nope-head-dim: model.qk_nope_head_dim=0
model-qk-rope-head-dim: model.qk_rope_head_dim=-64
model-v-head-dim: model.v_head_dim=0
mla-dims-need-mla: model.kv_lora_rank=256
mla-needs-rope: model.attention="mla" model.position="learned"
mla-rope-pairs-dims: model.attention="mla" model.qk_rope_head_dim=63
mla-kv-heads: model.attention="mla" model.num_kv_heads=2
mla-has-no-such-option: model.attention="mla" model.qk_norm=true
kv-heads-divide-heads: model.num_kv_heads=3
rope-pairs-dims: model.head_dim=15
learned-positions-reach: model.position="learned" model.max_positions=64
scaling-needs-rope: model.position="learned" model.rope_scaling.type="linear"
llama3-scaling-bands: model.rope_scaling.type="llama3" model.rope_scaling.low_freq_factor=4
yarn-scaling-bands: model.rope_scaling.type="yarn" model.rope_scaling.beta_slow=32
fp8-needs-bf16: precision.fp8="tensorwise"
fp8-dims: precision.fp8="blockwise" precision.dtype="bf16"
grad-dtype-follows-fp64: precision.dtype="fp64" precision.grad_dtype="bf16"
recompute-layers-need-full: recompute.num_layers=1
recompute-layers-exist: recompute.num_layers=3 recompute.mode="full"
ramp-starts-below-gbs: train.gbs_ramp=[16,8,100]
ramp-reaches-gbs: train.gbs=24 train.gbs_ramp=[8,24,100]
ramp-splits: train.gbs=24 train.gbs_ramp=[12,12,100]
warmup-fits-steps: optim.warmup_steps=101
min-lr-below-lr: optim.lr=1e-5
wsd-decays: optim.schedule="wsd" optim.decay_steps=95 optim.warmup_steps=10
stop-before-end: train.stop_after=101
checkpoint-every-needs-dir: checkpoint.every=10
checkpoint-async-needs-dir: checkpoint.async=true
apex-installed: optim.implementation="apex"
wandb-installed: log.wandb.mode="offline"
data-train-given: data.train=[]
data-train-weights: data.train=["0 corpus"]
data-train-files: data.train=["corpse"]
data-valid-weights: data.valid=["-1 corpus"]
data-valid-files: data.valid=["0.5 corpse"]
data-split-numbers: data.split="90/10"
data-split-trains: data.split="0,1"
eval-needs-valid: train.eval_every=10
eod-in-vocabulary: data.eod=256
eod-known: data.eod_mask_loss=true
model-from-hf-folder: model.from_hf="nowhere"
init-from-hf-folder: init.from_hf="."
init-from-checkpoint-folder: init.from_checkpoint="nowhere"
init-has-one-source: init.from_checkpoint="." init.from_hf="released"
data-tokenizer-file: data.tokenizer="tokenizer.model"
data-cache-dir-path: data.cache_dir="corpus.bin"
checkpoint-dir-path: checkpoint.dir="corpus.bin/inside"
log-dir-path: log.dir="corpus.bin"
log-wandb-dir-path: log.wandb.dir="corpus.bin"
log-jsonl-path: log.jsonl="."
checkpoint-resume-folder: checkpoint.resume="step_7"
pipeline-schedule-file: pipeline.schedule="file:mine.csv"
available-parallel-zero: parallel.zero=2
available-precision-fp8: precision.fp8="tensorwise" precision.dtype="bf16"
available-recompute-mode: recompute.mode="selective"
"""
CASES = {line.split(": ")[0]: line.split(": ", 1)[1] for line in BREAKS.strip().splitlines()}
BY_ID = {law.id: law for law in LAWS}


@pytest.fixture(autouse=True)
def corpus(tmp_path, monkeypatch, request):
    """Makes a folder with one dataset and a release the working directory; what is installed must not matter."""
    for name in ("corpus.bin", "corpus.idx"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "released").mkdir()
    (tmp_path / "released" / "model.safetensors").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    absent = {"amp_C", "wandb"} if "wandb-installed" in request.node.name else {"amp_C"}
    monkeypatch.setattr("megatron5d.config.laws_run.find_spec", lambda name: None if name in absent else object())


def changed(values: dict[str, object]) -> Config:
    data = to_dict(Config())
    for key, value in {"data.train": ["corpus"], **values}.items():
        *path, last = key.split(".")
        node = data
        for name in path:
            node = node[name]
        assert last in node, key
        node[last] = value
    return from_dict(data)


def parsed(text: str) -> dict[str, object]:
    return {
        key: json.loads(value)
        for key, _, value in (pair.partition("=") for pair in re.split(r" (?=[a-z_.0-9]+=)", text))
    }


def broken_ids(values: dict[str, object], world: int = 8) -> list[str]:
    return [fault.id for fault in broken_laws(changed(values), world)]


def test_each_law_has_one_case_and_each_case_a_law():
    assert sorted(CASES) == sorted(law.id for law in LAWS)
    assert len(BY_ID) == len(LAWS)


def test_ids_are_kebab_case_and_knobs_are_keys():
    for law in LAWS:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", law.id)
        assert law.knobs and set(law.knobs) <= set(leaves())
        assert set(law.needs) <= set(BY_ID)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_no_law_fires_on_the_defaults(world):
    assert broken_ids({}, world) == []


@pytest.mark.parametrize("id", CASES)
def test_law_fires_and_names_its_knob(id):
    values = parsed(CASES[id])
    faults = {fault.id: fault for fault in broken_laws(changed(values), 8)}
    assert id in faults, f"{values} broke only {sorted(faults)}"
    fault = faults[id]
    written = [knob for knob in BY_ID[id].knobs if knob in values]
    assert any(knob.rpartition(".")[2] in fault.reason for knob in written), fault.reason
    assert re.search(r"[a-z_0-9.]+=\S|start \d", fault.fix), fault.fix


def healing(fix: str) -> dict[str, object] | None:
    """The overrides of the first way out that a fix offers; None where the user must fill in a name."""
    first = re.match(r"((?:[a-z_.0-9]+=(?:'[^']*'|\[[^]]*\]|[^\s,]+) ?)+)", fix)
    assert first, fix
    if re.search(r"\b(DIR|PREFIX|FILE|NAME|PATH)\b", first.group(1)):
        return None
    overrides = [OverridesParser.create().parse_override(text) for text in shlex.split(first.group(1))]
    return {override.key_or_group: override.value() for override in overrides}


@pytest.mark.parametrize("id", CASES)
def test_fix_heals_its_law_and_breaks_no_other(id):
    values = parsed(CASES[id])
    before = broken_laws(changed(values), 8)
    fix = healing(next(fault.fix for fault in before if fault.id == id))
    if fix is not None:
        after = broken_ids({**values, **fix})
        assert id not in after, fix
        # Values first: what a single illegal value hid may come to light, but nothing about the fixed knobs themselves.
        new = set(after) - {fault.id for fault in before}
        assert not [law for law in new if set(BY_ID[law].knobs) <= set(fix)], (fix, new)


def test_several_broken_laws_are_told_at_once():
    found = broken_ids({"train.gbs": 13, "optim.lr": -1.0, "model.norm": "rms", "parallel.zero": 2, "data.train": []})
    assert {"gbs-splits", "optim-lr", "model-norm", "available-parallel-zero", "data-train-given"} <= set(found)


def test_a_law_is_not_asked_about_a_value_that_is_illegal_by_itself():
    """tp = 0 would divide by zero in every law about tp."""
    assert broken_ids({"parallel.tp": 0}) == ["parallel-tp"]
    assert broken_ids({"parallel.zero": 7}) == ["parallel-zero"]


def test_every_unavailable_feature_is_refused_by_name():
    for knob in AVAILABLE:
        law = BY_ID["available-" + knob.replace(".", "-").replace("_", "-")]
        text = law.fault(changed(parsed(CASES[law.id])), 8).reason
        assert f"this version trains with {knob} =" in text


@pytest.mark.parametrize(
    ("values", "world", "fix"),
    [
        ({"train.gbs": 30, "train.mbs": 2}, 8, "train.gbs=16 or 32"),
        ({"train.gbs": 3}, 8, "train.gbs=8"),
        ({"parallel.tp": 6, "model.num_heads": 12, "model.num_kv_heads": 6, "model.ffn_hidden_size": 180}, 16,
         "parallel.tp=2, or start 12 or 18 ranks"),
        ({"parallel.tp": 8, "model.num_heads": 4, "model.num_kv_heads": 2, "train.gbs": 2}, 16, "parallel.tp=4"),
        ({"parallel.dp_replicate": 5}, 8, "parallel.dp_replicate=4"),
        ({"optim.schedule": "wsd", "train.steps": 400}, 8, "optim.decay_steps=40"),
        ({"pipeline.layout": [2, 1, 2], "parallel.pp": 3, "model.num_layers": 7}, 12, "pipeline.layout=[3,2,2]"),
    ],
)  # fmt: skip
def test_fix_is_the_nearest_legal_value(values, world, fix):
    assert fix in [fault.fix for fault in broken_laws(changed(values), world)]


def test_kv_heads_may_be_fewer_than_tp():
    """One KV head on four ranks is replicated; three on two cannot be shared."""
    assert broken_ids({"parallel.tp": 4, "model.num_kv_heads": 1, "train.gbs": 8}) == []
    assert "kv-heads-split-over-tp" in broken_ids(parsed(CASES["kv-heads-split-over-tp"]))


def test_a_constant_rate_has_no_minimum():
    assert broken_ids({"optim.lr": 1e-5, "optim.schedule": "constant"}) == []


@pytest.mark.parametrize("split", ["969,30,1", "1", "0.9, .1", "99,1,0"])
def test_splits_that_megatron_accepts(split):
    assert broken_ids({"data.split": split}) == []


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "1e2,3", "1,,2"])
def test_splits_that_are_no_shares(split):
    assert broken_ids({"data.split": split}) == ["data-split-numbers"]


SMALL = [-2, -1, 0, 1, 2, 3, 4, 5, 6, 8, 16, 128]
FLOATS = [-1.0, 0.0, 1e-5, 0.5, 1.0, 4.0, 1e30]
TEXTS = [
    "",
    "none",
    "auto",
    "llama3",
    "yarn",
    "wsd",
    "learned",
    "bf16",
    "full",
    "blockwise",
    "file:x",
    "1,2",
    "corpus",
    ".",
]


def anything(random: Random, key: str) -> object:
    """A value of the key's type, legal or not."""
    kind, optional = str(keys()[key]), "None" in str(keys()[key])
    if optional and random.random() < 0.3:
        return None
    if "list[" in kind:
        pool = SMALL if "int" in kind else FLOATS if "float" in kind else TEXTS
        return [random.choice(pool) for _ in range(random.randrange(4))]
    return random.choice({int: SMALL, float: FLOATS, bool: [True, False], str: TEXTS}[kind_of(key)])


def test_no_configuration_of_the_right_types_makes_a_law_stumble():
    """Zero sizes, empty lists and odd words, many at once: laws answer and explain, and never raise."""
    seen = set()
    for seed in range(300):
        random = Random(seed)
        share = random.choice([0.05, 0.3, 1.0])
        values = {key: anything(random, key) for key in leaves() if random.random() < share}
        for fault in broken_laws(changed(values), random.choice([1, 2, 3, 8, 64])):
            assert fault.reason and fault.fix and fault.knobs
            seen.add(fault.id)
    assert len(seen) > 0.8 * len(LAWS), set(BY_ID) - seen
