"""EAGLE-3 heads for tests: random ones of any design written in either layout, and one distilled on a tiny target."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from batchspec.heads.step_network import StepNetwork, draft_loss
from batchspec.heads.teacher import TrainingBatch
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from tests.helpers.eagle_reference import Design, run_head, target_taps

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
        map_ids = torch.randperm(design.vocab, generator=rng)[: design.draft_vocab].sort().values
        tensors["d2t"] = map_ids - torch.arange(design.draft_vocab)
        tensors["t2d"] = torch.zeros(design.vocab, dtype=torch.bool).index_fill_(0, map_ids, True)
    return tensors


def config_of(design: Design, layout: str) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "model_type": "qwen3" if design.qk_norm else "llama", "hidden_size": design.hidden, "intermediate_size": design.inner,
        "num_hidden_layers": design.layers, "num_attention_heads": design.heads, "num_key_value_heads": design.kv_heads,
        "head_dim": design.head_dim, "vocab_size": design.vocab, "rms_norm_eps": design.eps, "rope_theta": design.theta,
        "max_position_embeddings": 8, "attention_bias": design.attention_bias, "mlp_bias": design.mlp_bias, "use_cache": True,
    }
    if any(design.windows):
        shape["sliding_window"] = max(window or 0 for window in design.windows)
        shape["layer_types"] = ["sliding_attention" if window else "full_attention" for window in design.windows]
    config: dict[str, Any] = {
        "draft_vocab_size": design.draft_vocab, "norm_before_residual": design.norm_before_residual,
        "norm_before_fc": design.norm_before_fc, "fc_norm": design.fc_norm, "norm_output": design.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(design.taps),
    }
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
    ids, features, embedding = padded(rows), padded_taps(target, design, rows), target.embedding.cpu().float()

    def loss_of(tensors: Tensors, columns: Tensor) -> Tensor:
        losses, hidden = [], None
        for ahead in range(1, 4):
            count = ids.shape[1] - 1 - ahead
            fed, logits = run_head(design, tensors, embedding, ids[:, ahead : ahead + count], features[:, :count], hidden)
            losses.append(F.cross_entropy(logits.flatten(0, 1), columns[:, ahead + 1 :].flatten()))
            hidden = fed[:, :-1]
        return torch.stack(losses).sum()

    return trained_tensors(design, rows, loss_of, steps)


def parallel_tensors(
    target: Target, design: Design, rows: Sequence[Sequence[int]], *, steps: int = 60, num_drafts: int = 4
) -> Tensors:
    """A head that knows these rows, with and without masks: all tokens from true features, then some beginnings with masks."""
    mask_id = design.mask_id
    assert mask_id is not None
    ids, features, embedding = padded(rows), padded_taps(target, design, rows), target.embedding.cpu().float()
    rng = torch.Generator().manual_seed(0)
    most = min(map(len, rows)) - num_drafts

    def loss_of(tensors: Tensors, columns: Tensor) -> Tensor:
        """Each row is cut at a place of its own in each of its copies: masks follow, and nothing after them counts."""
        count = most + num_drafts - 3
        begin = torch.randint(2, most, (len(rows) * COPIES, 1), generator=rng)
        place = torch.arange(count)
        known = place < begin - 1
        mask = tensors["mask_hidden"].view(1, 1, -1)
        taps = torch.where(known[..., None], features[:, :count].repeat(COPIES, 1, 1), mask)
        tokens = torch.where(known, ids[:, 1 : count + 1].repeat(COPIES, 1), mask_id)
        wanted = columns[:, 2 : count + 2].repeat(COPIES, 1).masked_fill(place >= begin + num_drafts - 2, UNCOUNTED)
        _, logits = run_head(design, tensors, embedding, tokens, taps)
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    return trained_tensors(design, rows, loss_of, steps)


COPIES = 3
"""Of every row in a step of training for parallel drafts."""
UNCOUNTED = -100
"""A class that cross_entropy leaves out."""


def padded(rows: Sequence[Sequence[int]], fill: int = 0) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=fill)


def padded_taps(target: Target, design: Design, rows: Sequence[Sequence[int]]) -> Tensor:
    return pad_sequence([target_taps(target, row, design.taps).float() for row in rows], batch_first=True)


def trained_tensors(
    design: Design, rows: Sequence[Sequence[int]], loss_of: Callable[[Tensors, Tensor], Tensor], steps: int
) -> Tensors:
    """Random tensors after `steps` of training. loss_of: of the tensors and the rows' columns in the head's logits."""
    tensors = random_tensors(design)
    trained = {name: t.float().requires_grad_() for name, t in tensors.items() if t.is_floating_point()}
    tables = {name: t for name, t in tensors.items() if not t.is_floating_point()}
    map_ids = tables["d2t"] + torch.arange(len(tables["d2t"]))
    column = torch.full((design.vocab,), UNCOUNTED).scatter_(0, map_ids, torch.arange(len(map_ids)))
    ids = padded(rows, -1)
    columns = column[ids.clamp(min=0)].masked_fill(ids < 0, UNCOUNTED)
    optimiser = torch.optim.Adam(trained.values(), lr=1e-2, fused=True)
    for _ in range(steps):
        optimiser.zero_grad()
        loss_of(trained, columns).backward()
        optimiser.step()
    return {name: t.detach().double() for name, t in trained.items()} | tables


def tiny_design(spec: ModelSpec, **changes: Any) -> Design:
    """A head for a tiny target of two layers: taps 0, 1 and 2, 19 draft tokens."""
    values: dict[str, Any] = {
        "hidden": spec.hidden_size, "target_hidden": spec.hidden_size, "vocab": spec.vocab_size, "draft_vocab": 19,
        "taps": (0, 1, 2),
    }
    return Design(**(values | changes))


def check_gradients_of_bf16_products(network: StepNetwork, wide: TrainingBatch, *, ahead: int, share: float) -> None:
    """Gradients of fp32 weights by bf16 products differ from those by fp32 ones by less than this share of their norm."""
    narrow = replace(wide, embedded=wide.embedded.bfloat16(), features=wide.features.bfloat16())
    gradients = []
    for given, enabled in ((wide, False), (narrow, True)):
        network.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            draft_loss(network, given, ahead=ahead, decay=0.8)[0].backward()
        gradients.append({name: weight.grad for name, weight in network.named_parameters()})
    for name, exact in gradients[0].items():
        found = gradients[1][name]
        assert exact is not None
        assert found is not None
        assert found.dtype == torch.float32
        assert float((found - exact).norm()) < share * float(exact.norm()), name


def fill_with_drafts(rows: Sequence[Any], drafts: Callable[[list[int], int], Sequence[int]], vocab_size: int) -> None:
    """Make the completions of training rows of drafts, up to three at a time with a random token after them, so that drafts are
    accepted often enough. drafts(tokens, n): the first n, at most three, after these tokens."""
    rng = np.random.default_rng(0)
    for row in rows:
        ids = row.ids[: row.prompt_len + 1].tolist()
        while len(ids) < len(row.ids):
            ids += [*drafts(ids, int(rng.integers(1, 4))), int(rng.integers(vocab_size))]
        row.ids[:] = ids[: len(row.ids)]


def accepted_drafts(rows: Sequence[Any], drafts: Callable[[list[int], int], Sequence[int]]) -> tuple[int, tuple[int, ...]]:
    """Rounds, and how many of them keep the first, second and third draft, if each row is decoded with these drafts."""
    rounds, kept = 0, np.zeros(3, int)
    for row in rows:
        ids, newest = row.ids.tolist(), row.prompt_len
        while newest < len(ids) - 1:
            own = drafts(ids[: newest + 1], len(ids) - 2 - newest)
            count = next((i for i, (a, b) in enumerate(zip(own, ids[newest + 1 :], strict=False)) if a != b), len(own))
            rounds, newest = rounds + 1, newest + count + 1
            kept[:count] += 1
    return rounds, tuple(kept.tolist())
