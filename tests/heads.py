"""EAGLE-3 heads for tests: random ones of any design written in either layout, and one distilled on a tiny target."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from tests.eagle_reference import Design, run_head, target_taps

Tensors = dict[str, Tensor]


def random_tensors(design: Design, *, seed: int = 0) -> Tensors:
    """fp64 tensors by the names of the speculators layout, large enough that drafts vary."""
    rng = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=rng)

    def linear(name: str, out: int, inner: int, bias: bool) -> Tensors:
        weight = {f"{name}.weight": noise(out, inner) * (1.5 / inner**0.5)}
        return weight | ({f"{name}.bias": noise(out) * 0.3} if bias else {})

    def norm(name: str, size: int) -> Tensors:
        return {f"{name}.weight": 1 + 0.2 * noise(size)}

    hidden, q, kv = design.hidden, design.heads * design.head_dim, design.kv_heads * design.head_dim
    width = len(design.taps) * design.target_hidden
    tensors = linear("fc", hidden, width, design.fc_bias) | norm("norm", hidden)
    if design.norm_before_fc:
        tensors |= norm("input_norm", width)
    if design.fc_norm:
        for i in range(len(design.taps)):
            tensors |= norm(f"fc_norm.{i}", design.target_hidden)
    for i in range(design.layers):
        at, inner = f"layers.{i}.", 2 * hidden if i == 0 else hidden
        for name, out in (("q", q), ("k", kv), ("v", kv)):
            tensors |= linear(f"{at}self_attn.{name}_proj", out, inner, design.attention_bias)
        tensors |= linear(f"{at}self_attn.o_proj", hidden, q, design.o_bias)
        for name in ("gate", "up"):
            tensors |= linear(f"{at}mlp.{name}_proj", design.inner, hidden, design.mlp_bias)
        tensors |= linear(f"{at}mlp.down_proj", hidden, design.inner, design.mlp_bias)
        tensors |= norm(f"{at}input_layernorm", hidden) | norm(f"{at}post_attention_layernorm", hidden)
        if i == 0:
            tensors |= norm(f"{at}hidden_norm", hidden)
        if design.qk_norm:
            tensors |= norm(f"{at}self_attn.q_norm", design.head_dim) | norm(f"{at}self_attn.k_norm", design.head_dim)
    if design.mask_id is not None:
        tensors["mask_hidden"] = noise(1, 1, width)
    if design.own_embedding:
        tensors["embed_tokens.weight"] = noise(design.vocab, hidden)
    if design.draft_vocab is not None:
        tensors["lm_head.weight"] = noise(design.draft_vocab, hidden) * (3 / hidden**0.5)
        hot = torch.randperm(design.vocab, generator=rng)[: design.draft_vocab].sort().values
        tensors["d2t"] = hot - torch.arange(design.draft_vocab)
        tensors["t2d"] = torch.zeros(design.vocab, dtype=torch.bool).index_fill_(0, hot, True)
    return tensors


def config_of(design: Design, layout: str) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "model_type": "qwen3" if design.qk_norm else "llama", "hidden_size": design.hidden, "intermediate_size": design.inner,
        "num_hidden_layers": design.layers, "num_attention_heads": design.heads, "num_key_value_heads": design.kv_heads,
        "head_dim": design.head_dim, "vocab_size": design.vocab, "rms_norm_eps": design.eps, "rope_theta": design.theta,
        "max_position_embeddings": 8, "attention_bias": design.attention_bias, "mlp_bias": design.mlp_bias, "use_cache": True,
    }  # fmt: skip
    if any(design.windows):
        shape["sliding_window"] = max(window or 0 for window in design.windows)
        shape["layer_types"] = ["sliding_attention" if window else "full_attention" for window in design.windows]
    config: dict[str, Any] = {
        "draft_vocab_size": design.draft_vocab, "norm_before_residual": design.norm_before_residual,
        "norm_before_fc": design.norm_before_fc, "fc_norm": design.fc_norm, "norm_output": design.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(design.taps),
    }  # fmt: skip
    if design.target_hidden != design.hidden:
        config["target_hidden_size"] = design.target_hidden
    if layout == "flat" and design.mask_id is not None:
        config |= {"parallel_drafting": True, "ptd_token_id": design.mask_id}
    if layout == "flat":
        # SpecForge means something else by norm_output.
        arch = "LlamaForCausalLM" if config["norm_output"] else "LlamaForCausalLMEagle3"
        if not config["norm_output"]:
            del config["norm_output"]
        return {"architectures": [arch], **shape, **config}
    kind: dict[str, Any] = {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}
    if design.mask_id is not None:
        kind = {"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle", "mask_token_id": design.mask_id}
    return {**kind, "transformer_layer_config": shape, **config}


def write_head(folder: Path, design: Design, tensors: Tensors, *, layout: str = "flat", prefix: str = "") -> Path:
    """A checkpoint folder. layout: flat (`midlayer.*`), additional (flat, more layers as SGLang names them) or speculators."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {}
    for name, tensor in tensors.items():
        if layout != "speculators":
            name = name.replace("layers.0.", "midlayer.")
        if layout == "additional" and name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            name = f"additional_layers.{int(index) - 1}.{rest}"
        named[prefix + name] = tensor.contiguous()
    save_file(named, folder / "model.safetensors")
    config = config_of(design, "speculators" if layout == "speculators" else "flat")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def distilled_tensors(target: Target, design: Design, rows: Sequence[Sequence[int]], *, steps: int = 150) -> Tensors:
    """A head that knows these rows of tokens (a target's own output): next tokens from true features, then from its own."""
    tensors = random_tensors(design)
    trained = {name: t.float().requires_grad_() for name, t in tensors.items() if t.is_floating_point()}
    tables = {name: t for name, t in tensors.items() if not t.is_floating_point()}
    hot = tables["d2t"] + torch.arange(len(tables["d2t"]))
    column = torch.full((design.vocab,), -100).scatter_(0, hot, torch.arange(len(hot)))  # -100: cross_entropy leaves it out
    taps = [target_taps(target, row, design.taps).float() for row in rows]
    embedding = target.embedding.cpu().float()
    optimiser = torch.optim.Adam(trained.values(), lr=1e-2)
    for _ in range(steps):
        loss = torch.zeros(())
        for row, features in zip(rows, taps, strict=True):
            ids, hidden = torch.tensor(row), None
            for ahead in range(1, 4):
                count = len(row) - 1 - ahead
                fed, logits = run_head(design, trained, embedding, ids[ahead : ahead + count], features[:count], hidden)
                loss = loss + F.cross_entropy(logits, column[ids[ahead + 1 :]])
                hidden = fed[:-1]
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {name: t.detach().double() for name, t in trained.items()} | tables


def parallel_tensors(
    target: Target, design: Design, rows: Sequence[Sequence[int]], *, steps: int = 60, num_drafts: int = 4
) -> Tensors:
    """A head that knows these rows and what masks stand for: all tokens from true features, then some beginnings with masks."""
    assert design.mask_id is not None
    tensors = random_tensors(design)
    trained = {name: t.float().requires_grad_() for name, t in tensors.items() if t.is_floating_point()}
    tables = {name: t for name, t in tensors.items() if not t.is_floating_point()}
    hot = tables["d2t"] + torch.arange(len(tables["d2t"]))
    column = torch.full((design.vocab,), -100).scatter_(0, hot, torch.arange(len(hot)))
    taps = [target_taps(target, row, design.taps).float() for row in rows]
    embedding, masks = target.embedding.cpu().float(), num_drafts - 1
    optimiser = torch.optim.Adam(trained.values(), lr=1e-2)
    rng = torch.Generator().manual_seed(0)
    for step in range(steps * len(rows)):
        row, features = rows[step % len(rows)], taps[step % len(rows)]
        ids = torch.tensor(row)
        loss = torch.zeros(())
        for begin in torch.randint(2, len(row) - num_drafts, (3,), generator=rng).tolist():
            known = torch.cat((features[: begin - 1], trained["mask_hidden"].view(1, -1).expand(masks, -1)))
            tokens = torch.cat((ids[1:begin], ids.new_full((masks,), design.mask_id)))
            _, logits = run_head(design, trained, embedding, tokens, known)
            loss = loss + F.cross_entropy(logits, column[ids[2 : begin + num_drafts]])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {name: t.detach().double() for name, t in trained.items()} | tables


def tiny_design(spec: ModelSpec, **changes: Any) -> Design:
    """A head for a tiny target of two layers: taps 0, 1 and 2, 19 draft tokens."""
    values: dict[str, Any] = {
        "hidden": spec.hidden_size, "target_hidden": spec.hidden_size, "vocab": spec.vocab_size, "draft_vocab": 19,
        "taps": (0, 1, 2),
    }  # fmt: skip
    return Design(**(values | changes))
