"""Heads that draft a block, for tests: random ones of any design in each published layout, and their drafts by definition.

The definition reads none of batchspec's head code: tensors by published names, plain torch, one row, no cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from batchspec.draft.block_head import BlockWeights, dummy_block, dummy_block_spec
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from tests.helpers.eagle_reference import norm, target_taps
from tests.helpers.engines import DEVICE

Tensors = dict[str, Tensor]
LAYOUTS = ("z-lab", "deepspec", "speculators")


@dataclass(frozen=True)
class BlockDesign:
    """What a head is like; the taps are boundaries of the target's residual stream."""

    hidden: int
    vocab: int
    taps: tuple[int, ...]
    mask_id: int
    block: int = 8
    from_anchor: bool = True
    draft_vocab: int | None = None
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 6
    inner: int = 20
    eps: float = 1e-5
    theta: float = 50.0
    windows: tuple[int | None, ...] = (None, None)
    causal: bool | None = None
    """Of all layers; None: of those with a window."""
    rank: int = 0
    confidence: str = ""
    """hidden or markov."""
    selector: int = 0
    """Rank of a candidate selector; 0: none."""
    top_k: int = 16
    """Number of its candidates."""
    taps_of_conv: int = 0
    """Of the convolutions within the block; 0: none."""
    conv_group: int = 4
    """Number of channels that share a dynamic tap."""
    attention_bias: bool = False
    mlp_bias: bool = False
    own_embedding: bool = False
    layout: str = "deepspec"


def random_block(design: BlockDesign, *, seed: int = 0) -> Tensors:
    """fp64 tensors, large enough that drafts vary."""
    rng = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=rng)

    def linear(name: str, out: int, inner: int, bias: bool = False) -> Tensors:
        weight = {f"{name}.weight": noise(out, inner) * (1.5 / inner**0.5)}
        return weight | ({f"{name}.bias": noise(out) * 0.3} if bias else {})

    def norms(*names: str, size: int = design.hidden) -> Tensors:
        return {f"{name}.weight": 1 + 0.2 * noise(size) for name in names}

    hidden, q, kv = design.hidden, design.heads * design.head_dim, design.kv_heads * design.head_dim
    tensors = linear("fc", hidden, len(design.taps) * hidden) | norms("hidden_norm", "norm")
    for i in range(design.layers):
        at = f"layers.{i}."
        for name, out in (("q", q), ("k", kv), ("v", kv)):
            tensors |= linear(f"{at}self_attn.{name}_proj", out, hidden, design.attention_bias)
        tensors |= linear(f"{at}self_attn.o_proj", hidden, q, design.attention_bias)
        tensors |= norms(f"{at}self_attn.q_norm", f"{at}self_attn.k_norm", size=design.head_dim)
        for name in ("gate", "up"):
            tensors |= linear(f"{at}mlp.{name}_proj", design.inner, hidden, design.mlp_bias)
        tensors |= linear(f"{at}mlp.down_proj", hidden, design.inner, design.mlp_bias)
        tensors |= norms(f"{at}input_layernorm", f"{at}post_attention_layernorm")
        if design.taps_of_conv:
            for name in ("attention_conv", "mlp_conv"):
                tensors[f"{at}{name}.base_kernel"] = noise(2, design.taps_of_conv, hidden)
                rows = 2 * design.taps_of_conv * (hidden // design.conv_group)
                tensors |= linear(f"{at}{name}.kernel_projection", rows, hidden)
    if design.own_embedding:
        tensors["embed_tokens.weight"] = noise(design.vocab, hidden)
    drafted = design.draft_vocab or design.vocab
    if design.draft_vocab is not None:
        tensors["lm_head.weight"] = noise(drafted, hidden) * (3 / hidden**0.5)
        map_ids = torch.randperm(design.vocab, generator=rng)[:drafted].sort().values
        tensors["d2t"] = map_ids - torch.arange(drafted)
        tensors["t2d"] = torch.zeros(design.vocab, dtype=torch.bool).index_fill_(0, map_ids, True)
    if design.rank:
        tensors["markov_head.markov_w1.weight"] = noise(design.vocab, design.rank)
        tensors["markov_head.markov_w2.weight"] = noise(drafted, design.rank)
    if design.selector:
        for name in ("predecessor_codebook", "successor_codebook"):
            tensors[f"candidate_selector.{name}"] = noise(design.vocab, design.selector)
        tensors |= linear("candidate_selector.hidden_projection", design.selector, hidden)
    if design.confidence:
        width = hidden + (design.rank if design.confidence == "markov" else 0)
        tensors |= linear("confidence_head.proj", 1, width, bias=True)
    return tensors


def config_of(design: BlockDesign) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "model_type": "qwen3", "hidden_size": design.hidden, "intermediate_size": design.inner,
        "num_hidden_layers": design.layers,
        "num_attention_heads": design.heads, "num_key_value_heads": design.kv_heads, "head_dim": design.head_dim,
        "vocab_size": design.vocab, "rms_norm_eps": design.eps, "rope_theta": design.theta, "max_position_embeddings": 64,
        "attention_bias": design.attention_bias,
    }
    shape["layer_types"] = ["sliding_attention" if window else "full_attention" for window in design.windows]
    if any(design.windows):
        shape["sliding_window"] = max(window or 0 for window in design.windows)
    markov = {
        "markov_rank": design.rank, "markov_head_type": "vanilla", "enable_confidence_head": bool(design.confidence),
        "confidence_head_with_markov": design.confidence == "markov",
    }
    second = {"selector_rank": design.selector, "selector_top_k": design.top_k} if design.selector else {}
    if design.taps_of_conv:
        second |= {"conv_kernel_size": design.taps_of_conv, "conv_group_size": design.conv_group}
    kind = "dspark" if design.rank else "dflash2" if second else "dflash"
    if design.layout == "speculators":
        own = {
            "architectures": ["DSparkDraftModel" if design.rank else "DFlashDraftModel"], "transformer_layer_config": shape,
            "speculators_model_type": kind, "block_size": design.block, **second,
            "aux_hidden_state_layer_ids": list(design.taps), "mask_token_id": design.mask_id,
            "draft_vocab_size": design.draft_vocab or design.vocab, "sample_from_anchor": design.from_anchor,
            "sliding_window_non_causal": design.causal is False,
        }
        return own | (markov if design.rank else {})
    taps = [tap - 1 for tap in design.taps]  # the layers whose output they are; -1 is the embedding
    shape |= {} if design.causal is None else {"is_causal": design.causal}
    shape |= {} if design.draft_vocab is None else {"draft_vocab_size": design.draft_vocab}
    if design.layout == "z-lab":
        flag = {"sample_from_anchor": True} if design.from_anchor and not design.rank else {}
        flag |= {"sample_from_anchor": False} if design.rank and not design.from_anchor else {}
        own = {"target_layer_ids": taps, "mask_token_id": design.mask_id, **flag, **second}
        return {"architectures": ["DFlashDraftModel"], **shape, "block_size": design.block, "dflash_config": own}
    own = {"target_layer_ids": taps, "mask_token_id": design.mask_id, "block_size": design.block, "num_anchors": 512}
    own |= {} if design.from_anchor else {"sample_from_anchor": False}
    own |= second
    return {"architectures": ["Qwen3DSparkModel"], **shape, **own, **markov}


def write_block(
    folder: Path, design: BlockDesign, tensors: Tensors, *, renamed: dict[str, str] | None = None, **keys: Any
) -> Path:
    """A checkpoint folder. renamed: beginnings of names -> others; keys: of config.json, None removes one."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {}
    for name, tensor in tensors.items():
        for usual, other in (renamed or {}).items():
            name = other + name.removeprefix(usual) if name.startswith(usual) else name
        named[name] = tensor.contiguous()
    save_file(named, folder / "model.safetensors")
    config = {key: value for key, value in (config_of(design) | keys).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def rope_at(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [T, heads, D] at these positions."""
    half = x.shape[-1] // 2
    angle = positions.to(x.dtype)[:, None, None] * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), -1)


def block_states(
    design: BlockDesign, tensors: Tensors, embedding: Tensor, taps: Tensor, newest: int, queries: int, keys: int | None = None,
    *, window: int | None = None, sink: int = 0,
) -> Tensor:
    """[queries, H] after the final norm: of a block after the context whose states are taps [C, W].

    keys          number of the block's queries that are keys too; None: all
    window, sink  further limits of what a query reads
    """

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def normed(name: str, x: Tensor) -> Tensor:
        return norm(x, tensors[f"{name}.weight"], design.eps)

    def convolved(name: str, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """What a sublayer reads, and what becomes of its output: each query's taps are fixed ones and those that x gives."""
        if not design.taps_of_conv:
            return x, lambda out: out
        base, groups = tensors[f"{name}.base_kernel"], design.hidden // design.conv_group
        dynamic = linear(f"{name}.kernel_projection", x).view(len(x), 2, design.taps_of_conv, groups)

        def side(values: Tensor, which: int) -> Tensor:
            rows = []
            for i in range(len(values)):
                own = [
                    (base[which, tap] + dynamic[i, which, tap].repeat_interleave(design.conv_group)) * values[i - tap]
                    for tap in range(min(design.taps_of_conv, i + 1))
                ]
                rows.append(torch.stack(own).sum(0))
            return torch.stack(rows)

        return side(x, 0), lambda out: side(out, 1)

    context = normed("hidden_norm", linear("fc", taps))
    start, keys = len(taps), queries if keys is None else keys
    x = F.embedding(torch.tensor([newest, *[design.mask_id] * (queries - 1)]), tensors.get("embed_tokens.weight", embedding))
    place, at_all = torch.arange(start, start + queries), torch.arange(start + keys)
    for i, own in enumerate(design.windows):
        at = f"layers.{i}."
        y, of_attention = convolved(f"{at}attention_conv", normed(f"{at}input_layernorm", x))
        q = linear(f"{at}self_attn.q_proj", y).unflatten(-1, (-1, design.head_dim))
        both = torch.cat((context, y[:keys]))
        k, v = (linear(f"{at}self_attn.{n}_proj", both).unflatten(-1, (-1, design.head_dim)) for n in "kv")
        q, k = normed(f"{at}self_attn.q_norm", q), normed(f"{at}self_attn.k_norm", k)
        q, k = rope_at(q, place, design.theta), rope_at(k, at_all, design.theta)
        k, v = (t.repeat_interleave(design.heads // design.kv_heads, 1) for t in (k, v))
        causal = own is not None if design.causal is None else design.causal
        seen = at_all[None] <= place[:, None] if causal else torch.ones(queries, len(at_all), dtype=torch.bool)
        if own is not None:
            first = torch.full_like(place, start - own) if design.layout == "speculators" else place - own + 1
            seen = seen & (at_all[None] >= first[:, None])
        if window is not None:
            seen = seen & ((at_all[None] > place[:, None] - window) | (at_all[None] < sink))
        scores = torch.einsum("qhd,khd->hqk", q, k) * design.head_dim**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        x = x + of_attention(linear(f"{at}self_attn.o_proj", torch.einsum("hqk,khd->qhd", weights, v).flatten(-2)))
        y, of_mlp = convolved(f"{at}mlp_conv", normed(f"{at}post_attention_layernorm", x))
        x = x + of_mlp(linear(f"{at}mlp.down_proj", F.silu(linear(f"{at}mlp.gate_proj", y)) * linear(f"{at}mlp.up_proj", y)))
    return normed("norm", x)


@torch.no_grad()
def reference_block(
    design: BlockDesign, tensors: Tensors, target: Target, ids: Sequence[int], draft_len: int, room: int | None = None,
    *, window: int | None = None, sink: int = 0, candidates: int = 16, temperature: float = 1.0,
    noise: Callable[[int], Tensor] | None = None, limit: Callable[[Tensor, Sequence[int]], Tensor] | None = None,
) -> tuple[list[int], list[float]]:
    """Drafts after `ids`, and the log odds of the confidence head, if there is one.

    room   number of block positions that are keys, if the row's end is near
    noise  position of a draft -> what is added to the logits, divided by the temperature, of all the target's tokens
    limit  logits divided by the temperature, without noise and Markov bias, and the drafts before -> those that filters and rules
           leave
    """
    taps = target_taps(target, ids, design.taps).double()[:-1]
    queries = draft_len if design.from_anchor else draft_len + 1
    keys = queries if room is None else min(room, queries)
    states = block_states(
        design, tensors, target.embedding.cpu().double(), taps, ids[-1], queries, keys, window=window, sink=sink
    )
    states = states if design.from_anchor else states[1:]
    unit = torch.eye(design.hidden, dtype=target.dtype, device=target.device)
    own = target.logits(unit).T.cpu().double() if design.draft_vocab is None else tensors["lm_head.weight"]
    drafted = torch.arange(len(own)) + (0 if design.draft_vocab is None else tensors["d2t"])
    before, found, odds = ids[-1], list[int](), list[float]()
    for k, state in enumerate(states):
        logits = own @ state / temperature
        logits = logits if limit is None else limit(logits, found)
        logits = logits + (0 if noise is None else noise(len(ids) + k)[drafted])
        if design.rank:
            w1, w2 = (tensors[f"markov_head.markov_{name}.weight"] for name in ("w1", "w2"))
            best = logits.topk(min(candidates, len(logits))).indices
            logits = torch.full_like(logits, -torch.inf).index_copy_(0, best, (logits + w2 @ w1[before] / temperature)[best])
        if design.selector:
            a, b = (tensors[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor"))
            gate = F.linear(state, tensors["candidate_selector.hidden_projection.weight"])
            best = logits.topk(min(design.top_k, len(logits))).indices
            edges = (b * (a[before] * gate)).sum(1) / temperature
            logits = torch.full_like(logits, -torch.inf).index_copy_(0, best, (logits + edges)[best])
        if design.confidence:
            read = torch.cat((state, w1[before])) if design.confidence == "markov" else state
            odds.append(float(F.linear(read, tensors["confidence_head.proj.weight"], tensors["confidence_head.proj.bias"])))
        before = int(drafted[int(logits.argmax())])
        found.append(before)
    return found, odds


def tiny_block(
    spec: ModelSpec, *, dtype: torch.dtype = torch.float64, device: torch.device = DEVICE, dflash2: bool = False, **changes: Any
) -> BlockWeights:
    """A random DSpark head of two layers, one with a causal window, that drafts 19 tokens; changes of its `BlockSpec`.

    dflash2  a DFlash2 head of two layers in its place
    """
    made = dummy_block_spec(spec, draft_vocab_size=19, num_layers=2, block_size=9, dflash2=dflash2)
    narrow: dict[str, Any] = {"aux_layer_ids": (0, 1, 2)}
    narrow |= {"windows": (10, None), "selector_rank": 4} if dflash2 else {"windows": (9, None), "causal": (True, False)}
    narrow |= {} if dflash2 else {"markov_rank": 4}
    return dummy_block(replace(made, **narrow | changes), dtype=dtype, device=device)
