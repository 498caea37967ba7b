"""adapter_config.json of a LoRA adapter, as PEFT writes it: which projections it changes, their rank and scale.

A key that is not read here is refused unless it is neutral (null, false or empty), or known not to change what a finished adapter
computes, because a newer PEFT may have keys that do.
Source: LoraConfig, https://github.com/huggingface/peft (tuners/lora/config.py); patterns: peft/utils/other.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchspec.checkpoint.config_values import ConfigReader, read_json, shown
from batchspec.checkpoint.name_patterns import NamePattern, checked_pattern, parse_pattern
from batchspec.console.text import quoted

CONFIG = "adapter_config.json"
MERGE = "merge it with PEFT (merge_and_unload) and give the merged model as model.path"
_RANKS = {"r": (1, 2**16)}
_READ = (
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "bias", "init_lora_weights",
)
_NO_PART = (
    "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout",
    "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "qalora_group_size", "runtime_config",
)
"""Keys that tell how the adapter was trained or initialised, or that only matter with another key."""
_NEUTRAL: tuple[Any, ...] = (None, False, {}, [], "")
_BASE_UNCHANGED = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that do not change the base model's weights; PiSSA, OLoRA, CorDA and LoftQ change them."""

Pattern = tuple[NamePattern, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Module names are those of the base model, as in `model.layers.0.self_attn.q_proj`."""

    rank: int
    alpha: float
    rslora: bool
    ranks: tuple[Pattern, ...]
    """Rank by pattern, for modules whose name matches; the first match counts."""
    alphas: tuple[Pattern, ...]
    targets: Callable[[str], bool]
    """Whether target_modules names this module."""
    targets_all: bool
    """Whether every module that target_modules names has an adapter: no other key makes exceptions."""
    base: str
    """The base model's name, for messages."""

    def rank_of(self, module: str) -> int:
        return int(_first(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """The factor of B A: alpha / r, or alpha / sqrt(r)."""
        rank = self.rank_of(module)
        return float(_first(self.alphas, module, self.alpha)) / (rank**0.5 if self.rslora else rank)


def read_adapter_config(folder: Path) -> LoraConfig:
    """Read adapter_config.json. Raises CheckpointError if it is missing, malformed, or asks for something unsupported."""
    path = folder / CONFIG
    values = read_json(path)
    config = ConfigReader(values, shown(path)).ranged(_RANKS)
    if not values:
        raise config.refusal("no such file, or it is empty; model.adapter must be the folder of a PEFT LoRA adapter")
    if config.text("peft_type") != "LORA":
        raise config.refusal(f"{config.shown('peft_type')} is not supported, LORA is; {MERGE}")
    unread = [key for key in config if key not in (*_READ, *_NO_PART) and config.differs(key, *_NEUTRAL)]
    unread += ["bias"] if config.differs("bias", None, "none") else []
    if unread:
        raise config.refusal(f"{', '.join(map(config.shown, unread[:3]))} is not supported; {MERGE}")
    if config.differs("init_lora_weights", *_BASE_UNCHANGED):
        raise config.refusal(
            f"{config.shown('init_lora_weights')} changed the base model's weights too; convert the adapter with PEFT "
            "(save_pretrained with path_initial_model_for_weight_conversion), or merge it there"
        )
    exceptions = [key for key in ("exclude_modules", "layers_to_transform") if config.differs(key, *_NEUTRAL)]
    return LoraConfig(
        rank=config.integer("r"),
        alpha=config.number("lora_alpha"),
        rslora=config.flag("use_rslora"),
        ranks=_patterns(config, "rank_pattern", values, lambda one: one.integer("r"), "r"),
        alphas=_patterns(config, "alpha_pattern", values, lambda one: one.number("lora_alpha"), "lora_alpha"),
        targets=_targets(config, values.get("target_modules")),
        targets_all=not exceptions and values["target_modules"] != "all-linear",
        base=str(values.get("base_model_name_or_path")),
    )


def _targets(config: ConfigReader, value: Any) -> Callable[[str], bool]:
    """target_modules: a list of names or their last parts, a regular expression of whole names, or all-linear."""
    if value == "all-linear":
        return lambda module: True
    if isinstance(value, str):
        return parse_pattern(checked_pattern(config, "target_modules", value)).is_whole
    if not config.texts("target_modules"):
        raise config.refusal(f"{config.shown('target_modules')} names no module; save the adapter again with PEFT")
    return lambda module: any(f".{module}".endswith(f".{name}") for name in value)


def _patterns(
    config: ConfigReader, key: str, values: dict[str, Any], read: Callable[[ConfigReader], float], name: str
) -> tuple[Pattern, ...]:
    """The patterns of a key with their values, each read and checked as the key `name`."""
    found = []
    for pattern in config.part(key):
        one = ConfigReader({name: values[key][pattern]}, f"{config.where}, {key} {quoted(pattern)}").ranged(_RANKS)
        found.append((parse_pattern(checked_pattern(config, key, rf"(.*\.)?({pattern})$", given=pattern)), read(one)))
    return tuple(found)


def _first(patterns: tuple[Pattern, ...], module: str, default: float) -> float:
    return next((value for pattern, value in patterns if pattern.begins(module)), default)
