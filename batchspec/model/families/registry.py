"""The model families that are supported, one line each."""

from __future__ import annotations

from batchspec.model.config_values import ConfigReader
from batchspec.model.families.base import Family
from batchspec.model.families.gemma3_text import GEMMA3_TEXT
from batchspec.model.families.glm4 import GLM4
from batchspec.model.families.gpt_oss import GPT_OSS
from batchspec.model.families.llama import LLAMA
from batchspec.model.families.minimax_m2 import MINIMAX_M2
from batchspec.model.families.mistral import MISTRAL
from batchspec.model.families.mixtral import MIXTRAL
from batchspec.model.families.olmo2 import OLMO2
from batchspec.model.families.phi3 import PHI3
from batchspec.model.families.qwen2 import QWEN2
from batchspec.model.families.qwen3 import QWEN3
from batchspec.model.families.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        LLAMA,
        QWEN2,
        QWEN3,
        MISTRAL,
        QWEN3_MOE,
        MIXTRAL,
        MINIMAX_M2,
        GPT_OSS,
        GEMMA3_TEXT,
        PHI3,
        OLMO2,
        GLM4,
    )
}


def family_of(config: ConfigReader) -> Family:
    """The family of a config.json. Raises CheckpointError for another model_type or architecture."""
    family = FAMILIES.get(config.text("model_type"))
    if family is None:
        raise config.refusal(f"{config.shown('model_type')} is not supported; supported are {', '.join(FAMILIES)}")
    architectures = config.texts("architectures") or (family.architecture,)
    if architectures != (family.architecture,):
        raise config.refusal(f"{config.shown('architectures')} is not supported; {family.name} needs {family.architecture}")
    _check_code(config, family)
    return family


def _check_code(config: ConfigReader, family: Family) -> None:
    """Raises CheckpointError if auto_map names code of another class than the family's. Code of a folder is never run. Folders
    that were published before transformers had their family name code of the family's own class: these are accepted."""
    named = config.part("auto_map") if "auto_map" in config.objects() else ConfigReader({}, config.where)
    code = named.text("AutoModelForCausalLM")
    if code and code.rpartition(".")[2] != family.architecture:
        raise config.refusal(
            f"{named.shown('AutoModelForCausalLM')}: the model has code of its own, which batchspec never runs; if it computes "
            f"what a plain {family.architecture} computes, remove auto_map"
        )


def has_window_switch(model_type: str) -> bool:
    """Whether windows of such a model, or of a draft head of its kind, apply only with use_sliding_window."""
    return model_type in FAMILIES and FAMILIES[model_type].window_switch
