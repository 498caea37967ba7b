"""The shapes of `image_jobs.py`: config.json of models that read images, and the other files of their folders."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from batchspec.images.processor import CLIP_MEAN, CLIP_STD
from batchspec.model.families.shapes import config_json

_TEXT: dict[str, Any] = {
    "model_type": "qwen3_vl_text", "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
    "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "attention_bias": False, "rope_theta": 5e6,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
}
_VISION: dict[str, Any] = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304,
}
_QWEN3_VL: dict[str, Any] = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-vl-8b": {
        **_QWEN3_VL, "tie_word_embeddings": False,
        "text_config": {
            **_TEXT, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        },
        "vision_config": {
            **_VISION, "model_type": "qwen3_vl", "out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24],
        },
    },
    "qwen3-vl-2b": {
        **_QWEN3_VL, "tie_word_embeddings": True,
        "text_config": {
            **_TEXT, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
        "vision_config": {
            **_VISION, "model_type": "qwen3_vl", "depth": 24, "hidden_size": 1024, "intermediate_size": 4096,
            "out_hidden_size": 2048, "deepstack_visual_indexes": [5, 11, 17],
        },
    },
    "qwen3.5-9b": {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_text", "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
            "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
            "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "attention_bias": False,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "mtp_num_hidden_layers": 0, "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {**_VISION, "model_type": "qwen3_5", "out_hidden_size": 4096},
    },
}
SHAPES["tiny"] = {
    **_QWEN3_VL, "tie_word_embeddings": True,
    "text_config": {
        **_TEXT, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True,
    },
    "vision_config": {
        **_VISION, "model_type": "qwen3_vl", "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
        "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    },
}
_QWEN2_5_VL: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen2_5_vl_text", "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 128000,
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "use_sliding_window": False, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "model_type": "qwen2_5_vl", "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "hidden_act": "silu", "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "out_hidden_size": 3584,
    },
}
_SOFT_TOKENS = 280
_OF_TEXT_ALONE = ("architectures", "hidden_act", "torch_dtype", "bos_token_id", "eos_token_id")
_GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "tie_word_embeddings": True,
    "audio_config": None, "vision_soft_tokens_per_image": _SOFT_TOKENS,
    "text_config": {
        **{key: own for key, own in json.loads(config_json("gemma4-26b-a4b")).items() if key not in _OF_TEXT_ALONE},
        "hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": "vision",
    },
    "vision_config": {
        "model_type": "gemma4_vision", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72, "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6, "patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10240,
        "default_output_length": _SOFT_TOKENS, "standardize": True, "use_clipped_linears": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
}
SHAPES |= {"qwen2.5-vl-7b": _QWEN2_5_VL, "gemma4-26b-a4b": _GEMMA4}
"""config.json by name, without the ids of tokens. tiny: to try a job on a CPU."""


@dataclass(frozen=True)
class FolderFiles:
    """What the folder of a model needs besides its shape, to be read by batchspec and by other engines."""

    special: tuple[str, ...]
    """Its special tokens."""
    ids: dict[str, str]
    """Keys of config.json -> the tokens whose ids they are."""
    names: dict[str, Any]
    """Keys of tokenizer_config.json."""
    template: str
    files: dict[str, dict[str, Any]]
    """How images and videos are read, by the name of the file."""
    photo: tuple[int, int] = (448, 448)
    """Height and width of a photo."""


def _chat(begin: str, end: str, image: str, *, first: str = "", answer: str = "assistant") -> str:
    """A chat template. begin, end: tokens around a message; image: the text that an image is in a prompt; answer: the role of the
    model's own messages."""
    return (
        f"{first}{{% for message in messages %}}{begin}{{{{ message['role'] }}}}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        f"{{% if part['type'] == 'image' %}}{image}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
        f"{{% endfor %}}{{% endif %}}{end}\n{{% endfor %}}{{% if add_generation_prompt %}}{begin}{answer}\n{{% endif %}}"
    )


def _qwen(patch: int, least: int, most: int, mean: list[float], std: list[float], model: str, videos: str) -> FolderFiles:
    """least, most: limits on the pixels of an image; model, videos: beginnings of the names of classes that read images and
    videos."""
    processor = {
        "patch_size": patch, "temporal_patch_size": 2, "merge_size": 2, "image_mean": mean, "image_std": std,
        "size": {"shortest_edge": least, "longest_edge": most}, "processor_class": f"{model}Processor",
    }
    names = {f"{name}_token": f"<|{name}|>" for name in ("vision_start", "vision_end")}
    names |= {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    return FolderFiles(
        special=(
            "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
            "<|image_pad|>", "<|video_pad|>",
        ),
        ids={f"{key}_id": token for key, token in names.items()} | {"eos_token_id": "<|im_end|>"},
        names={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", **names},
        template=_chat("<|im_start|>", "<|im_end|>", "<|vision_start|><|image_pad|><|vision_end|>"),
        files={
            "preprocessor_config.json": {**processor, "image_processor_type": "Qwen2VLImageProcessorFast"},
            "video_preprocessor_config.json": {**processor, "video_processor_type": f"{videos}VideoProcessor"},
        },
    )


def _gemma4() -> FolderFiles:
    """Photos of 640 x 448 become 960 x 672 pixels, the most that its tokens hold; square ones would be 256 tokens."""
    marks = {
        "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
        "boa_token": "<|audio>", "eoa_token": "<audio|>",
    }
    usual = {"bos_token": "<bos>", "eos_token": "<turn|>", "pad_token": "<pad>"}
    images = {
        "do_convert_rgb": True, "do_normalize": False, "do_rescale": True, "do_resize": True, "image_mean": [0.0] * 3,
        "image_std": [1.0] * 3, "patch_size": 16, "pooling_kernel_size": 3, "resample": 3, "rescale_factor": 1 / 255,
    }
    ids = {f"{key}_id": token for key, token in (marks | usual).items()}
    ids["eoa_token_index"] = ids.pop("eoa_token_id")
    return FolderFiles(
        special=(*usual.values(), "<|turn>", *marks.values(), "<|video|>"),
        ids=ids | {"video_token_id": "<|video|>"},
        names={**usual, "extra_special_tokens": marks},
        template=_chat("<|turn>", "<turn|>", "<|image|>", first="{{ bos_token }}", answer="model"),
        files={
            "processor_config.json": {
                "processor_class": "Gemma4Processor", "image_seq_length": _SOFT_TOKENS, "audio_seq_length": 750,
                "audio_ms_per_token": 40,
                "image_processor": {
                    **images, "image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": _SOFT_TOKENS,
                    "image_seq_length": _SOFT_TOKENS,
                },
                "video_processor": {
                    **images, "video_processor_type": "Gemma4VideoProcessor", "max_soft_tokens": 70, "num_frames": 32,
                },
                "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
            },
        },
        photo=(448, 640),
    )


_HALF = [0.5] * 3
_QWEN3 = _qwen(16, 65_536, 2_129_920, _HALF, _HALF, "Qwen3VL", "Qwen3VL")
_FILES = {
    "qwen3_vl": _QWEN3, "qwen3_5": _QWEN3, "gemma4": _gemma4(),
    "qwen2_5_vl": _qwen(14, 3_136, 1_622_880, [*CLIP_MEAN], [*CLIP_STD], "Qwen2_5_VL", "Qwen2VL"),
}


def folder_files(shape: str) -> FolderFiles:
    return _FILES[SHAPES[shape]["model_type"]]
