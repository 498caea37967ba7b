"""A Qwen3.5 made of a Llama: its embedding, MLPs and norms, some of its attention layers, gated delta rule layers for the others.

A converted model computes other numbers than the Llama. Its new mixers begin near the old ones:

attention      norms of q and k multiply by the root mean square that q and k had; gates of zeros are 0.5, and o_proj is doubled.
               Short keys, as that of the first token, a sink, get a part that no query has, so that norms change them little
delta rule     q, k, v of the old layer, each key head copied to its query heads; the convolution passes the newest token on; z is
               about Z for every token, where silu(Z) = 1; the output has the size that the old heads had
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Tensors = dict[str, Tensor]
EVERY = 3
"""Each third layer attends."""
CONV = 4
Z = 1.2785
"""silu(Z) = 1"""
RIDGE = 1e-2
"""Added to the second moments of the inputs, as a share of their mean."""
OF_FIRST = 10.0
"""Weight of the first token of a text among its others, when vectors are fitted to a layer's inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Root mean squares in an attention layer of the Llama, over the tokens of some texts."""

    q: float
    k: float
    v: float
    heads: Tensor
    """[heads] of the attended values."""
    constant: Tensor
    """[H] the vector whose product with the layer's normed inputs is nearest to 1."""
    longer: Tensor
    """[KV heads D, H] what is added to k_proj, so that all keys are about equally long."""


def recurrent_config(llama: Mapping[str, Any], every: int = EVERY) -> dict[str, Any]:
    """The config.json of the recurrent model; its first and last layers are recurrent ones and one that attends."""
    heads, layers = llama["num_attention_heads"], llama["num_hidden_layers"]
    dim = llama.get("head_dim") or llama["hidden_size"] // heads
    theta = (llama.get("rope_parameters") or llama).get("rope_theta", 10_000.0)
    kept = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
        "max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id",
    )
    return {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", **{key: llama[key] for key in kept},
        "hidden_act": "silu", "head_dim": dim, "attention_bias": False, "attn_output_gate": True, "dtype": "bfloat16",
        "tie_word_embeddings": bool(llama.get("tie_word_embeddings")), "partial_rotary_factor": 1.0, "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 1.0},
        "layer_types": ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)],
        "linear_conv_kernel_dim": CONV, "linear_num_key_heads": heads, "linear_num_value_heads": heads,
        "linear_key_head_dim": dim, "linear_value_head_dim": dim,
    }


@torch.no_grad()
def measured(llama: nn.Module, ids: Tensor, real: Tensor) -> list[Sizes]:
    """The sizes of each layer of a transformers Llama.

    ids  int64 [B, L]; real  bool [B, L] tokens that are no padding. The first token, whose states are huge, is left out
    """
    counted, seen = real.clone(), dict[tuple[int, str], Tensor]()
    counted[:, 0] = False
    layers: Any = llama.get_submodule("model.layers")

    def keep(at: tuple[int, str], tensor: Tensor) -> None:
        seen[at] = tensor[counted].float().cpu()
        seen[at[0], f"{at[1]} of all"] = tensor[real].float().cpu()

    hooks = []
    for i, layer in enumerate(layers):
        attention = layer.self_attn
        for part in "qkv":
            hook = lambda _, given, out, at=(i, part): keep(at, out)  # noqa: E731
            hooks.append(attention.get_submodule(f"{part}_proj").register_forward_hook(hook))
        hooks.append(attention.q_proj.register_forward_pre_hook(lambda _, given, at=(i, "x"): keep(at, given[0])))
        hooks.append(attention.o_proj.register_forward_pre_hook(lambda _, given, at=(i, "o"): keep(at, given[0])))
    llama(input_ids=ids)
    for own in hooks:
        own.remove()
    config: Any = llama.config
    heads, firsts = (config.num_attention_heads, config.num_key_value_heads), (~counted)[real].cpu()
    parts = (*"qkvxo", "x of all", "k of all")
    return [_sizes({part: seen[i, part] for part in parts}, firsts, *heads) for i in range(len(layers))]


def _sizes(seen: Mapping[str, Tensor], firsts: Tensor, heads: int, kv_heads: int) -> Sizes:
    """firsts: bool [tokens] those that are the first of their texts."""
    q, k, v = (float(seen[part].square().mean().sqrt()) for part in "qkv")
    of_heads = seen["o"].unflatten(-1, (heads, -1)).square().mean((0, 2)).sqrt()
    constant = _nearest(seen["x"], torch.ones(len(seen["x"]), 1), torch.ones(len(seen["x"])))
    keys, queries = (seen[part].unflatten(-1, (kv_heads, -1)) for part in ("k of all", "q"))
    dim = keys.shape[-1]
    missing = (dim * k**2 - keys.square().sum(-1)).clamp(min=0).sqrt()
    weight = torch.where(firsts, OF_FIRST, 1.0)
    vectors = _nearest(seen["x of all"], missing, weight)
    unasked = torch.stack([_unasked(queries[:, i].unflatten(-1, (-1, dim)).flatten(0, 1)) for i in range(kv_heads)])
    longer = torch.einsum("id,hi->idh", unasked, vectors).flatten(0, 1)
    return Sizes(q=q, k=k, v=v, heads=of_heads, constant=constant[:, 0], longer=longer)


def _nearest(x: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
    """[H, m] vectors whose products with the rows of x [n, H] are nearest to wanted [n, m], as the rows are weighted [n]."""
    wide = x.double()
    left = wide.t() * weight.to(wide)
    moments = left @ wide
    moments += RIDGE * moments.diagonal().mean() * torch.eye(len(moments), dtype=wide.dtype, device=wide.device)
    found: Tensor = torch.linalg.solve(moments, left @ wanted.double()).float()
    return found


def _unasked(queries: Tensor) -> Tensor:
    """[D] the direction in which queries [n, D] are smallest, among the dimensions that rotate slowest."""
    dim = queries.shape[-1]
    slow = [i for i in range(dim) if i % (dim // 2) >= dim // 3]
    narrow = queries[:, slow]
    found = torch.zeros_like(queries[0])
    found[slow] = torch.linalg.eigh(narrow.t() @ narrow)[1][:, 0]
    return found


def converted(dense: Mapping[str, Tensor], config: Mapping[str, Any], sizes: list[Sizes], *, seed: int = 0) -> Tensors:
    """The fp32 tensors of the recurrent model, without its MTP layer. dense: of the Llama; config: `recurrent_config`."""
    made = Tensors()
    rng = torch.Generator().manual_seed(seed)
    for name, tensor in dense.items():
        if ".self_attn." not in name:
            made[name] = tensor.float() - 1 if name.endswith("norm.weight") else tensor.float()
    for i, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{i}."
        q, k, v, o = (dense[f"{prefix}self_attn.{part}_proj.weight"].float() for part in "qkvo")
        if kind == "full_attention":
            own = _attention(q, k, v, o, config, sizes[i])
            made |= {f"{prefix}self_attn.{name}": tensor for name, tensor in own.items()}
        else:
            own = _delta_rule(q, k, v, o, config, sizes[i], rng)
            made |= {f"{prefix}linear_attn.{name}": tensor for name, tensor in own.items()}
    if config["tie_word_embeddings"]:
        made.pop("lm_head.weight", None)
    return {name: tensor.contiguous() for name, tensor in made.items()}


def _attention(q: Tensor, k: Tensor, v: Tensor, o: Tensor, config: Mapping[str, Any], sizes: Sizes) -> Tensors:
    dim = config["head_dim"]
    of_heads = q.unflatten(0, (-1, dim))
    joined = torch.stack((of_heads, torch.zeros_like(of_heads)), 1).flatten(0, 2)  # of each head q, then its gate
    return {
        "q_proj.weight": joined, "k_proj.weight": k + sizes.longer, "v_proj.weight": v.clone(), "o_proj.weight": 2 * o,
        "q_norm.weight": torch.full((dim,), sizes.q - 1), "k_norm.weight": torch.full((dim,), sizes.k - 1),
    }


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, config: Mapping[str, Any], sizes: Sizes, rng: torch.Generator
) -> Tensors:
    heads, dim, hidden = config["linear_num_value_heads"], config["linear_value_head_dim"], config["hidden_size"]
    group = heads // config["num_key_value_heads"]
    k, v = (own.unflatten(0, (-1, dim)).repeat_interleave(group, 0).flatten(0, 1) for own in (k, v))
    taps = torch.zeros(3 * heads * dim, 1, CONV)
    taps[:, :, -1] = 1
    rates = torch.linspace(0, 1, heads)
    decays = 0.002 * 100**rates  # of each head's state, a token: 0.2 % to 20 %
    a_log = 2 * rates
    gates = 0.02 * torch.randn(2, heads, hidden, generator=rng)
    return {
        "in_proj_qkv.weight": torch.cat((q / sizes.q, k / sizes.k, 0.5 * v / sizes.v)),
        "in_proj_z.weight": Z * sizes.constant.expand(heads * dim, -1).clone(),
        "in_proj_b.weight": gates[0], "in_proj_a.weight": gates[1], "conv1d.weight": taps,
        "A_log": a_log, "dt_bias": (decays / a_log.exp()).expm1().log(),  # the inverse of softplus
        "norm.weight": torch.ones(dim), "out_proj.weight": o * sizes.heads.repeat_interleave(dim),
    }


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
    """transformers' causal_conv1d_fn with SiLU and without bias, for training: products of shifted tensors, because the gradients
    of convolutions of single channels are slow. x [B, C, L], weight [C, W]"""
    assert bias is None
    length, width = x.shape[-1], weight.shape[-1]
    before = F.pad(x, (width - 1, 0))
    found = before[..., :length] * weight[:, 0, None]
    for i in range(1, width):
        found = found + before[..., i : i + length] * weight[:, i, None]
    return F.silu(found).to(x.dtype)


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64, **_: Any
) -> tuple[Tensor, None]:
    """transformers' torch_chunk_gated_delta_rule from no state and with normed q and k, for training: in fp32 under autocast too,
    and a chunk's matrix is inverted by products of blocks, which is much faster on a GPU than solving a system for each head.

    query, key, value [B, L, heads, D]; g, beta [B, L, heads]
    """
    with torch.autocast(query.device.type, enabled=False):
        length, dtype = query.shape[1], query.dtype
        q, k, v = (
            F.pad(x.transpose(1, 2).float(), (0, 0, 0, -length % chunk_size)).unflatten(2, (-1, chunk_size))
            for x in (query, key, value)
        )
        decay, b = (F.pad(x.transpose(1, 2).float(), (0, -length % chunk_size)).unflatten(2, (-1, chunk_size)) for x in (g, beta))
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        q, total, b = q * q.shape[-1] ** -0.5, decay.cumsum(-1), b.unsqueeze(-1)
        later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).triu(1)
        between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
        inverse: Tensor = InverseOfChunk.apply(((k * b) @ k.mT * between).tril(-1))  # type: ignore[no-untyped-call]
        within, past = (q @ k.mT) * between, total.exp().unsqueeze(-1)
        new, read = inverse @ (v * b), inverse @ (k * b * past)
        q, k = q * past, k * (total[..., -1:] - total).exp().unsqueeze(-1)
        state, outputs = new.new_zeros(*new.shape[:2], q.shape[-1], v.shape[-1]), []
        for i in range(new.shape[2]):
            own = new[:, :, i] - read[:, :, i] @ state
            outputs.append(q[:, :, i] @ state + within[:, :, i] @ own)
            state = state * past[:, :, i, -1:] + k[:, :, i].mT @ own
        return torch.cat(outputs, 2)[:, :, :length].transpose(1, 2).to(dtype), None


class InverseOfChunk(torch.autograd.Function):
    """(1 + lower)^-1 of strictly lower triangular matrices [..., C, C], C a power of two: blocks of 1, 2, 4, ... rows."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        size = lower.shape[-1]
        found = torch.ones(*lower.shape[:-1], 1, 1, dtype=lower.dtype, device=lower.device)  # [..., blocks, rows, rows]
        rows = 1
        while rows < size:
            blocks = lower.unflatten(-1, (-1, 2 * rows)).unflatten(-3, (-1, 2 * rows)).diagonal(0, -4, -2).movedim(-1, -3)
            first, second = found.unflatten(-3, (-1, 2)).unbind(-3)
            below = -second @ blocks[..., rows:, :rows] @ first
            found = torch.cat((F.pad(first, (0, rows)), torch.cat((below, second), -1)), -2)
            rows *= 2
        found = found.squeeze(-3)
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        found: Tensor = -(inverse.mT @ grads[0] @ inverse.mT).tril(-1)
        return found
