"""Layouts of small models whose memory is predicted and counted, by name."""

from megatron5d.config.schema import DataConfig, RecomputeConfig

# every token chooses every expert: the only routing whose counts are known beforehand
MOE = {
    "num_experts": 4,
    "top_k": 4,
    "moe_ffn_hidden_size": 24,
    "shared_ffn_hidden_size": 40,
    "first_k_dense": 1,
}


# several whole blocks of 128 each way: on the CPU operands are filled up to blocks, and a lone row
# of scales is its own transpose
BLOCKS = {
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "num_layers": 2,
}


MOE_BLOCKS = {**BLOCKS, **MOE, "moe_ffn_hidden_size": 256, "shared_ffn_hidden_size": 256}


BLOCKWISE = {"dtype": "bf16", "fp8": "blockwise"}


MUON = {"name": "muon"}


PARTS = ["norm", "qkv", "attention", "activation"]


MOE_PHASES = ["attention", "dispatch", "experts", "combine"]


def away(mode, phases, **options):
    return RecomputeConfig(mode, offload=phases, offload_min_bytes=2048, **options)


# the largest gradient waits for its sum
TIED = {"model": "odd_vocab_tied", "fields": {"vocab_size": 4000}}


LAYOUTS = {
    "one": (1, {}),
    "bf16-grads": (1, {"dtype": "bf16", "grads": "bf16"}),
    "gpt2": (1, {"model": "gpt2_style", "seq_len": 24}),
    "tp-sp-zero1": (4, {"tp": 2, "sp": True, "zero": 1, "gbs": 4, "dtype": "bf16"}),
    "selective": (1, {"recompute": RecomputeConfig("selective", num_layers=3), "dtype": "bf16"}),
    "selective-tp": (
        2,
        {
            "tp": 2,
            "sp": True,
            "recompute": RecomputeConfig("selective", ["qkv", "attention", "mlp"]),
        },
    ),
    "logits": (
        2,
        {
            "tp": 2,
            "sp": True,
            "recompute": RecomputeConfig(logit_tokens=48),
            "fields": {"vocab_size": 4000},
        },
    ),
    "zero3-step": (2, {"zero": 3, "gbs": 4, "grad_reduce": "per_step", "zero3_gather": "per_step"}),
    "zero3-zb_v": (4, {"zero": 3, "pp": 2, "gbs": 8, "schedule": "zb_v"}),
    "zero3-zb_h1": (4, {"zero": 3, "pp": 2, "gbs": 8, "schedule": "zb_h1"}),
    "zero3-1f1b": (4, {"zero": 3, "pp": 2, "gbs": 8, "dtype": "bf16", "recompute": "full"}),
    "zero2-v_half": (
        4,
        {"zero": 2, "pp": 2, "gbs": 8, "schedule": "v_half", "grad_reduce": "per_step"},
    ),
    "zero3-v_half": (
        4,
        {"zero": 3, "pp": 2, "gbs": 8, "schedule": "v_half", "zero3_gather": "per_step"},
    ),
    "zero3-latents": (
        8,
        {
            "zero": 3,
            "pp": 2,
            "gbs": 4,
            "schedule": "zb_h1",
            "model": "mla",
            "cp": 2,
            "cp_compress_kv": True,
        },
    ),
    "zero3-fp8": (2, {"zero": 3, "gbs": 4, "dtype": "bf16", "fp8": "tensorwise", **TIED}),
    "zero3-moe": (2, {"ep": 2, "zero": 3, "gbs": 4, "fields": MOE}),
    "mla-sp": (2, {"model": "mla", "tp": 2, "sp": True}),
    "fused": (
        2,
        {
            "tp": 2,
            "sp": True,
            "tp_overlap": "fused",
            "recompute": RecomputeConfig("full", num_layers=1),
        },
    ),
    "ring": (2, {"cp": 2}),
    "documents": (
        2,
        {"cp": 2, "cp_method": "ulysses", "data": DataConfig(document_mask=True, eod=7)},
    ),
    "ulysses": (2, {"cp": 2, "cp_method": "ulysses", "recompute": "full"}),
    "moe": (2, {"ep": 2, "fields": MOE}),
    "moe-1f1b": (
        2,
        {
            "pp": 2,
            "gbs": 8,
            "dtype": "bf16",
            "recompute": "full",
            "fields": {**MOE, "first_k_dense": 0},
        },
    ),
    "moe-tp-zero1": (
        4,
        {"ep": 4, "tp": 2, "etp": 1, "sp": True, "zero": 1, "fields": MOE, "recompute": "full"},
    ),
    "moe-zero2": (4, {"ep": 2, "zero": 2, "gbs": 4, "fields": MOE}),
    "capacity": (2, {"ep": 2, "fields": MOE, "moe": {"capacity_factor": 0.5}}),
    "ep-nodes": (4, {"ep": 4, "ep_inner": 2, "gbs": 4, "fields": MOE}),
    "zero2-parts": (
        2,
        {
            "zero": 2,
            "gbs": 4,
            "grad_reduce": "per_step",
            "recompute": RecomputeConfig("selective", PARTS),
        },
    ),
    "moe-parts": (
        2,
        {"ep": 2, "fields": MOE, "recompute": RecomputeConfig("selective", ["experts", "mlp"])},
    ),
    "moe-permute": (
        2,
        {"ep": 2, "fields": MOE, "recompute": RecomputeConfig("selective", ["norm", "permute"])},
    ),
    "offload": (1, {"optim": {"offload": True}, "dtype": "bf16"}),
    # so few tokens that a step's worst moment is the update's
    "muon": (1, {"optim": MUON, "seq_len": 8, "gbs": 1, "fields": BLOCKS}),
    "muon-moe": (
        4,
        {
            "optim": MUON,
            "seq_len": 8,
            "ep": 2,
            "tp": 2,
            "etp": 2,
            "zero": 1,
            "fields": {**MOE_BLOCKS, "num_layers": 4},
        },
    ),
    "muon-offload": (
        2,
        {"optim": {**MUON, "offload": True}, "seq_len": 8, "zero": 1, "dtype": "bf16"},
    ),
    "offload-phases": (
        2,
        {"pp": 2, "gbs": 4, "dtype": "bf16", "recompute": away("none", ["attention", "mlp"])},
    ),
    "offload-moe": (
        2,
        {"ep": 2, "fields": MOE, "optim": {"offload": True}, "recompute": away("none", MOE_PHASES)},
    ),
    "offload-inputs": (
        1,
        {"recompute": away("full", ["inputs", "mlp"], num_layers=3), "dtype": "bf16"},
    ),
    "offload-parts": (
        2,
        {
            "pp": 2,
            "gbs": 4,
            "schedule": "zb_h1",
            "recompute": away("selective", ["attention", "mlp"]),
        },
    ),
    "tensorwise-zero2": (
        2,
        {"fp8": "tensorwise", "dtype": "bf16", "zero": 2, "gbs": 4, "seq_len": 64},
    ),
    "blockwise-zero1": (2, {**BLOCKWISE, "fields": BLOCKS, "zero": 1, "gbs": 4}),
    "blockwise-moe": (2, {**BLOCKWISE, "fields": MOE_BLOCKS, "ep": 2}),
    # FP8 copies of weights that are kept for a step, that are not gathered at all, or only some,
    # and of 16-bit ones
    "zero3-fp8-step": (
        2,
        {**BLOCKWISE, "fields": BLOCKS, "zero": 3, "gbs": 4, "zero3_gather": "per_step"},
    ),
    "zero3-fp8-replicas": (2, {**BLOCKWISE, "fields": BLOCKS, "zero": 3, "dp_replicate": 2}),
    "zero3-fp8-experts": (
        2,
        {**BLOCKWISE, "fields": MOE_BLOCKS, "zero": 3, "ep": 2, "zero3_gather": "per_step"},
    ),
    "zero3-fp8-wide": (
        2,
        {**BLOCKWISE, "fields": BLOCKS, "zero": 3, "fp8_gather": False, "seq_len": 16},
    ),
    "zero3-fp8-wide-step": (
        2,
        {
            **BLOCKWISE,
            "fields": BLOCKS,
            "zero": 3,
            "gbs": 4,
            "fp8_gather": False,
            "zero3_gather": "per_step",
        },
    ),
    "sixteen": (16, {"pp": 4, "tp": 2, "sp": True, "zero": 2, "gbs": 8, "dtype": "bf16"}),
    "mtp": (1, {"fields": {"num_mtp_layers": 2}, "recompute": "full"}),
    # the worst moment is in a phase of two buckets: the prediction layer's, and the vocabulary's,
    # which comes first
    "mtp-zero2": (
        4,
        {"pp": 2, "zero": 2, "gbs": 4, "recompute": "selective", "fields": {"num_mtp_layers": 1}},
    ),
    "mtp-before-head": (
        3,
        {
            "pp": 3,
            "gbs": 6,
            "schedule": "1f1b",
            "layout": [2, 4, 0],
            "zero": 1,
            "fields": {"num_mtp_layers": 2, "tie_embeddings": True},
        },
    ),
    "mtp-5": (2, {"pp": 2, "gbs": 4, "fields": {"num_mtp_layers": 5}}),
    "1f1b": (2, {"pp": 2, "gbs": 4, "recompute": "full"}),
    "interleaved": (2, {"pp": 2, "vpp": 2, "gbs": 4, "schedule": "interleaved"}),
    "zb_v": (2, {"pp": 2, "gbs": 4, "schedule": "zb_v", "model": "odd_vocab_tied"}),
    "v_min": (2, {"pp": 2, "gbs": 8, "schedule": "v_min"}),
    "zb_v-empty-stage": (2, {"pp": 2, "gbs": 8, "schedule": "zb_v", "layout": [1, 0, 2, 1]}),
    "zero3-empty-stages": (
        4,
        {
            "zero": 3,
            "pp": 2,
            "vpp": 3,
            "gbs": 8,
            "schedule": "interleaved",
            "layout": [1, 2, 0, 0, 1, 0],
        },
    ),
    "overlap-empty-stages": (
        2,
        {
            "pp": 2,
            "vpp": 2,
            "gbs": 8,
            "schedule": "interleaved_overlap",
            "recompute": "full",
            "layout": [0, 1, 0, 3],
        },
    ),
    "dualpipe": (2, {"pp": 2, "gbs": 4, "schedule": "dualpipe", "model": "odd_vocab_tied"}),
    "dualpipe_v-tp": (4, {"pp": 2, "tp": 2, "sp": True, "gbs": 4, "schedule": "dualpipe_v"}),
}
