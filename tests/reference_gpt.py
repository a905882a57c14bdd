"""The model on one page, without parallelism, kernels or classes: the oracle of the parity tests.

Weights are a dict of global tensors by global name. All arithmetic is in their dtype and goes
through autograd.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from megatron5d.config.schema import MoeConfig, TrainConfig
from megatron5d.topology.init_weights import stream_key, uniform


def norm(x, w, name, c):
    if c.norm == "layernorm":
        weight = w[f"{name}.weight"] + c.norm_zero_centered
        return F.layer_norm(x, x.shape[-1:], weight, w[f"{name}.bias"], c.norm_eps)
    return rms_norm(x, w, name, c)


def rms_norm(x, w, name, c, eps=None):
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + (eps or c.norm_eps))
    return x * rstd * (w[f"{name}.weight"] + c.norm_zero_centered)


def linear(x, w, name):
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def rotate(x, positions, c, theta):
    """x [b, heads, s, d], positions [b, s]; without scaling, which has its own tests."""
    d = x.shape[-1] if c.attention == "mla" else c.rotary_dim
    x, not_rotated = x[..., :d], x[..., d:]
    inv = theta ** (-torch.arange(0, d, 2, dtype=x.dtype) / d)
    angle = (positions[:, :, None] * inv)[:, None]  # [b, 1, s, d/2]
    cos, sin = angle.cos(), angle.sin()
    if c.rope_interleaved:
        even, odd = x[..., 0::2], x[..., 1::2]
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
        return torch.cat((rotated, not_rotated), -1)
    first, second = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, not_rotated), -1)


def split_heads(x, heads):
    """[b, s, heads·d] -> [b, heads, s, d]"""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def grouped_heads(x, w, name, c, positions, theta):
    a, g, d = c.num_heads, c.num_kv_heads, c.head_dim
    sizes = [a * d, g * d, g * d, a * d * c.attention_gate]
    q, k, v, gate = linear(x, w, f"{name}.qkv").split(sizes, dim=-1)
    if c.qk_norm_all_heads:
        q, k = rms_norm(q, w, f"{name}.q_norm", c), rms_norm(k, w, f"{name}.k_norm", c)
    q, k, v = split_heads(q, a), split_heads(k, g), split_heads(v, g)
    if c.qk_norm and not c.qk_norm_all_heads:
        q, k = rms_norm(q, w, f"{name}.q_norm", c), rms_norm(k, w, f"{name}.k_norm", c)
    if c.position == "rope":
        q, k = rotate(q, positions, c, theta), rotate(k, positions, c, theta)
    return q, *(t.repeat_interleave(a // g, dim=1) for t in (k, v)), gate


def latent_heads(x, w, name, c, positions, theta):
    a, dn, dr, dv = c.num_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    if c.q_lora_rank is None:
        q = linear(x, w, f"{name}.q")
    else:
        latent = linear(x, w, f"{name}.q_down")
        q = linear(rms_norm(latent, w, f"{name}.q_norm", c, c.latent_norm_eps), w, f"{name}.q_up")
    q_nope, q_pe = split_heads(q, a).split([dn, dr], dim=-1)
    c_kv, k_pe = linear(x, w, f"{name}.kv_down").split([c.kv_lora_rank, dr], dim=-1)
    c_kv = rms_norm(c_kv, w, f"{name}.kv_norm", c, c.latent_norm_eps)
    k_nope, v = split_heads(linear(c_kv, w, f"{name}.kv_up"), a).split([dn, dv], dim=-1)
    q_pe = rotate(q_pe, positions, c, theta)
    k_pe = rotate(k_pe[:, None], positions, c, theta).expand(-1, a, -1, -1)
    return torch.cat((q_nope, q_pe), -1), torch.cat((k_nope, k_pe), -1), v, None


def document_starts(positions):
    """Index [b, s] at which each token's document begins; 0 without a document mask."""
    return torch.arange(positions.shape[1]) - positions


def attention(x, w, name, c, positions, padding, windowed):
    theta = c.window_rope_theta if windowed and c.window_rope_theta else c.rope_theta
    heads = latent_heads if c.attention == "mla" else grouped_heads
    q, k, v, gate = heads(x, w, name, c, positions, theta)  # [b, a, s, d]
    scores = q @ k.transpose(-1, -2) / math.sqrt(c.query_pre_attn_scalar or q.shape[-1])
    if c.attention_softcap:
        scores = c.attention_softcap * torch.tanh(scores / c.attention_softcap)
    row, column = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])[None, :]
    visible = column <= row if c.attention_causal else torch.ones_like(column <= row)
    if c.attention_window is not None and windowed:
        visible = visible & ((row - column).abs() < c.attention_window)
    starts = document_starts(positions)
    visible = visible & (starts[:, None, :, None] == starts[:, None, None, :])
    if padding is not None:  # which sees itself: its output is not read, and must not be NaN
        visible = visible & (~padding[:, None, None, :] | (row == column))
    scores = scores.masked_fill(~visible, -math.inf)
    if c.attention_sinks:
        sinks = w[f"{name}.sinks"][None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
    out = torch.softmax(scores, -1)[..., : x.shape[1]] @ v
    out = out.transpose(1, 2).flatten(2)
    return linear(out * torch.sigmoid(gate) if c.attention_gate else out, w, f"{name}.out")


def activate(inner, c):
    if c.activation in ("gelu", "gelu_tanh"):
        return F.gelu(inner, approximate="tanh" if c.activation == "gelu_tanh" else "none")
    gate, up = inner.chunk(2, -1)
    if c.activation == "swiglu_clamped":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return (F.silu(gate) if c.activation == "swiglu" else F.gelu(gate, approximate="tanh")) * up


def mlp(x, w, name, c):
    return linear(activate(linear(x, w, f"{name}.up"), c), w, f"{name}.down")


def expert(x, w, name, e, c):
    def linear_of_expert(x, part):
        y = x @ w[f"{name}.{part}.weight"][e].T
        return y + w[f"{name}.{part}.bias"][e] if c.mlp_bias else y

    return linear_of_expert(activate(linear_of_expert(x, "up"), c), "down")


def top_k(values, k):
    """The k largest of the last dim as a 0/1 mask; of those within 2⁻⁴⁰ of the largest the
    first."""
    chosen, index = torch.zeros_like(values), torch.arange(values.shape[-1])
    for _ in range(k):
        left = values.masked_fill(chosen > 0, -math.inf)
        largest = left.max(-1, keepdim=True).values
        is_equal = (largest - left <= 2.0**-40 * largest.abs()) & (chosen == 0)
        first = torch.where(is_equal, index, len(index)).min(-1, keepdim=True).values
        chosen = chosen.scatter(-1, first, 1.0)
    return chosen


def route(scores, w, layer, c):
    """Choices [b, s, E] (0 or 1) by scores, bias and groups."""
    ranked = scores + w.get(f"{layer}.router.bias", 0.0)
    if c.top_groups < c.num_groups:
        groups = ranked.unflatten(-1, (c.num_groups, -1))
        if c.group_score == "max":
            group_scores = groups.max(-1).values
        else:
            group_scores = groups.sort(-1).values[..., -2:].sum(-1)
        allowed = top_k(group_scores, c.top_groups)
        allowed = allowed.repeat_interleave(c.num_experts // c.num_groups, -1)
        ranked = torch.where(allowed > 0, ranked, -math.inf)
    return top_k(ranked, c.top_k)


def round_robin(scores, samples, c):
    """Choices [b, s, E]: each token takes the k experts after those of the token before it."""
    b, s, num_experts = scores.shape
    index = torch.arange(s)[None] + (torch.arange(b) if samples is None else samples)[:, None]
    experts = (index[..., None] * c.top_k + torch.arange(c.top_k)) % num_experts
    return torch.zeros_like(scores).scatter(-1, experts, 1.0)


def replay(scores, samples, w, layer, c, moe):
    """Choices [b, s, E] from the file, by sample, position and index of the MoE block; the
    router's where the file has no expert."""
    moe_block = sum(is_moe(c, i) for i in range(int(layer.split(".")[1])))
    experts = torch.from_numpy(np.load(moe.replay).astype(np.int64))[samples, :, moe_block]
    recorded = (experts[..., None] == torch.arange(c.num_experts)).any(-2)
    own = route(scores, w, layer, c)
    return torch.where(recorded.any(-1, keepdim=True), recorded.to(scores.dtype), own)


def limit_capacity(choices, weights, moe, mbs):
    """Choices within the capacity of each micro-batch; tokens in the order (position, row)."""
    kept = torch.zeros_like(choices)
    b, s, num_experts = choices.shape
    for first in range(0, b, mbs):
        tokens = [(i, j) for i in range(s) for j in range(first, first + mbs)]
        num_choices = int(choices[first : first + mbs].sum())
        limit = math.ceil(moe.capacity_factor * num_choices / num_experts)
        for e in range(num_experts):
            queue = [(i, j) for i, j in tokens if choices[j, i, e]]
            if moe.drop_by == "probability" and len(queue) > limit:
                p = {(i, j): weights[j, i, e].item() for i, j in queue}
                last = sorted(p.values())[-limit]
                surely = [t for t in queue if p[t] > last * (1 + 2.0**-20)]
                equal = [t for t in queue if abs(p[t] - last) <= last * 2.0**-20]
                queue = surely + equal  # the queue is in the order of positions
            for i, j in queue[:limit]:
                kept[j, i, e] = 1
    return kept


def jitter(x, layer, moe, seed, samples):
    """The router's input times 1 ± moe.jitter, at random for each (sample, position, feature)."""
    if not moe.jitter or samples is None:
        return x
    shape = (int(samples.max()) + 1, *x.shape[1:])
    index = torch.arange(math.prod(shape)).view(shape)[samples]
    noise = uniform(stream_key(seed, f"{layer}.router.jitter"), index)
    return x * (1 - moe.jitter + 2 * moe.jitter * noise)


def moe_layer(x, w, layer, c, moe, *, mbs, real, figures, noise):
    """Mixture of experts on [b, s, h]; adds its losses to `figures` (sums over layers)."""
    z = jitter(x, layer, moe, *noise) @ w[f"{layer}.router.weight"].T
    z = z + w[f"{layer}.router.linear_bias"] if c.router_linear_bias else z
    scores = torch.softmax(z, -1) if c.router_score == "softmax" else torch.sigmoid(z)
    if moe.replay:
        choices = replay(scores.detach(), noise[1], w, layer, c, moe)
    elif moe.force_balanced:
        choices = round_robin(scores, noise[1], c)
    else:
        choices = route(scores.detach(), w, layer, c)
    choices = choices * real
    weights = scores * choices
    if c.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * c.routed_scaling_factor
    if moe.capacity_factor is not None:
        kept = limit_capacity(choices, weights.detach(), moe, mbs)
        figures[f"{layer}.dropped"] = ((choices - kept).sum() / choices.sum()).item()
        weights = weights * kept
    figures[f"{layer}.counts"] = choices.sum((0, 1))
    out = sum(
        weights[..., e : e + 1] * expert(x, w, f"{layer}.experts", e, c)
        for e in range(c.num_experts)
    )
    if c.shared_ffn_hidden_size:
        shared = mlp(x, w, f"{layer}.shared_expert", c)
        if c.shared_expert_gate:
            shared = torch.sigmoid(linear(x, w, f"{layer}.shared_expert.gate")) * shared
        out = out + shared
    probs = scores / scores.sum(-1, keepdim=True) * real
    unbiased = top_k(scores.detach(), c.top_k) * real
    lse = torch.logsumexp(z, -1, keepdim=True) * real
    layer_losses = {
        "aux_loss": auxiliary_loss(unbiased, probs, c, mbs),
        "seq_aux_loss": auxiliary_loss(unbiased, probs, c, 1),
        "global_aux_loss": auxiliary_loss(unbiased, probs, c, len(x)),
        "router_z_loss": lse.square().sum() / real.sum(),
    }
    for name, value in layer_losses.items():
        figures[name] = figures.get(name, 0.0) + value
    return out


def auxiliary_loss(choices, probs, c, rows):
    """Mean over groups of `rows` sequences of E/(k·T²) · Σ_e n_e Σ_t p_te."""
    # [groups, E]
    n, p = (t.view(-1, rows * t.shape[1], c.num_experts).sum(1) for t in (choices, probs))
    num_tokens = n.sum(-1) / c.top_k
    return (c.num_experts / (c.top_k * num_tokens.clamp(min=1) ** 2) * (n * p).sum(-1)).mean()


def is_moe(c, i):
    i = min(i, c.num_layers - 1)  # prediction blocks are like the last layer
    if c.moe_layers is not None:
        return c.num_experts > 0 and i in c.moe_layers
    return c.num_experts > 0 and i >= c.first_k_dense and (i + 1) % c.moe_interval == 0


def block(x, w, i, c, positions, padding, *, moe, **routing):
    layer = f"layers.{i}"

    def pre_norm(x, branch):
        return x if c.block_norm == "post" else norm(x, w, f"{layer}.{branch}.norm", c)

    def post_norm(y, branch):
        return y if c.block_norm == "pre" else norm(y, w, f"{layer}.{branch}.post_norm", c)

    windowed = c.window_layers is None or min(i, c.num_layers - 1) in c.window_layers
    normed = pre_norm(x, "attention")
    y = attention(normed, w, f"{layer}.attention", c, positions, padding, windowed)
    first = post_norm(y, "attention")
    if c.parallel_block != "one_norm":
        normed = pre_norm(x if c.parallel_block == "two_norms" else x + first, "mlp")
    if is_moe(c, i):
        y = moe_layer(normed, w, layer, c, moe, **routing)
    else:
        y = mlp(normed, w, f"{layer}.mlp", c)
    return x + first + post_norm(y, "mlp")


def trunk(w, c, tokens, positions, padding, **routing):
    """Maps tokens int64 [b, s] -> normed output of the last layer [b, s, h]."""
    x = w["embedding.weight"][tokens] * c.embedding_scale
    if c.position == "learned":
        x = x + w["position_embedding.weight"][positions]
    for i in range(c.num_layers):
        x = block(x, w, i, c, positions, padding, **routing)
    return norm(x, w, "final_norm", c)


def head(x, w, c):
    out = x @ w["embedding.weight" if c.tie_embeddings else "head.weight"].T
    return c.logit_softcap * torch.tanh(out / c.logit_softcap) if c.logit_softcap else out


def logits(w, c, tokens):
    """Maps tokens int64 [b, s] -> [b, s, vocab]."""
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    real = torch.ones(*tokens.shape, 1, dtype=w["embedding.weight"].dtype)
    routing = {"moe": MoeConfig(), "mbs": 1, "real": real, "figures": {}, "noise": (0, None)}
    return head(trunk(w, c, tokens, positions, None, **routing), w, c)


def cross_entropy(z, labels):
    """Loss and log-sum-exp of each token, [b, s]; losses of negative labels must be masked."""
    lse = torch.logsumexp(z, -1)
    return lse - z.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1), lse


def mtp_loss(h, w, c, batch, **routing):
    """Multi-token prediction: mean over the depths with targets of their mean losses.

    h [b, s, h] is the output of the trunk.
    """
    rows, s = torch.cat((batch.tokens[:, :1], batch.labels), 1), batch.tokens.shape[1]
    depth_losses = []
    for k in range(1, c.num_mtp_layers + 1):
        i, last = c.num_layers + k - 1, s - k
        tokens, mask = torch.zeros_like(batch.tokens), torch.zeros(len(h), s)
        labels = torch.full_like(batch.labels, -1)
        tokens[:, : last + 1] = rows[:, k : k + last + 1].clamp(min=0)  # k positions ahead
        labels[:, :last], mask[:, :last] = rows[:, k + 1 :], batch.loss_mask[:, k:]
        # no token between is padding
        for j in range(k) if batch.padding is not None else ():
            mask[:, :last] *= ~batch.padding[:, j : j + last]
        starts = document_starts(batch.positions)
        mask[:, :last] *= starts[:, k:] == starts[:, :last]
        name = f"layers.{i}.mtp"
        embedded = w["embedding.weight"][tokens] * c.embedding_scale
        embedded = norm(embedded, w, f"{name}.embedding_norm", c)
        x = torch.cat((embedded, norm(h, w, f"{name}.hidden_norm", c)), -1)
        x = x @ w[f"{name}.join.weight"].T
        x = block(x, w, i, c, batch.positions, batch.padding, **routing)
        h = norm(x, w, f"{name}.final_norm", c)
        if mask.sum() > 0:
            loss, _ = cross_entropy(head(h, w, c), labels)
            depth_losses.append((loss * mask).sum() / mask.sum())
    return sum(depth_losses) / len(depth_losses) if depth_losses else torch.tensor(math.nan)


def losses(w, c, batch, train=None, moe=None, mbs=1):
    """Mean loss over the batch's target tokens, the objective to differentiate, and figures."""
    real, figures = torch.ones(*batch.tokens.shape, 1, dtype=w["embedding.weight"].dtype), {}
    if batch.padding is not None:
        real[batch.padding] = 0.0
    train, moe = train or TrainConfig(), moe or MoeConfig()
    routing = {"moe": moe, "mbs": mbs, "real": real, "figures": figures}
    routing["noise"] = train.seed, batch.samples
    h = trunk(w, c, batch.tokens, batch.positions, batch.padding, **routing)
    token_loss, lse = cross_entropy(head(h, w, c), batch.labels)
    count = batch.loss_mask.sum()
    loss = (token_loss * batch.loss_mask).sum() / count
    figures["z_loss"] = (lse.square() * batch.loss_mask).sum() / count
    objective = loss + train.z_loss * figures["z_loss"]
    if c.num_mtp_layers:
        figures["mtp_loss"] = mtp_loss(h, w, c, batch, **routing)
        objective = objective + train.mtp_loss * figures["mtp_loss"].nan_to_num()
    if c.num_experts:
        for kind in ("aux", "seq_aux", "global_aux"):
            if kind in moe.balance:
                objective = objective + moe.aux_coef * figures[f"{kind}_loss"]
        objective = objective + moe.z_coef * figures["router_z_loss"]
    return loss, objective, figures
