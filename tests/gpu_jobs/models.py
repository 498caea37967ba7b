"""Models, draft heads and adapters of the random jobs, made once in a folder that all workers share."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from batchspec.checkpoint.packaged import smollm2_folder
from batchspec.model.layers.kind import Use
from batchspec.model.spec import load_spec
from tests.heads import upcycle
from tests.helpers import int4_layouts
from tests.helpers.assistants import make_assistant
from tests.helpers.block_heads import BlockDesign, random_block, write_block
from tests.helpers.heads import random_tensors, tiny_design, write_head
from tests.helpers.image_models import make_image_model
from tests.helpers.models import make_checkpoint, make_tokenizer, needed
from tests.model.test_lora import make_adapter

SHIPPED_HEAD = "pkg://smollm2-135m-eagle3"
MAX_LEN = 4096
_SHAPE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": MAX_LEN, "initializer_range": 0.15,
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2}
_RECURRENT: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 32,
    "full_attention_interval": 2,
}
_FACTORS: dict[str, Any] = {
    "embedding_multiplier": 2.0, "residual_multiplier": 0.6, "attention_multiplier": 0.2, "logits_scaling": 0.5,
}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "odd": (
        "llama",
        {"hidden_size": 72, "intermediate_size": 88, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12},
    ),
    "mistral": ("mistral", {"sliding_window": 40}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", {"sliding_window": 24, "sliding_window_pattern": 3, "query_pre_attn_scalar": 20}),
    "gemma4": (
        "gemma4_text",
        {
            "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "full_attention"], "global_head_dim": 64,
            "num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 20.0,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gemma4_moe": (
        "gemma4_text",
        {
            "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2,
            "global_head_dim": 64, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 64,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gemma4_inputs": (
        "gemma4_text",
        {
            "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
            "num_kv_shared_layers": 2, "global_head_dim": 64, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 320,
        },
    ),
    "gemma4_unified": ("gemma4_unified_text", {"sliding_window": 24, "global_head_dim": 64, "num_hidden_layers": 4}),
    "qwen2": ("qwen2", {}),
    "phi3": ("phi3", {"sliding_window": 33}),
    "olmo2": ("olmo2", {}),
    "glm4": ("glm4", {}),
    "mixtral": ("mixtral", _EXPERTS),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    "gpt_oss": ("gpt_oss", {**_EXPERTS, "sliding_window": 32}),
    "minimax_m2": ("minimax_m2", {**_EXPERTS, "rotary_dim": 16}),
    "olmo3": ("olmo3", {"sliding_window": 24, "num_hidden_layers": 4}),
    "exaone4": ("exaone4", {"sliding_window": 32, "sliding_window_pattern": 2}),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "granite": ("granite", _FACTORS),
    "granite4": (
        "granitemoehybrid",
        {**_FACTORS, "shared_intermediate_size": 160, "position_embedding_type": "rope", **needed("granitemoehybrid", 3)},
    ),
    "ministral3": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 100, "mscale": 1.0,
                "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.2,
            },
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "n_group": 4, "topk_group": 2,
            "routed_scaling_factor": 1.5, "attention_bias": True, "use_qk_norm": True,
        },
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {
            "num_key_value_heads": 4, "head_dim": 16, "q_lora_rank": 40, "kv_lora_rank": 48, "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 3,
            "moe_intermediate_size": 64, "routed_scaling_factor": 1.5, "num_hidden_layers": 3, "num_nextn_predict_layers": 1,
        },
    ),
    "qwen3_5": ("qwen3_5_text", {**_RECURRENT, "num_hidden_layers": 5}),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {
            **_RECURRENT, "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **_RECURRENT, "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv", "conv"], "num_hidden_layers": 4, "conv_bias": True}),
    "lfm2_moe": (
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention", "conv"], "num_experts": 8, "num_experts_per_tok": 3,
            "moe_intermediate_size": 64, "num_dense_layers": 1,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16,
            "mamba_norm_before_gate": False, "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.7,
            "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.25, "ssm_multipliers": [1.5, 0.75, 2.0, 1.25, 0.5],
            "mlp_multipliers": [1.2, 0.6],
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", *["linear_attention", "moe"] * 2][:7],
            "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "n_routed_experts": 8,
            "num_experts_per_tok": 3, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 48,
            "head_dim": 16, "time_step_min": 1e-30, "num_nextn_predict_layers": 1,
        },
    ),
}
"""Tiny random models: family and keys of config.json. Where batchspec reads an MTP layer of the family, it gets one."""
INT4 = {
    "int4_gptq": int4_layouts.of_gptq(64, sym=False), "int4_awq": int4_layouts.of_awq(32),
    "int4_packed": int4_layouts.of_compressed_tensors(64, symmetric=False),
}
"""Tiny Llamas with weights of four bits and zero points."""
IMAGES = ("qwen3_vl", "qwen3_5_images")
"""Tiny models that read images."""
FORMATS = ("fp8_block", "fp8_channel", "moe", "moe_fp8_block", "moe_fp8_channel", "gpt_oss", "gpt_oss_mxfp4")
"""What tests.heads.upcycle makes, of SmolLM2 (`smol:NAME`) or of the tiny Llama (`tiny:NAME`)."""
ADAPTED = (
    "smol", "llama", "odd", "mistral", "qwen3", "olmo2", "qwen3_5", "exaone4", "granite", "gemma4", "gemma4_inputs", "lfm2",
)
PROJECTIONS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
MORE_PROJECTIONS = {
    "qwen3_5": ["in_proj_qkv", "in_proj_z", "out_proj", "gate_proj"], "lfm2": ["in_proj", "out_proj", "w1", "w3", "w2"],
}
"""That adapters of these models change too."""
USES: dict[str, Use] = {"window": "self_draft", "tree": "tree"}
"""Drafters that a kind of layer may refuse."""


@dataclass(frozen=True, kw_only=True)
class Model:
    name: str
    """A key of TINY or INT4, one of IMAGES, `dummy`, `smol`, or `smol:FORMAT` or `tiny:FORMAT`."""
    folder: Path
    other: Path
    """The same shape, other weights."""
    head: str
    parallel_head: str
    block_heads: tuple[str, ...]
    """A DSpark head, whose first query drafts, and a DFlash head, whose first one does not."""
    small: str
    """A model with the same tokenizer (draft=pard)."""
    adapters: tuple[str, ...]
    assistant: str | None
    """What drafts with draft=mtp, for a model that such assistants are made for."""
    vocab: int
    is_smol: bool
    refused: tuple[str, ...]
    """Drafters that it refuses."""
    has_mtp: bool

    @property
    def reads_images(self) -> bool:
        return self.name in IMAGES


def make_model(name: str, folder: Path) -> Model:
    """The model, made now if `folder` lacks it; safe in several processes."""
    folder.mkdir(parents=True, exist_ok=True)
    is_smol = name.startswith("smol")
    base = smollm2_folder() if is_smol else _once(folder, _plain(name), lambda to: _tiny(_plain(name), to))
    own = base
    if ":" in name:
        source = name.partition(":")[0]
        made = _once(folder, f"{source}-formats", lambda to: _formats(base, to))
        own = made / name.partition(":")[2]
    if name in INT4:
        base, own = base / "plain", base / "int4"
    key = name.replace(":", "-")
    parallel = _once(folder, f"{_plain(name)}-parallel", lambda to: _head(base, to, parallel=True))
    head = SHIPPED_HEAD if is_smol else str(_once(folder, f"{_plain(name)}-head", lambda to: _head(base, to, parallel=False)))
    blocks = [
        str(_once(folder, f"{_plain(name)}-{form}", partial(_block, base, form=form))) for form in ("dspark", "dflash", "dflash2")
    ]
    spec = load_spec(base)
    small = base if spec.refuses("drafter") is None else _once(folder, "llama", lambda to: _tiny("llama", to))
    adapters: list[str] = []
    for seed in range(3) if name in ADAPTED else ():
        adapters.append(str(_once(folder, f"{key}-adapter{seed}", partial(_adapter, base, name, seed=seed))))
    assistant = None
    if name.startswith("gemma4"):
        assistant = str(_once(folder, f"{key}-assistant", lambda to: make_assistant(to, own, text={"hidden_size": 48})))
    return Model(
        name=name, folder=own, other=_once(folder, f"{key}-other", lambda to: _changed(own, to)), head=head,
        parallel_head=str(parallel), block_heads=tuple(blocks), small=str(small), adapters=tuple(adapters), assistant=assistant,
        vocab=spec.vocab_size, is_smol=is_smol, has_mtp=spec.mtp is not None,
        refused=tuple(drafter for drafter, use in USES.items() if spec.refuses(use) is not None),
    )


def _plain(name: str) -> str:
    if name.startswith("smol"):
        return "smol"
    return "llama" if name == "dummy" or name.startswith("tiny") else name


def _once(folder: Path, name: str, make: Callable[[Path], object]) -> Path:
    """folder/name, which `make` fills if it is not there; others wait meanwhile."""
    wanted = folder / name
    with (folder / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not wanted.exists():
            scratch = Path(tempfile.mkdtemp(dir=folder)) / "made"
            make(scratch)
            os.rename(scratch, wanted)
    return wanted


def _formats(base: Path, folder: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(min(8, os.cpu_count() or 1))
    upcycle.make(base, folder, num_experts=4)
    torch.set_num_threads(threads)


def _tiny(name: str, folder: Path) -> None:
    if name in IMAGES:
        kind, has_mtp = name.removesuffix("_images"), name == "qwen3_5_images"
        make_image_model(folder, kind, dtype=torch.float64, mtp=has_mtp, max_len=MAX_LEN)
        return
    if name in INT4:
        for made in int4_layouts.make(folder, INT4[name], dtype=torch.float64, **{**_SHAPE, "num_hidden_layers": 3}):
            make_tokenizer(made)
        return
    family, keys = TINY[name]
    make_tokenizer(make_checkpoint(folder, family, dtype=torch.float64, **{**_SHAPE, **keys}))
    if (mtp := load_spec(folder).mtp) is not None:
        noise, tensors = torch.Generator().manual_seed(2), load_file(folder / "model.safetensors")
        for tensor in mtp.tensors():
            own = 0.1 * torch.randn(tensor.shape, generator=noise, dtype=torch.float64)
            tensors[tensor.name] = own + 1 - tensor.offset if tensor.role == "norm" else own
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _head(model: Path, folder: Path, *, parallel: bool) -> None:
    """A random head: its drafts are hardly ever accepted."""
    spec = load_spec(model)
    taps = (2, spec.num_layers // 2, spec.num_layers - 3) if spec.num_layers > 5 else (0, 1, 2)
    design = tiny_design(
        spec, heads=4, kv_heads=2, head_dim=32, inner=64, draft_vocab=64, taps=taps,
        mask_id=spec.vocab_size - 1 if parallel else None,
    )
    write_head(folder, design, random_tensors(design))


def _block(model: Path, folder: Path, *, form: str) -> None:
    """A random DSpark head with one causal window, or a DFlash or DFlash2 head in z-lab's layout with the target's words."""
    spec = load_spec(model)
    design = BlockDesign(
        hidden=spec.hidden_size, vocab=spec.vocab_size, taps=(0, 1), mask_id=spec.vocab_size - 1, block=16, draft_vocab=64,
        rank=8, confidence="markov", kv_heads=2, head_dim=32, inner=64, windows=(40, None),
    )
    if form != "dspark":
        own: dict[str, Any] = {"draft_vocab": None, "rank": 0, "confidence": "", "windows": (None, None), "layout": "z-lab"}
        design = replace(design, from_anchor=False, own_embedding=True, **own)
    if form == "dflash2":
        design = replace(design, own_embedding=False, windows=(40, 40), causal=False, selector=16, taps_of_conv=2, conv_group=8)
    write_block(folder, design, random_block(design))


def _adapter(model: Path, name: str, folder: Path, *, seed: int) -> None:
    projections = PROJECTIONS[seed:] + MORE_PROJECTIONS.get(name, [])[seed:]
    make_adapter(folder, model, projections, seed=seed, r=8, lora_alpha=4)


def _changed(model: Path, folder: Path) -> None:
    """The same tensors, but other norms."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    noise, tensors = torch.Generator().manual_seed(1), {}
    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            factor = 1 + 0.2 * torch.randn(tensor.shape, generator=noise) if "norm" in name else None
            tensors[name] = tensor if factor is None else (tensor * factor).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
