"""Configuration keys of the group `model`: the architecture."""

import math
from dataclasses import dataclass

from megatron5d.config import plugins
from megatron5d.config.key import group, key, positive

GATED = ("swiglu", "geglu_tanh", "swiglu_clamped")  # activations of a gate and an up projection


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for longer contexts, named as in Hugging Face."""

    type: str = key("none", "method", choices=("none", "linear", "llama3", "yarn"))
    factor: float = key(1.0, "context after stretching / before", minimum=1)
    original_max_positions: int = positive(8192, "context before stretching", unit="tokens")
    low_freq_factor: float = positive(
        1.0, "llama3: wavelengths above original / this are stretched by factor"
    )
    high_freq_factor: float = positive(
        4.0, "llama3: wavelengths below original / this are not stretched"
    )
    beta_fast: float = positive(32.0, "yarn: dims with more rotations are not stretched")
    beta_slow: float = positive(1.0, "yarn: dims with fewer rotations are interpolated")
    attention_factor: float | None = positive(
        None, "yarn: multiplies cos and sin; null = 0.1 ln(factor) + 1"
    )
    mscale: float = positive(1.0, "yarn: DeepSeek's variant of attention_factor")
    mscale_all_dim: float = key(
        0.0, "yarn: DeepSeek's variant, divides attention_factor; mla: scales the softmax"
    )
    truncate: bool = key(True, "yarn: round the ends of the ramp to whole dims")


@dataclass(frozen=True)
class ModelConfig:
    """The architecture: what decides on the function computed, and nothing about its layout."""

    name: str = key("tiny", "name of the model, for people and file names")
    from_hf: str | None = key(
        None, "folder whose config.json gives the architecture; keys on the command line win"
    )
    from_checkpoint: str | None = key(
        None, "checkpoint, or folder of checkpoints, whose run.json gives the architecture"
    )
    # shapes
    num_layers: int = positive(2, "transformer blocks")
    hidden_size: int = positive(64, "features of the residual stream")
    ffn_hidden_size: int = positive(176, "features inside the MLP")
    num_heads: int = positive(4, "query heads")
    num_kv_heads: int = positive(
        4, "key and value heads: num_heads is MHA, 1 is MQA, in between is GQA"
    )
    head_dim: int = positive(16, "features of one head; even with rope")
    vocab_size: int = positive(
        256,
        "vocabulary; the padding that tensor parallelism needs is added internally",
        unit="tokens",
    )
    max_positions: int = positive(
        4096, "rows of the position table with position=learned", unit="tokens"
    )
    # norms and activation
    norm: str = key("rmsnorm", "normalization", choices=("rmsnorm", "layernorm"))
    norm_eps: float = positive(1e-5, "added to the mean square")
    norm_zero_centered: bool = key(
        False, "scale by 1 + weight in norms (Gemma; Megatron's zero-centered gamma)"
    )
    activation: str = key(
        "swiglu",
        "activation of the MLP (swiglu_clamped: gpt-oss)",
        choices=(*GATED, "gelu", "gelu_tanh"),
    )
    # positions
    position: str = key("rope", "position embedding", choices=("rope", "learned"))
    rope_theta: float = positive(10000.0, "base of the rotary frequencies")
    window_rope_theta: float | None = positive(
        None,
        "base in layers with attention_window, without rope_scaling (Gemma 3); null = rope_theta",
    )
    rope_interleaved: bool = key(
        False, "false: half-split pairs (Llama); true: pairs of adjacent features"
    )
    rope_scaling: RopeScaling = group(RopeScaling)
    rotary_percent: float = positive(
        1.0, "share of head_dim that is rotated, its first features", maximum=1
    )
    # block
    qk_norm: bool = key(False, "RMSNorm over head_dim on queries and keys (Qwen3)")
    qk_norm_all_heads: bool = key(False, "apply qk_norm to all heads together (OLMo 2)")
    block_norm: str = key(
        "pre",
        "norms before or after attention and MLP (post: OLMo 2)",
        choices=("pre", "post", "both"),
    )
    parallel_block: str = key(
        "none",
        "attention and MLP both read the block's input, each through its own norm (NeoX) or "
        "through the same (PaLM)",
        choices=("none", "two_norms", "one_norm"),
    )
    qkv_bias: bool = key(False, "bias of the query, key and value projections")
    attention_out_bias: bool = key(False, "bias of the attention output projection")
    mlp_bias: bool = key(False, "biases of the MLP matrices")
    tie_embeddings: bool = key(False, "use the embedding as output matrix")
    embedding_scale: float = positive(
        1.0, "multiplies token embeddings; sqrt(hidden_size) in Gemma"
    )
    # attention
    attention_causal: bool = key(
        True, "hide later tokens from a query; false: it sees the whole sequence, or document"
    )
    attention_window: int | None = positive(
        None,
        "distance that a query sees on each side, itself included; null = all",
        unit="tokens",
    )
    window_layers: list[int] | None = key(
        None, "layers with attention_window, counted from 0; null = all"
    )
    query_pre_attn_scalar: int | None = positive(
        None, "scores are divided by its square root (Gemma 2); null = head_dim"
    )
    attention_softcap: float = key(0.0, "scores become cap·tanh(score/cap); 0 = off")
    attention_sinks: bool = key(
        False, "add a learned logit per head that every query also sees, without a value"
    )
    attention_gate: bool = key(
        False, "multiply heads' outputs by the sigmoid of a projection of the input"
    )
    attention: str = key(
        "gqa",
        "grouped queries (from MHA to MQA), or queries, keys and values from small latents "
        "(DeepSeek)",
        choices=("gqa", "mla"),
    )
    # latent attention (mla)
    q_lora_rank: int | None = positive(
        None,
        "mla: features of the query latent; null = queries are projected from the hidden state",
    )
    kv_lora_rank: int = positive(512, "mla: features of the latent that keys and values share")
    qk_nope_head_dim: int = positive(
        128, "mla: features of a head without rotary position; head_dim is not used"
    )
    qk_rope_head_dim: int = positive(
        64,
        "mla: features with rotary position, even; all heads share their key",
    )
    v_head_dim: int = positive(128, "mla: features of a head's value")
    latent_norm_eps: float | None = positive(
        None, "mla: norm_eps of the latents' norms (Moonlight); null = norm_eps"
    )
    # logits and initial weights
    logit_softcap: float = key(0.0, "logits become cap·tanh(logit/cap); 0 = off")
    init_std: float = positive(0.02, "standard deviation of the initial matrices and embeddings")
    init_scale_output: bool = key(
        True, "initialize output matrices of attention and MLP with init_std / sqrt(2·num_layers)"
    )
    # mixture of experts
    num_experts: int = key(0, "routed experts of a MoE layer; 0 = every layer is dense")
    top_k: int = positive(2, "experts per token")
    moe_ffn_hidden_size: int | None = positive(
        None, "features inside one expert; null = ffn_hidden_size"
    )
    shared_ffn_hidden_size: int = key(
        0, "features inside all shared experts together; 0 = no shared expert"
    )
    shared_expert_gate: bool = key(
        False, "multiply the shared expert's output by a sigmoid of the token (Qwen2-MoE)"
    )
    first_k_dense: int = key(0, "dense layers before the first MoE layer")
    moe_interval: int = positive(
        1, "of the layers after first_k_dense, layer i is MoE if this divides i + 1"
    )
    moe_layers: list[int] | None = key(
        None, "MoE layers, counted from 0; null = by first_k_dense and moe_interval"
    )
    # router
    router_score: str = key("softmax", "router scores", choices=("softmax", "sigmoid"))
    norm_topk_prob: bool = key(True, "divide the scores of the selected experts by their sum")
    routed_scaling_factor: float = positive(1.0, "multiplies the weights of the selected experts")
    num_groups: int = positive(1, "groups of adjacent experts; a token selects groups first")
    top_groups: int = positive(1, "groups from which a token may select experts")
    group_score: str = key(
        "max",
        "score of a group (max: DeepSeek-V2, top2_sum: DeepSeek-V3)",
        choices=("max", "top2_sum"),
    )
    router_bias: bool = key(
        False, "add a bias per expert that selects experts and is not part of their weights"
    )
    router_linear_bias: bool = key(
        False, "add a trained bias per expert to the router's logits (gpt-oss)"
    )
    # multi-token prediction
    num_mtp_layers: int = key(
        0, "blocks after the last layer, each predicting one more token ahead (MTP)"
    )

    @property
    def gated(self) -> bool:
        """Whether the first matrix of an MLP holds a gate and an up projection."""
        return self.activation in GATED or self.activation in plugins.GATED

    @property
    def expert_hidden_size(self) -> int:
        """Features inside one expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def rotary_dim(self) -> int:
        """Number of features of a head that are rotated."""
        if self.attention == "mla":
            return self.qk_rope_head_dim
        return round(self.head_dim * self.rotary_percent)

    @property
    def reduces_latent_gradients(self) -> bool:
        """Whether tp sums the gradients of the latents, and not those of the hidden state.

        The sum costs less at the latents if queries have one, too, and all latents together are
        smaller than the hidden state.
        """
        latents = (self.q_lora_rank or 0) + self.kv_lora_rank + self.qk_rope_head_dim
        return self.q_lora_rank is not None and latents < self.hidden_size

    @property
    def output_init_std(self) -> float:
        """Initial standard deviation of the matrices that write into the residual stream."""
        scale = math.sqrt(2 * self.num_layers) if self.init_scale_output else 1.0
        return self.init_std / scale
