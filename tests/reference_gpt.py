"""The whole model on one page: no parallelism, no kernels, no classes. The oracle of the parity
tests.

Weights are a dict of global tensors by global name; all arithmetic is in their dtype and goes
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
        return F.layer_norm(
            x,
            x.shape[-1:],
            w[f"{name}.weight"] + c.norm_zero_centered,
            w[f"{name}.bias"],
            c.norm_eps,
        )
    return rms(x, w[f"{name}.weight"], c)


def rms(x, weight, c, eps=None):
    return (
        x
        * torch.rsqrt(x.square().mean(-1, keepdim=True) + (eps or c.norm_eps))
        * (weight + c.norm_zero_centered)
    )


def linear(x, w, name):
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def rotate(x, positions, c, theta):
    """x [b, heads, s, d], positions [b, s]; plain frequencies (stretched ones have their own
    tests)."""
    d = x.shape[-1] if c.attention == "mla" else c.rotary_dim
    x, rest = x[..., :d], x[..., d:]
    inv = theta ** (-torch.arange(0, d, 2, dtype=x.dtype) / d)
    angle = (positions[:, :, None] * inv)[:, None]  # [b, 1, s, d/2]
    cos, sin = angle.cos(), angle.sin()
    if c.rope_interleaved:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.cat(
            (torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2), rest),
            -1,
        )
    first, second = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def split_heads(x, heads):
    """[b, s, heads·d] -> [b, heads, s, d]"""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def grouped_heads(x, w, name, c, positions, theta):
    a, g, d = c.num_heads, c.num_kv_heads, c.head_dim
    q, k, v, gate = linear(x, w, f"{name}.qkv").split(
        [a * d, g * d, g * d, a * d * c.attention_gate], dim=-1
    )
    if c.qk_norm_all_heads:
        q, k = rms(q, w[f"{name}.q_norm.weight"], c), rms(k, w[f"{name}.k_norm.weight"], c)
    q, k, v = split_heads(q, a), split_heads(k, g), split_heads(v, g)
    if c.qk_norm and not c.qk_norm_all_heads:
        q, k = rms(q, w[f"{name}.q_norm.weight"], c), rms(k, w[f"{name}.k_norm.weight"], c)
    if c.position == "rope":
        q, k = rotate(q, positions, c, theta), rotate(k, positions, c, theta)
    return q, *(t.repeat_interleave(a // g, dim=1) for t in (k, v)), gate


def latent_heads(x, w, name, c, positions, theta):
    a, dn, dr, dv = c.num_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    if c.q_lora_rank is None:
        q = linear(x, w, f"{name}.q")
    else:
        latent = rms(
            linear(x, w, f"{name}.q_down"), w[f"{name}.q_norm.weight"], c, c.latent_norm_eps
        )
        q = linear(latent, w, f"{name}.q_up")
    q_nope, q_pe = split_heads(q, a).split([dn, dr], dim=-1)
    c_kv, k_pe = linear(x, w, f"{name}.kv_down").split([c.kv_lora_rank, dr], dim=-1)
    kv = linear(rms(c_kv, w[f"{name}.kv_norm.weight"], c, c.latent_norm_eps), w, f"{name}.kv_up")
    k_nope, v = split_heads(kv, a).split([dn, dv], dim=-1)
    q_pe, k_pe = (
        rotate(q_pe, positions, c, theta),
        rotate(k_pe[:, None], positions, c, theta).expand(-1, a, -1, -1),
    )
    return torch.cat((q_nope, q_pe), -1), torch.cat((k_nope, k_pe), -1), v, None


def attention(x, w, name, c, positions, documents, windowed):
    theta = c.window_rope_theta if windowed and c.window_rope_theta else c.rope_theta
    heads = latent_heads if c.attention == "mla" else grouped_heads
    q, k, v, gate = heads(x, w, name, c, positions, theta)  # [b, a, s, d]
    scores = q @ k.transpose(-1, -2) / math.sqrt(c.query_pre_attn_scalar or q.shape[-1])
    if c.attention_softcap:
        scores = c.attention_softcap * torch.tanh(scores / c.attention_softcap)
    row, column = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])[None, :]
    seen = column <= row if c.attention_causal else torch.ones_like(column <= row)
    if c.attention_window is not None and windowed:
        seen = seen & ((row - column).abs() < c.attention_window)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = scores.masked_fill(~seen, -math.inf)
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
    up_bias, down_bias = (
        (w[f"{name}.{each}.bias"][e] if c.mlp_bias else 0.0) for each in ("up", "down")
    )
    inner = activate(x @ w[f"{name}.up.weight"][e].T + up_bias, c)
    return inner @ w[f"{name}.down.weight"][e].T + down_bias


def best(values, k):
    """The k largest of the last dim as a 0/1 mask; of equals the first."""
    order = values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return torch.zeros_like(values).scatter(-1, order, 1.0)


def route(scores, w, layer, c):
    """0/1 choice [b, s, E] by score, bias and groups."""
    ranked = scores + w.get(f"{layer}.router.bias", 0.0)
    if c.top_groups < c.num_groups:
        groups = ranked.unflatten(-1, (c.num_groups, -1))
        worth = (
            groups.max(-1).values
            if c.group_score == "max"
            else groups.sort(-1).values[..., -2:].sum(-1)
        )
        allowed = best(worth, c.top_groups).repeat_interleave(c.num_experts // c.num_groups, -1)
        ranked = torch.where(allowed > 0, ranked, -math.inf)
    return best(ranked, c.top_k)


def by_turns(scores, samples, c):
    """0/1 choice [b, s, E]: the token at a position of a sequence takes the k experts after those
    of its neighbour."""
    b, s, num_experts = scores.shape
    turn = torch.arange(s)[None] + (torch.arange(b) if samples is None else samples)[:, None]
    experts = (turn[..., None] * c.top_k + torch.arange(c.top_k)) % num_experts
    return torch.zeros_like(scores).scatter(-1, experts, 1.0)


def replayed(scores, samples, layer, c, moe):
    """0/1 choice [b, s, E]: what the file says of each sample and position, in the order of the
    blocks with experts."""
    place = sum(is_moe(c, i) for i in range(int(layer.split(".")[1])))
    experts = torch.from_numpy(np.load(moe.replay).astype(np.int64))[samples, :, place]
    return torch.zeros_like(scores).scatter(-1, experts, 1.0)


def limited(chosen, weights, moe, mbs):
    """Choices that full experts do not refuse, micro-batch by micro-batch; tokens in the order
    (position, row)."""
    taken = torch.zeros_like(chosen)
    b, s, num_experts = chosen.shape
    for first in range(0, b, mbs):
        tokens = [(i, j) for i in range(s) for j in range(first, first + mbs)]
        limit = math.ceil(
            moe.capacity_factor * int(chosen[first : first + mbs].sum()) / num_experts
        )
        for e in range(num_experts):
            queue = [(i, j) for i, j in tokens if chosen[j, i, e]]
            if moe.drop_by == "probability":
                queue.sort(key=lambda token, e=e: -weights[token[1], token[0], e].item())
            for i, j in queue[:limit]:
                taken[j, i, e] = 1
    return taken


def jittered(x, layer, moe, seed, samples):
    """What a router reads: times 1 ± moe.jitter, by a random number for each (sample, position,
    feature)."""
    if not moe.jitter or samples is None:
        return x
    shape = (int(samples.max()) + 1, *x.shape[1:])
    index = torch.arange(math.prod(shape)).view(shape)[samples]
    return x * (
        1 - moe.jitter + 2 * moe.jitter * uniform(stream_key(seed, f"{layer}.router.jitter"), index)
    )


def moe_layer(x, w, layer, c, moe, *, mbs, real, book, noise):
    """Mixture of experts on [b, s, h]; what balancing needs goes into `book` (a dict of sums over
    layers)."""
    z = jittered(x, layer, moe, *noise) @ w[f"{layer}.router.weight"].T
    z = z + w[f"{layer}.router.linear_bias"] if c.router_linear_bias else z
    scores = torch.softmax(z, -1) if c.router_score == "softmax" else torch.sigmoid(z)
    if moe.replay:
        chosen = replayed(scores, noise[1], layer, c, moe)
    else:
        chosen = (
            by_turns(scores, noise[1], c)
            if moe.force_balanced
            else route(scores.detach(), w, layer, c)
        )
    chosen = chosen * real
    weights = scores * chosen
    if c.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * c.routed_scaling_factor
    if moe.capacity_factor is not None:
        taken = limited(chosen, weights.detach(), moe, mbs)
        book[f"{layer}.dropped"] = ((chosen - taken).sum() / chosen.sum()).item()
        weights = weights * taken
    book[f"{layer}.counts"] = chosen.sum((0, 1))
    out = sum(
        weights[..., e : e + 1] * expert(x, w, f"{layer}.experts", e, c)
        for e in range(c.num_experts)
    )
    if c.shared_ffn_hidden_size:
        gate = (
            torch.sigmoid(linear(x, w, f"{layer}.shared_expert.gate"))
            if c.shared_expert_gate
            else 1
        )
        out = out + gate * mlp(x, w, f"{layer}.shared_expert", c)
    p = scores / scores.sum(-1, keepdim=True) * real
    plain = best(scores.detach(), c.top_k) * real
    lse = torch.logsumexp(z, -1, keepdim=True) * real
    terms = {
        "aux_loss": auxiliary(plain, p, c, mbs),
        "seq_aux_loss": auxiliary(plain, p, c, 1),
        "global_aux_loss": auxiliary(plain, p, c, len(x)),
        "router_z_loss": lse.square().sum() / real.sum(),
    }
    for name, value in terms.items():
        book[name] = book.get(name, 0.0) + value
    return out


def auxiliary(plain, p, c, rows):
    """E/(k·T²) · Σ_e n_e Σ_t p_te over so many sequences at a time, then the mean."""
    # [parts, E]
    n, mass = (t.view(-1, rows * t.shape[1], c.num_experts).sum(1) for t in (plain, p))
    size = n.sum(-1) / c.top_k
    return (c.num_experts / (c.top_k * size.clamp(min=1) ** 2) * (n * mass).sum(-1)).mean()


def is_moe(c, i):
    i = min(i, c.num_layers - 1)  # blocks behind the last layer are what it is
    if c.moe_layers is not None:
        return c.num_experts > 0 and i in c.moe_layers
    return c.num_experts > 0 and i >= c.first_k_dense and (i + 1) % c.moe_interval == 0


def block(x, w, i, c, positions, documents, *, moe, **routing):
    def branch(x, name, act, read_by_both=None):
        y = (
            x
            if c.block_norm == "post"
            else norm(x, w, f"{name}.norm", c)
            if read_by_both is None
            else read_by_both
        )
        y = act(y)
        return y if c.block_norm == "pre" else norm(y, w, f"{name}.post_norm", c)

    layer = f"layers.{i}"
    windowed = c.window_layers is None or min(i, c.num_layers - 1) in c.window_layers
    first = branch(
        x,
        f"{layer}.attention",
        lambda y: attention(y, w, f"{layer}.attention", c, positions, documents, windowed),
    )
    read = x if c.parallel_block != "none" else x + first
    both = norm(x, w, f"{layer}.attention.norm", c) if c.parallel_block == "one_norm" else None
    second = branch(
        read,
        f"{layer}.mlp",
        lambda y: (
            moe_layer(y, w, layer, c, moe, **routing)
            if is_moe(c, i)
            else mlp(y, w, f"{layer}.mlp", c)
        ),
        both,
    )
    return x + first + second


def trunk(w, c, tokens, positions, documents, **routing):
    """tokens int64 [b, s] -> normed output of the last layer [b, s, h]"""
    x = w["embedding.weight"][tokens] * c.embedding_scale
    if c.position == "learned":
        x = x + w["position_embedding.weight"][positions]
    for i in range(c.num_layers):
        x = block(x, w, i, c, positions, documents, **routing)
    return norm(x, w, "final_norm", c)


def head(x, w, c):
    out = x @ w["embedding.weight" if c.tie_embeddings else "head.weight"].T
    return c.logit_softcap * torch.tanh(out / c.logit_softcap) if c.logit_softcap else out


def logits(w, c, tokens, positions=None, documents=None):
    """tokens int64 [b, s] -> [b, s, vocab]"""
    if positions is None:
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    real = torch.ones(*tokens.shape, 1, dtype=w["embedding.weight"].dtype)
    routing = {"moe": MoeConfig(), "mbs": 1, "real": real, "book": {}, "noise": (0, None)}
    return head(trunk(w, c, tokens, positions, documents, **routing), w, c)


def cross_entropy(z, labels):
    """Loss of each token, and its log-sum-exp, [b, s]; labels below 0 give something that a mask
    must hide."""
    lse = torch.logsumexp(z, -1)
    return lse - z.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1), lse


def ahead_loss(h, w, c, batch, **routing):
    """Multi-token prediction: mean over the depths with targets of their mean losses; h [b, s, h]
    of the trunk."""
    rows, s, depths = torch.cat((batch.tokens[:, :1], batch.labels), 1), batch.tokens.shape[1], []
    for k in range(1, c.num_mtp_layers + 1):
        i, last = c.num_layers + k - 1, s - k
        tokens, labels, mask = (
            torch.zeros_like(batch.tokens),
            torch.full_like(batch.labels, -1),
            torch.zeros(len(h), s),
        )
        # the token k places behind each
        tokens[:, : last + 1] = rows[:, k : k + last + 1].clamp(min=0)
        labels[:, :last], mask[:, :last] = rows[:, k + 1 :], batch.loss_mask[:, k:]
        # none of what lies between is padding
        for j in range(k) if batch.padding is not None else ():
            mask[:, :last] *= ~batch.padding[:, j : j + last]
        if batch.documents is not None:
            mask[:, :last] *= batch.documents[:, k:] == batch.documents[:, :last]
        e = norm(
            w["embedding.weight"][tokens] * c.embedding_scale,
            w,
            f"layers.{i}.mtp.embedding_norm",
            c,
        )
        x = (
            torch.cat((e, norm(h, w, f"layers.{i}.mtp.hidden_norm", c)), -1)
            @ w[f"layers.{i}.mtp.join.weight"].T
        )
        x = block(x, w, i, c, batch.positions, batch.documents, **routing)
        h = norm(x, w, f"layers.{i}.mtp.final_norm", c)
        if mask.sum() > 0:
            depths.append((cross_entropy(head(h, w, c), labels)[0] * mask).sum() / mask.sum())
    return sum(depths) / len(depths) if depths else torch.tensor(math.nan)


def losses(w, c, batch, train=None, moe=None, mbs=1):
    """Mean loss over the batch's target tokens, the objective whose gradient is taken, and a book
    of figures."""
    real, book = torch.ones(*batch.tokens.shape, 1, dtype=w["embedding.weight"].dtype), {}
    if batch.padding is not None:
        real[batch.padding] = 0.0
    train, routing = (
        train or TrainConfig(),
        {"moe": moe or MoeConfig(), "mbs": mbs, "real": real, "book": book},
    )
    routing["noise"] = train.seed, batch.samples
    h = trunk(w, c, batch.tokens, batch.positions, batch.documents, **routing)
    token_loss, lse = cross_entropy(head(h, w, c), batch.labels)
    count = batch.loss_mask.sum()
    loss = (token_loss * batch.loss_mask).sum() / count
    book["z_loss"] = (lse.square() * batch.loss_mask).sum() / count
    objective = loss + train.z_loss * book["z_loss"]
    if c.num_mtp_layers:
        book["mtp_loss"] = ahead_loss(h, w, c, batch, **routing)
        objective = objective + train.mtp_loss * book["mtp_loss"].nan_to_num()
    for kind in ("aux", "seq_aux", "global_aux") if c.num_experts else ():
        objective = objective + (
            moe.aux_coef * book[f"{kind}_loss"] if kind in moe.balance else 0.0
        )
    if c.num_experts:
        objective = objective + moe.z_coef * book["router_z_loss"]
    return loss, objective, book
