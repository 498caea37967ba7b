"""Small random checkpoints with an MTP layer, in the layouts that are published: families, names, files, formats of weights.

transformers saves the model; the tensors of the layer, which it does not know, are added to the files by their published names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.engines import VOCAB
from tests.helpers.models import make_checkpoint, make_wrapped
from tests.helpers.nvfp4_layouts import Packer, compressed, group, nvfp4
from tests.helpers.nvfp4_layouts import fp8 as fp8_by
from tests.model.test_fp8_block import CONFIG as FP8_CONFIG
from tests.model.test_fp8_block import by_definition

Tensors = dict[str, Tensor]

ATTENDS: dict[str, Any] = {
    "hidden_size": 36, "head_dim": 16, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": None, "rms_norm_eps": 1e-5,
}
"""Of a model whose layers all attend."""
SHAPE: dict[str, Any] = {
    **ATTENDS, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
EXPERTS: dict[str, Any] = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 24,
}
GLM: dict[str, Any] = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_shared_experts": 2, "n_group": 3,
    "topk_group": 2, "routed_scaling_factor": 1.7, "use_qk_norm": True, "attention_bias": True,
}
LATENTS: dict[str, Any] = {
    "hidden_size": 36, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 512, "eos_token_id": None, "rms_norm_eps": 1e-5, "q_lora_rank": 20, "kv_lora_rank": 12,
    "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14, "num_nextn_predict_layers": 1, "n_routed_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_shared_experts": 2, "n_group": 3, "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
"""Of a model whose layers all have latent attention."""
NEMOTRON: dict[str, Any] = {
    "hidden_size": 36, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "eos_token_id": None, "mamba_num_heads": 4, "mamba_head_dim": 6, "n_groups": 2, "ssm_state_size": 5, "n_routed_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 24,
    "routed_scaling_factor": 1.7, "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
    "time_step_min": 1e-30, "num_nextn_predict_layers": 1, "intermediate_size": 44,
}
SAYS_MTP: dict[str, Any] = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
"""Keys of Qwen3.5; Qwen3-Next has none, and its files have a layer all the same."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_CONVERTED = ("_proj.weight", "_with_mqa.weight", "in_proj_qkv.weight", "in_proj_z.weight", "in_proj_qkvz.weight")
_PLAIN_MODULES = ["lm_head", "in_proj_a", "in_proj_b", "in_proj_ba"]


def as_saved(tensors: Tensors) -> Tensors:
    return tensors


def fused(tensors: Tensors) -> Tensors:
    """The experts of each layer in two tensors, as in official bf16 files of Qwen3.5."""
    experts: dict[str, dict[tuple[str, int], Tensor]] = {}
    found = Tensors()
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match[1], {})[match[3], int(match[2])] = tensor
        else:
            found[name] = tensor
    for name, parts in experts.items():
        count = len(parts) // 3
        gate_up = [torch.cat((parts["gate", i], parts["up", i])) for i in range(count)]
        found[f"{name}.gate_up_proj"] = torch.stack(gate_up)
        found[f"{name}.down_proj"] = torch.stack([parts["down", i] for i in range(count)])
    return found


def fp8(tensors: Tensors) -> Tensors:
    """Projections in e4m3 with a scale for each block."""
    found = Tensors()
    for name, tensor in tensors.items():
        if name.endswith(_CONVERTED):
            values, scale = by_definition(tensor.float())
            found |= {name: values, f"{name}_scale_inv": scale}
        else:
            found[name] = tensor
    return found


def fp8_but_fc(tensors: Tensors) -> Tensors:
    """The same, and the product that joins embedding and hidden state in bf16, as in files of DeepSeek."""
    fc = {name: tensor for name, tensor in tensors.items() if "eh_proj" in name}
    return fp8({name: tensor for name, tensor in tensors.items() if name not in fc}) | bf16(fc)


def packed(packer_of: Callable[[str], Packer | None]) -> Callable[[Tensors], Tensors]:
    """Projections as the packer of their name packs them; None: as they are."""

    def store(tensors: Tensors) -> Tensors:
        found = Tensors()
        for name, tensor in tensors.items():
            module = name.removesuffix(".weight")
            pack = packer_of(module) if name.endswith("_proj.weight") and "linear_attn" not in name else None
            found |= {name: tensor} if pack is None else {f"{module}.{key}": own for key, own in pack(tensor, 0)[0].items()}
        return found

    return store


def with_uneven_last_norm(tensors: Tensors) -> Tensors:
    """The norm of the model's last states multiplies them by different numbers, so that drafts from un-normed ones differ."""
    weight = tensors["backbone.norm_f.weight"]
    return tensors | {"backbone.norm_f.weight": torch.linspace(0.3, 2.0, len(weight), dtype=weight.dtype)}


def bf16(tensors: Tensors) -> Tensors:
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def fp8_config(*plain: str) -> dict[str, Any]:
    """`plain`: modules of the MTP layer that are listed as not converted."""
    return {"quantization_config": {**FP8_CONFIG, "modules_to_not_convert": [*_PLAIN_MODULES, *plain]}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A kind of checkpoint."""

    family: str
    """model_type as transformers makes it, of the language model."""
    shape: dict[str, Any] = field(default_factory=lambda: SHAPE)
    config: dict[str, Any] = field(default_factory=dict)
    """Keys of the language model, added to those of `shape`."""
    experts: bool = False
    wrapper: str | None = None
    """model_type of the model of text and images around it; None: it is alone."""
    added: dict[str, Any] = field(default_factory=dict)
    """Keys that are added to config.json after saving."""
    store: Callable[[Tensors], Tensors] = as_saved
    """The model's tensors as they are stored."""
    store_mtp: Callable[[Tensors], Tensors] = as_saved
    files: int = 1
    """2: the MTP layer has a file of its own, and there is an index."""


_IN_16 = {"hidden_size": 48, "intermediate_size": 48}
_EXPERTS_IN_16 = {**_IN_16, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32}
"""Sizes of whole groups of 16."""
_NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*linear_attn*"]}
_FP8_AND_NVFP4 = compressed(group("float-quantized", "re:.*self_attn.*"), group("nvfp4-pack-quantized", "re:.*mlp\\..*"))
_DENSE: dict[str, Any] = {"family": "qwen3_5_text", "added": SAYS_MTP}
_MOE: dict[str, Any] = {"family": "qwen3_5_moe_text", "experts": True}
_GLM: dict[str, Any] = {"family": "glm4_moe", "shape": ATTENDS}
_DEEPSEEK: dict[str, Any] = {"family": "deepseek_v3", "shape": {**LATENTS, "first_k_dense_replace": 1}}
_NEMOTRON: dict[str, Any] = {"family": "nemotron_h", "shape": NEMOTRON, "store": with_uneven_last_norm}
LAYOUTS: dict[str, Layout] = {
    "dense": Layout(**_DENSE),
    "dense, tied, biases, half of each head rotated": Layout(
        **_DENSE,
        config={
            "tie_word_embeddings": True, "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
        },
    ),
    "experts, fused": Layout(**_MOE, added=SAYS_MTP, store=fused, store_mtp=fused),
    "experts, one by one": Layout(**_MOE, added=SAYS_MTP),
    "next": Layout(family="qwen3_next", experts=True),
    "next, weights of experts as they are": Layout(family="qwen3_next", experts=True, config={"norm_topk_prob": False}),
    "wrapped": Layout(family="qwen3_5_text", wrapper="qwen3_5", config=SAYS_MTP, files=2),
    "wrapped, experts": Layout(
        family="qwen3_5_moe_text", wrapper="qwen3_5_moe", experts=True, config=SAYS_MTP, store=fused, store_mtp=fused
    ),
    "fp8, mtp listed as plain": Layout(
        family="qwen3_5_text", added={**SAYS_MTP, **fp8_config("mtp")}, store=fp8, store_mtp=bf16
    ),
    "fp8, mtp plain by its modules": Layout(
        **_MOE, store=fp8, store_mtp=lambda tensors: bf16(fused(tensors)),
        added={
            **SAYS_MTP,
            **fp8_config(
                "mtp.fc", "mtp.layers.0.mlp.experts", "mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert",
                "mtp.layers.0.self_attn",
            ),
        },
    ),
    "fp8, mtp plain and not listed": Layout(
        family="qwen3_5_text", added={**SAYS_MTP, **fp8_config()}, store=fp8, store_mtp=bf16
    ),
    "fp8, experts of the mtp layer plain and not listed": Layout(
        **_MOE, added={**SAYS_MTP, **fp8_config()}, store=fp8, store_mtp=lambda tensors: bf16(fused(tensors))
    ),
    "nvfp4, mtp plain and not listed": Layout(
        family="qwen3_5_text", config=_IN_16, added={**SAYS_MTP, "quantization_config": _NVFP4},
        store=packed(lambda name: nvfp4(divides=False)), store_mtp=bf16,
    ),
    "nvfp4 experts and fp8 attention, mtp plain though groups match it": Layout(
        **_MOE, config=_EXPERTS_IN_16, added={**SAYS_MTP, "quantization_config": _FP8_AND_NVFP4},
        store=packed(lambda name: fp8_by(scalar=False) if "self_attn" in name else nvfp4(divides=True)),
        store_mtp=lambda tensors: bf16(fused(tensors)),
    ),
    "fp8, mtp too": Layout(
        family="qwen3_next", experts=True, added=fp8_config("mtp.fc"), store=fp8, store_mtp=fp8
    ),
    "glm": Layout(**_GLM, config=GLM),
    "glm, no norms and biases of heads, one group, fp8": Layout(
        **_GLM, added=fp8_config(), store=fp8, store_mtp=fp8, files=2,
        config={**GLM, "use_qk_norm": False, "attention_bias": False, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "glm, latents": Layout(family="glm4_moe_lite", shape=LATENTS),
    "glm, latents, no q_a, biases, halves": Layout(
        family="glm4_moe_lite", shape=LATENTS, files=2,
        config={"q_lora_rank": None, "attention_bias": True, "rope_interleave": False, "n_group": 1, "topk_group": 1},
    ),
    "deepseek": Layout(**_DEEPSEEK),
    "deepseek, fp8, fc plain and not listed": Layout(
        **_DEEPSEEK, added=fp8_config(), store=fp8, store_mtp=fp8_but_fc, files=2
    ),
    "nemotron": Layout(**_NEMOTRON, added={"mtp_hybrid_override_pattern": "*E"}),
    "nemotron, narrow experts in groups, mtp plain in a file of its own": Layout(
        **_NEMOTRON, config={"moe_latent_size": 28, "n_group": 3, "topk_group": 2}, store_mtp=bf16, files=2,
        added={"mtp_layers_block_type": ["attention", "moe"]},
    ),
    "glm-ocr, wrapped": Layout(
        family="glm_ocr_text", wrapper="glm_ocr", shape=ATTENDS,
        config={
            "num_nextn_predict_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]},
        },
    ),
}
"""Names of checkpoints, as tests call them."""


def make_mtp_model(folder: Path, name: str, *, seed: int = 0, **config: Any) -> Path:
    """A checkpoint of LAYOUTS in `folder`; `config` overrides keys of the language model."""
    layout = LAYOUTS[name]
    keys = {**layout.shape, **(EXPERTS if layout.experts else {}), **layout.config, **config}
    if layout.wrapper is None:
        make_checkpoint(folder, layout.family, vocab=VOCAB, seed=seed, **keys)
    else:
        make_wrapped(folder, layout.wrapper, keys, vocab=VOCAB, seed=seed, tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    mtp = layout.store_mtp(published(mtp_tensors(text_config(folder), seed=seed + 1), text_config(folder)))
    if NAMES.get(layout.family) == GLM_NAMES:
        mtp |= copies_of(tensors, mtp_prefix(text_config(folder)))
    write_model(folder, layout.store(tensors), mtp, files=layout.files)
    change_config(folder, **layout.added)
    return folder


def write_model(folder: Path, tensors: Tensors, mtp: Tensors, *, files: int = 1) -> None:
    """Weight files of a model and its MTP layer."""
    parts = [{**tensors, **mtp}] if files == 1 else [tensors, mtp]
    (folder / "model.safetensors").unlink(missing_ok=True)
    names = ["model.safetensors"] if files == 1 else [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    for name, part in zip(names, parts, strict=True):
        save_file({key: tensor.contiguous() for key, tensor in part.items()}, folder / name, metadata={"format": "pt"})
    if files > 1:
        places = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def change_config(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **keys}), encoding="utf-8")


def text_config(folder: Path) -> dict[str, Any]:
    """The keys of the language model."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {**config, **config.get("text_config", {})}


def stored_mtp(folder: Path) -> Tensors:
    """The tensors of the MTP layer in a folder's files, without the copies of others of the model."""
    prefix = mtp_prefix(text_config(folder))
    own = {name: tensor for name, tensor in stored(folder) if name.startswith(prefix)}
    return {name: tensor for name, tensor in own.items() if not name.endswith(("embed_tokens.weight", "shared_head.head.weight"))}


def mtp_prefix(config: dict[str, Any]) -> str:
    """What the names of the layer's tensors begin with in files of this language model."""
    if NAMES.get(config["model_type"]) != GLM_NAMES:
        return "mtp."
    model = "model.language_model" if config["model_type"] == "glm_ocr_text" else "model"
    return f"{model}.layers.{config['num_hidden_layers']}."


def copies_of(tensors: Tensors, prefix: str) -> Tensors:
    """The embedding and the output matrix as GLM's files hold them once more, beside the MTP layer."""
    names = {"embed_tokens": f"{prefix.partition('layers.')[0]}embed_tokens.weight", "shared_head.head": "lm_head.weight"}
    return {f"{prefix}{copy}.weight": tensors[name].clone() for copy, name in names.items()}


GLM_NAMES = {
    "mtp.fc.": "eh_proj.", "mtp.pre_fc_norm_embedding.": "enorm.", "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.", "mtp.layers.0.mlp.shared_expert.": "mlp.shared_experts.", "mtp.layers.0.": "",
}
"""Beginnings of names of a layer of Qwen -> those of GLM, after `mtp_prefix`."""
NEMOTRON_NAMES = {
    "mtp.fc.": "layers.0.eh_proj.", "mtp.pre_fc_norm_embedding.": "layers.0.enorm.",
    "mtp.pre_fc_norm_hidden.": "layers.0.hnorm.", "mtp.norm.": "layers.1.final_layernorm.",
    "mtp.layers.0.input_layernorm.": "layers.0.norm.", "mtp.layers.0.post_attention_layernorm.": "layers.1.norm.",
    "mtp.layers.0.self_attn.": "layers.0.mixer.", "mtp.layers.0.mlp.shared_expert.": "layers.1.mixer.shared_experts.",
    "mtp.layers.0.mlp.": "layers.1.mixer.",
}
"""The same of Nemotron."""
NAMES = {
    "glm4_moe": GLM_NAMES, "glm4_moe_lite": GLM_NAMES, "glm_ocr_text": GLM_NAMES, "deepseek_v3": GLM_NAMES,
    "nemotron_h": NEMOTRON_NAMES,
}
"""Of the families whose names are not Qwen's; their norms multiply by their weight, Qwen's by 1 + weight."""


def published(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Tensors by the names of Qwen's files -> as the files of this language model hold them."""
    names = NAMES.get(config["model_type"])
    if names is None:
        return tensors
    found = Tensors()
    for name, tensor in tensors.items():
        old = next(old for old in names if name.startswith(old))
        whole = tensor + 1 if name.endswith("norm.weight") or "pre_fc_norm" in name else tensor
        found[mtp_prefix(config) + names[old] + name.removeprefix(old)] = whole
    return found


def stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a folder's files."""
    for path in sorted(folder.glob("*.safetensors")):
        yield from load_file(path).items()


def mtp_tensors(config: dict[str, Any], *, seed: int) -> Tensors:
    """Random fp32 tensors of a layer by the names of Qwen's files, experts one by one; large enough that drafts vary, and norms
    that are not their usual zeros."""
    rng = torch.Generator().manual_seed(seed)
    hidden, dim = config["hidden_size"], config.get("head_dim", 0)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layer, found, is_qwen = "mtp.layers.0.", Tensors(), config["model_type"] not in NAMES
    is_ocr = config["model_type"] == "glm_ocr_text"
    is_nemotron, norms_heads = config["model_type"] == "nemotron_h", is_qwen or config.get("use_qk_norm", False)

    def linear(name: str, rows: int, k: int, *, bias: bool = False) -> None:
        found[f"{name}.weight"] = torch.randn(rows, k, generator=rng) * (1.5 / k**0.5)
        if bias:
            found[f"{name}.bias"] = torch.randn(rows, generator=rng) * 0.3

    def norm(name: str, size: int) -> None:
        found[f"{name}.weight"] = torch.randn(size, generator=rng) * 0.3

    def mlp(name: str, inner: int, size: int = hidden) -> None:
        for part in ("up",) if is_nemotron else ("gate", "up") if not is_ocr else ():
            linear(f"{name}.{part}_proj", inner, size)
        if is_ocr:
            linear(f"{name}.gate_up_proj", 2 * inner, size)
        linear(f"{name}.down_proj", size, inner)

    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        norm(f"mtp.{name}", hidden)
    linear("mtp.fc", hidden, 2 * hidden)
    after = ("post_self_attn_layernorm", "post_mlp_layernorm") if is_ocr else ()
    for name in ("input_layernorm", "post_attention_layernorm", *after):
        norm(layer + name, hidden)
    bias = config.get("attention_bias", False)
    if "kv_lora_rank" in config:
        latent, rotated, of_key, of_value = (
            config[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        )
        rank, rows = config["q_lora_rank"], heads * (of_key + rotated)
        if rank is None:
            linear(f"{layer}self_attn.q_proj", rows, hidden)
        else:
            linear(f"{layer}self_attn.q_a_proj", rank, hidden, bias=bias)
            norm(f"{layer}self_attn.q_a_layernorm", rank)
            linear(f"{layer}self_attn.q_b_proj", rows, rank)
        linear(f"{layer}self_attn.kv_a_proj_with_mqa", latent + rotated, hidden, bias=bias)
        norm(f"{layer}self_attn.kv_a_layernorm", latent)
        linear(f"{layer}self_attn.kv_b_proj", heads * (of_key + of_value), latent)
        linear(f"{layer}self_attn.o_proj", hidden, heads * of_value, bias=bias)
    else:
        for name, count in (("q", (2 if is_qwen else 1) * heads), ("k", kv_heads), ("v", kv_heads)):
            linear(f"{layer}self_attn.{name}_proj", count * dim, hidden, bias=bias)
        linear(f"{layer}self_attn.o_proj", hidden, heads * dim, bias=bias and is_qwen)
    for name in ("q_norm", "k_norm") if norms_heads else ():
        norm(f"{layer}self_attn.{name}", dim)
    num_experts = config.get("num_experts" if is_qwen else "n_routed_experts")
    if num_experts is None:
        mlp(f"{layer}mlp", config["intermediate_size"])
        return found
    linear(f"{layer}mlp.gate", num_experts, hidden)
    if is_qwen:
        linear(f"{layer}mlp.shared_expert_gate", 1, hidden)
        mlp(f"{layer}mlp.shared_expert", config["shared_expert_intermediate_size"])
    else:
        found[f"{layer}mlp.gate.e_score_correction_bias"] = torch.randn(num_experts, generator=rng) * 0.2
        shared = config["n_shared_experts"] * config["moe_intermediate_size"]
        mlp(f"{layer}mlp.shared_expert", config.get("moe_shared_expert_intermediate_size", shared))
    size = config.get("moe_latent_size") or hidden
    if size != hidden:
        linear(f"{layer}mlp.fc1_latent_proj", size, hidden)
        linear(f"{layer}mlp.fc2_latent_proj", hidden, size)
    for expert in range(num_experts):
        mlp(f"{layer}mlp.experts.{expert}", config["moe_intermediate_size"], size)
    return found
