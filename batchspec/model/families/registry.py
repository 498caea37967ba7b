"""The model families that are supported, one line each; and the models that read images too whose language model is of one."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchspec.checkpoint.config_values import ConfigReader, Json
from batchspec.checkpoint.files import listed
from batchspec.console.text import as_json
from batchspec.model.families.bamba import BAMBA
from batchspec.model.families.base import Family
from batchspec.model.families.deepseek_v3 import DEEPSEEK_V3
from batchspec.model.families.exaone4 import EXAONE4
from batchspec.model.families.falcon_h1 import FALCON_H1
from batchspec.model.families.gemma3_text import GEMMA3_TEXT
from batchspec.model.families.gemma4 import GEMMA4_TEXT, GEMMA4_UNIFIED_TEXT
from batchspec.model.families.glm4 import GLM4
from batchspec.model.families.glm4_moe import GLM4_MOE
from batchspec.model.families.glm4_moe_lite import GLM4_MOE_LITE
from batchspec.model.families.glm_ocr import GLM_OCR
from batchspec.model.families.gpt_oss import GPT_OSS
from batchspec.model.families.granite import GRANITE, GRANITE_HYBRID
from batchspec.model.families.lfm2 import LFM2
from batchspec.model.families.lfm2_moe import LFM2_MOE
from batchspec.model.families.llama import LLAMA
from batchspec.model.families.minimax_m2 import MINIMAX_M2
from batchspec.model.families.mistral import MINISTRAL3, MISTRAL
from batchspec.model.families.mistral4 import MISTRAL4
from batchspec.model.families.mixtral import MIXTRAL
from batchspec.model.families.nemotron_h import NEMOTRON_H
from batchspec.model.families.olmo2 import OLMO2, OLMO3
from batchspec.model.families.phi3 import PHI3
from batchspec.model.families.qwen2 import QWEN2
from batchspec.model.families.qwen3 import QWEN3
from batchspec.model.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from batchspec.model.families.qwen3_moe import QWEN3_MOE
from batchspec.model.families.qwen3_next import QWEN3_NEXT
from batchspec.model.families.seed_oss import SEED_OSS
from batchspec.model.families.smollm3 import SMOLLM3

SCORES_LABELS = "ForSequenceClassification"
"""End of the name of a class whose last matrix scores labels."""
BARE = "Model"
"""End of the name of a class that ends with the hidden states."""
FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        LLAMA,
        QWEN2,
        QWEN3,
        QWEN3_MOE,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        MISTRAL,
        MINISTRAL3,
        MISTRAL4,
        MIXTRAL,
        MINIMAX_M2,
        GPT_OSS,
        GEMMA3_TEXT,
        GEMMA4_TEXT,
        GEMMA4_UNIFIED_TEXT,
        PHI3,
        OLMO2,
        OLMO3,
        GLM4,
        GLM_OCR,
        GLM4_MOE,
        GLM4_MOE_LITE,
        DEEPSEEK_V3,
        SEED_OSS,
        SMOLLM3,
        GRANITE,
        GRANITE_HYBRID,
        EXAONE4,
        LFM2,
        LFM2_MOE,
        NEMOTRON_H,
        BAMBA,
        FALCON_H1,
    )
}


NEEDED: dict[str, tuple[str, ...]] = {
    "multi-head latent attention (MLA), which is built for glm4_moe_lite, deepseek_v3 and mistral4 alone": (
        "deepseek_v2", "kimi_k2", "kimi_k25", "mistral_large4", "minicpm3", "longcat_flash",
    ),
    "sparse attention over latents (an indexer that chooses keys)": ("deepseek_v32", "glm_moe_dsa"),
    "compressed sparse attention": ("deepseek_v4",),
    "Mamba layers of the first kind": ("mamba", "falcon_mamba", "jamba", "zamba"),
    "a class of its own, whose Mamba2 layers alone are built": ("zamba2", "nemotron_h_omni"),
    "a plan of memory without K/V pages, because no layer attends": ("mamba2",),
    "Kimi delta attention": ("kimi_linear", "bailing_hybrid", "glm5_next"),
    "attention in chunks": ("llama4", "llama4_text"),
    "one gate per attention head": ("lfm3",),
    "normed embeddings, norms of q and k without weights, and gates with projections of their own, which no other family has": (
        "muse_glimmer", "muse_glimmer_text",
    ),
}
"""What models need that is not built -> their model_types."""


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model_type whose config.json has the keys of its language model in `text_config`."""

    architecture: str
    """The only supported entry of `architectures`."""
    text: str
    """The family of the language model."""
    text_varies: bool = False
    """Whether text_config.model_type, where it is given, names the family; otherwise transformers does not read it."""
    text_defaults: Json = field(default_factory=dict)
    """Values of missing keys of text_config where they are not the family's."""
    may_be_flat: bool = False
    """Whether files may have the keys of the language model beside vision_config."""
    defaults: Json = field(default_factory=dict)
    """Values of missing keys at the top level that apply to the language model."""


WRAPPERS: dict[str, Wrapper] = {
    "gemma3": Wrapper("Gemma3ForConditionalGeneration", "gemma3_text"),
    "gemma4": Wrapper("Gemma4ForConditionalGeneration", "gemma4_text"),
    "gemma4_unified": Wrapper("Gemma4UnifiedForConditionalGeneration", "gemma4_unified_text"),
    "qwen2_5_vl": Wrapper(
        "Qwen2_5_VLForConditionalGeneration", "qwen2", may_be_flat=True,
        text_defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    ),
    "qwen3_vl": Wrapper(
        "Qwen3VLForConditionalGeneration", "qwen3", text_defaults={"rope_theta": 5e5, "max_position_embeddings": 128_000},
    ),
    "qwen3_5": Wrapper("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    "qwen3_5_moe": Wrapper("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
    "mistral3": Wrapper("Mistral3ForConditionalGeneration", "mistral", text_varies=True),
    "glm_ocr": Wrapper("GlmOcrForConditionalGeneration", "glm_ocr_text"),
    "lighton_ocr": Wrapper(
        "LightOnOcrForConditionalGeneration", "qwen3", text_varies=True, defaults={"tie_word_embeddings": True}
    ),
}
CLASSES: dict[str, str] = {"LightOnOCRForConditionalGeneration": "lighton_ocr"}
"""Classes of published files whose model_type is another model's, here mistral3 -> their own."""
ASSISTANTS: dict[str, Wrapper] = {
    "gemma4_assistant": Wrapper("Gemma4AssistantForCausalLM", "gemma4_text"),
    "gemma4_unified_assistant": Wrapper("Gemma4UnifiedAssistantForCausalLM", "gemma4_unified_text"),
}
"""Models that draft for another one and read its K and V (`draft/assistant.py`); `text_config` has the keys of their layers."""
_OF_THE_MODEL = ("tie_word_embeddings", "eos_token_id", "quantization_config", "dtype", "torch_dtype")
"""Keys at the top level that apply to the language model, and override those of the same name in text_config."""
_OF_IMAGES = (
    "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "image_token_index",
    "boi_token_index", "eoi_token_index", "mm_tokens_per_image", "multimodal_projector_bias", "projector_hidden_act",
    "spatial_merge_size", "vision_feature_layer", "audio_config", "audio_token_id", "boi_token_id", "eoi_token_id",
    "boa_token_id", "eoa_token_id", "eoa_token_index", "vision_soft_tokens_per_image", "image_start_token_id",
    "image_end_token_id", "video_start_token_id", "video_end_token_id",
)
"""Keys that describe how images and sounds are read."""


def family_of(config: ConfigReader) -> tuple[Family, ConfigReader]:
    """The family of a config.json, and the keys that it reads: those of the language model where the model reads images too.

    Raises CheckpointError for another model_type or architecture.
    """
    config = by_class(config)
    if config.text("model_type") in ASSISTANTS:
        raise config.refusal(
            f"{config.shown('model_type')} drafts for another model; give its folder as draft.path, with draft=mtp"
        )
    wrapper = WRAPPERS.get(config.text("model_type"))
    if wrapper is not None:
        _check_class(config, wrapper.architecture)
        config = _text_config(config, wrapper)
    family = FAMILIES.get(config.text("model_type"))
    if family is None:
        kind = config.text("model_type")
        why = next((f": it needs {needed}" for needed, kinds in NEEDED.items() if kind in kinds), "")
        raise config.refusal(
            f"{config.shown('model_type')} is not supported{why}; supported are {listed((*FAMILIES, *WRAPPERS), 6)}, which "
            "`batchspec families` prints"
        )
    _check_class(config, family.architecture)
    return family, config


def by_class(config: ConfigReader) -> ConfigReader:
    """The same with the model_type and the class that transformers gives to a class of CLASSES."""
    kind = CLASSES.get((config.texts("architectures") or ("",))[0])
    return config if kind is None else config.replaced(model_type=kind, architectures=[WRAPPERS[kind].architecture])


def assistant_text(values: Json, where: str) -> Json:
    """config.json of a decoder whose layers have the shapes of an assistant's, and keep K and V.

    values  config.json of the assistant; where: for messages
    """
    config = ConfigReader(values, where)
    wrapper = ASSISTANTS[config.text("model_type")]
    _check_class(config, wrapper.architecture)
    _text_config(config, wrapper)
    own: Json = values["text_config"]
    shared, count = own.get("num_kv_shared_layers"), own.get("num_hidden_layers")
    if shared not in (None, 0, count):
        raise config.refusal(
            f"text_config.num_kv_shared_layers={as_json(shared)} of {as_json(count)} layers: an assistant keeps no K and "
            "V; correct it"
        )
    of_model = {key: values[key] for key in _OF_THE_MODEL if values.get(key) is not None}
    return {**own, **of_model, "model_type": wrapper.text, "num_kv_shared_layers": 0}


def _text_config(config: ConfigReader, wrapper: Wrapper) -> ConfigReader:
    """The keys of the language model."""
    is_flat = wrapper.may_be_flat and "text_config" not in config.objects()
    if not is_flat and "text_config" not in config.objects():
        raise config.refusal(f"{config.shown('model_type')} needs text_config with the keys of its language model; correct it")
    text = config if is_flat else config.part("text_config")
    for key in _OF_IMAGES:
        config.given(key)  # it counts as read, although nothing depends on it
    kind = text.text("model_type", wrapper.text) if wrapper.text_varies else wrapper.text
    text = text.replaced(vision_config=None) if is_flat else text.under(config.filled(wrapper.defaults), _OF_THE_MODEL)
    if text.texts("architectures") == (wrapper.architecture,):  # transformers from 4.52 on writes the wrapper's own there too
        text = text.replaced(architectures=None)
    return text.replaced(model_type=kind).filled(wrapper.text_defaults)


def class_has_output(config: ConfigReader) -> bool:
    """Whether the class of config.json has an output matrix."""
    return not any(name.endswith((SCORES_LABELS, BARE)) for name in config.texts("architectures") or ())


def labels_of(config: ConfigReader) -> tuple[str, ...]:
    """The names of the labels that a model scores in place of tokens, in the order of its score matrix; (): it has an output
    matrix. Without id2label they are called as transformers calls them. Raises CheckpointError."""
    if not any(name.endswith(SCORES_LABELS) for name in config.texts("architectures") or ()):
        return ()
    if "id2label" not in config.objects():
        return tuple(f"LABEL_{number}" for number in range(config.integer("num_labels", 2)))
    names = config.part("id2label")
    numbers = [str(number) for number in range(len([*names]))]
    if not numbers or {*names} != {*numbers}:
        raise config.refusal(f"{config.shown('id2label')} must name the labels 0, 1, ... without a gap; correct it")
    found = tuple(names.text(number) for number in numbers)
    if len({*found}) < len(found):
        raise config.refusal(f"{config.shown('id2label')} gives two labels one name; give each its own")
    return found


def _check_class(config: ConfigReader, architecture: str) -> None:
    """Raises CheckpointError if `architectures` or auto_map names another class. Code of a folder is never run. Folders that were
    published before transformers had their family name code of the family's own class: these are accepted."""
    kind = architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    known = (architecture, *(f"{kind}{text}{end}" for text in ("", "Text") for end in (SCORES_LABELS, BARE)))
    known += tuple(name for name, of in CLASSES.items() if WRAPPERS[of].architecture == architecture)
    if (config.texts("architectures") or (architecture,)) not in {(name,) for name in known}:
        raise config.refusal(
            f"{config.shown('architectures')} is not supported; {config.text('model_type')} needs {architecture}"
        )
    named = config.part("auto_map") if "auto_map" in config.objects() else ConfigReader({}, config.where)
    for key in named:
        if not key.startswith("AutoModel"):
            continue
        code = named.text(key)
        if code and code.rpartition(".")[2] not in known:
            raise config.refusal(
                f"{named.shown(key)}: the model has code of its own, which batchspec never runs; if it computes what a plain "
                f"{architecture} computes, remove auto_map"
            )


def has_window_switch(model_type: str) -> bool:
    """Whether windows of such a model, or of a draft head of its kind, apply only with use_sliding_window."""
    return model_type in FAMILIES and FAMILIES[model_type].window_switch
