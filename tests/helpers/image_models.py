"""Tiny random models that read images, with a chat template, and pictures for them."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from batchspec.checkpoint.files import LocalFiles
from batchspec.checkpoint.wrapped import is_of_text
from batchspec.draft.base import Drafter
from batchspec.images.decode import Rgb, decode
from batchspec.images.header import read_header
from batchspec.images.prepared_images import PreparedImages
from batchspec.images.processor import Fit, ImageProcessor
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from batchspec.model.vision.registry import load_vision
from batchspec.model.weights import judge_model
from batchspec.packed_batch import PackedBatch
from batchspec.records import ImagePiece, Request
from tests.helpers.engines import request
from tests.helpers.four_bit_models import PROJECTIONS
from tests.helpers.gemma4_models import DENSE, EXPERTS, LAYER_INPUTS, MIXED
from tests.helpers.models import CHAT_TEMPLATE, SPECIAL_TOKENS, make_tokenizer, make_wrapped
from tests.helpers.mtp_checkpoints import SAYS_MTP, mtp_tensors, published, stored, text_config, write_model
from tests.helpers.nvfp4_layouts import Packer

if TYPE_CHECKING:
    from batchspec.engine.loop.engine import Engine
    from batchspec.engine.ranks.lead import Lead

MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
"""Tokens 300, 301 and 302 of the tokenizer."""
PAD = 301
VOCAB = 320
PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096}, "image_mean": [0.5, 0.4, 0.5], "image_std": [0.5, 0.3, 0.5],
}
TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}",
)
GEMMA4: dict[str, Any] = {
    "image_processor_type": "Gemma4ImageProcessor", "do_normalize": False, "image_mean": [0.0, 0.0, 0.0],
    "image_std": [1.0, 1.0, 1.0], "image_seq_length": 280, "max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 3,
    "size": {"height": 224, "width": 224},
}
GRID = {"num_position_embeddings": 25}
VISION: dict[str, dict[str, Any]] = {
    "qwen3_5": GRID, "qwen3_5_moe": GRID, "qwen3_vl": {**GRID, "deepstack_visual_indexes": [2, 0]},
    "qwen2_5_vl": {"window_size": 25, "fullatt_block_indexes": [1]},
    "glm_ocr": {"rms_norm_eps": 1e-2},
    "mistral3": {"num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 12, "rope_parameters": {"rope_theta": 50.0}},
    "lighton_ocr": {
        "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 12, "hidden_act": "silu",
        "rope_parameters": {"rope_theta": 50.0},
    },
    "gemma4": {
        "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 12, "standardize": True,
        "position_embedding_size": 210,
    },
    "gemma4_small": {
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 12, "use_clipped_linears": True,
        "position_embedding_size": 212, "rope_parameters": {"rope_type": "default", "rope_theta": 30.0},
    },
}
VISION["gemma4_moe"] = VISION["gemma4"]
VISION["gemma4_unified"] = {"mm_embed_dim": 24, "output_proj_dims": 24, "mm_posemb_size": 70}
GEMMA4_KINDS = {"gemma4": "gemma4", "gemma4_moe": "gemma4", "gemma4_small": "gemma4", "gemma4_unified": "gemma4_unified"}
"""Kinds of models -> model_type. gemma4: as 31B, gemma4_moe: as 26B-A4B; gemma4_small: as E2B, whose images are causal and whose
layers have inputs; gemma4_unified: as 12B, without an encoder."""
OF_PIXTRAL = ("mistral3", "lighton_ocr")
GLM: dict[str, Any] = {
    **PREPROCESSOR, "image_processor_type": "Glm46VImageProcessor", "size": {"shortest_edge": 128, "longest_edge": 8192},
}
PIXTRAL: dict[str, Any] = {
    "image_processor_type": "PixtralImageProcessorFast", "patch_size": 4, "size": {"longest_edge": 61},
    "image_mean": [0.5, 0.4, 0.5], "image_std": [0.5, 0.3, 0.5],
}
SHAPES: dict[str, dict[str, Any]] = {
    "glm_ocr": {
        "hidden_size": 64, "head_dim": 24, "num_hidden_layers": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 4, 6]},
    },
    "lighton_ocr": {"hidden_size": 64, "head_dim": 24, "num_hidden_layers": 3, "rope_theta": 1e4, "rms_norm_eps": 1e-3},
    "mistral3": {
        "hidden_size": 64, "num_hidden_layers": 3, "head_dim": 24, "sliding_window": None, "model_type": "ministral3",
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
    "qwen2_5_vl": {
        "hidden_size": 64, "num_hidden_layers": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    },
    "qwen3_vl": {
        "hidden_size": 64, "head_dim": 24, "num_hidden_layers": 3,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 4, 2], "mrope_interleaved": True,
        },
    },
    "qwen3_5": {
        "hidden_size": 64, "head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "num_hidden_layers": 4, "full_attention_interval": 2,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [3, 2, 1],
            "mrope_interleaved": True,
        },
    },
}


SHAPES["gemma4"] = {
    **DENSE, "hidden_size": 64, "num_hidden_layers": 4, "layer_types": MIXED, "sliding_window": 33,
    "use_bidirectional_attention": "vision",
}
SHAPES["gemma4_unified"] = {**SHAPES["gemma4"], "sliding_window": 90}
SHAPES["gemma4_moe"] = {**SHAPES["gemma4"], **{key: own for key, own in EXPERTS.items() if key not in SHAPES["gemma4"]}}
SHAPES["gemma4_small"] = {
    **LAYER_INPUTS, "hidden_size": 64, "sliding_window": 33, "pad_token_id": 7, "num_attention_heads": 4,
}
SHAPES["qwen3_5_moe"] = SHAPES["qwen3_5"] | {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 24,
}


def make_image_model(
    folder: Path, kind: str = "qwen3_5", *, dtype: torch.dtype = torch.float32, seed: int = 0, mtp: bool = False,
    max_len: int = 1024, **config: Any,
) -> Path:
    """A random model of this kind with its tokenizer, chat template and preprocessor_config.json. mtp: with an MTP layer; config:
    more keys of config.json."""
    vision: dict[str, Any] = {
        **({} if kind == "gemma4_unified" else {"hidden_size": 24, "intermediate_size": 40}),
        "initializer_range": 0.2, "patch_size": 4, **VISION[kind],
        **({} if kind in (*OF_PIXTRAL, *GEMMA4_KINDS) else {"depth": 3, "num_heads": 2, "out_hidden_size": 64}),
    }
    says_mtp = {"num_nextn_predict_layers": 1} if kind == "glm_ocr" else SAYS_MTP
    text = {**SHAPES[kind], "max_position_embeddings": max_len, **(says_mtp if mtp else {})}
    ids: dict[str, Any] = {"image_token_id": PAD, "video_token_id": 303, "vision_start_token_id": 300, "vision_end_token_id": 302}
    if kind in OF_PIXTRAL:
        ids = {"image_token_index": PAD, "multimodal_projector_bias": True}
        names = dict(zip(("image_break_token", "image_token", "image_end_token"), MARKS, strict=True))
        if kind == "lighton_ocr":
            ids, names = {"image_token_id": PAD, "tie_word_embeddings": False}, {}  # tied ones repeat a token
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "processor_config.json").write_text(json.dumps({"patch_size": 4, "spatial_merge_size": 2, **names}))
    if kind in GEMMA4_KINDS:
        ids = {"image_token_id": PAD, "boi_token_id": 300, "eoi_token_id": 302, "video_token_id": 303, "audio_token_id": 304}
    make_wrapped(folder, GEMMA4_KINDS.get(kind, kind), text, vision=vision, vocab=VOCAB, seed=seed, dtype=dtype, **ids, **config)
    if mtp:
        found = published(mtp_tensors(text_config(folder), seed=seed + 1), text_config(folder))
        layer = {name: own.to(dtype) for name, own in found.items()}
        write_model(folder, dict(stored(folder)), layer)
    processors = {"glm_ocr": GLM} | dict.fromkeys(OF_PIXTRAL, PIXTRAL)
    processor = gemma4_processor(kind) if kind in GEMMA4_KINDS else processors.get(kind, PREPROCESSOR)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return add_marks(folder)


def quantised(folder: Path, to: Path, config: Mapping[str, Any], packer: Callable[[str], Packer]) -> Path:
    """A copy of a model with this quantization_config, whose projections in layers of the language model are quantised. The
    weights in `folder` become those that the copy holds, in float64.

    packer  of a projection, by the name of its module
    """
    shutil.copytree(folder, to)
    tensors, held = load_file(folder / "model.safetensors"), dict[str, torch.Tensor]()
    for seed, (name, tensor) in enumerate(sorted(tensors.items())):
        module, held[name] = name.removesuffix(".weight"), tensor
        if name.endswith(PROJECTIONS) and is_of_text(name):
            own, matrix = packer(module)(held.pop(name).float(), seed)
            held |= {f"{module}.{key}": part.contiguous() for key, part in own.items()}
            tensors[name] = matrix
    save_file({name: own.double() for name, own in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(held, to / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    return to


def gemma4_processor(kind: str) -> dict[str, Any]:
    """The keys of its image processor."""
    return {**GEMMA4, **({"image_processor_type": "Gemma4UnifiedImageProcessor"} if kind == "gemma4_unified" else {})}


def add_marks(folder: Path) -> Path:
    """A tokenizer of 300 tokens with the marks of images, and a chat template that writes them."""
    from tokenizers import AddedToken, Tokenizer

    make_tokenizer(folder, vocab=300, chat_template=TEMPLATE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in MARKS])
    assert tokenizer.token_to_id(MARKS[1]) == PAD, SPECIAL_TOKENS
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def picture(height: int, width: int, seed: int = 0, *, format: str = "PNG") -> bytes:
    """An encoded picture of noise."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    out = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(out, format)
    return out.getvalue()


def encoded(piece: ImagePiece) -> bytes:
    """The encoded image of a piece that is no page of a PDF."""
    assert isinstance(piece.source, bytes)
    return piece.source


def fitted(processor: ImageProcessor, data: bytes) -> Fit:
    """The size to which an encoded picture is resized."""
    header = read_header(data)
    return processor.fit(header.height, header.width)


def image_target(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Target:
    """The model of a folder with its vision encoder."""
    spec = replace(judge_model(LocalFiles(folder)), vision=load_vision(folder))
    return Target.load(folder, spec, dtype=dtype, device=torch.device(device))


def image_request(index: int, spec: ModelSpec, parts: Sequence[int | bytes], *, cap: int, seed: int = 0, **more: Any) -> Request:
    """A request of these parts: numbers are lengths of random texts, bytes are encoded pictures."""
    assert spec.vision is not None
    processor, rng = spec.vision.processor, np.random.default_rng(seed)
    ids, pieces = list[int](), list[ImagePiece]()
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(3, 299, part).tolist()
            continue
        header, fit = read_header(part), fitted(processor, part)
        rows, cols = processor.grid(fit)
        tokens, (before, behind) = processor.tokens(rows, cols).tolist(), processor.around
        ids += before
        pieces.append(
            ImagePiece(
                begin=len(ids), length=len(tokens), rows=rows, cols=cols, advance=processor.advance(rows, cols),
                height=fit.height, width=fit.width,
                encoded_pixels=header.height * header.width, digest=processor.digest(part, fit), source=part,
                whole=processor.most_whole > 0,
            )
        )
        ids += [*tokens, *behind]
    return replace(request(index, ids, cap=cap, **more), images=tuple(pieces))


class ImagesInOrder(PreparedImages):
    """Pixels made in this process, so that no clock decides which rows enter together.

    steps  row_index -> steps of the engine after which the row's pixels are there; those of others are there at once
    """

    def __init__(self, steps: Mapping[int, int] | None = None) -> None:
        self._steps, self._num_steps = steps or {}, 0
        self._asked: dict[Hashable, Sequence[ImagePiece]] = {}

    def ask(self, row: Hashable, pieces: Sequence[ImagePiece]) -> None:
        self._asked.setdefault(row, pieces)

    def hurry(self, row: Hashable) -> None:
        """All are made in time."""

    def take(self, row: Hashable) -> tuple[Rgb, ...] | None:
        assert isinstance(row, Request)
        if self._num_steps < self._steps.get(row.row_index, 0):
            return None
        return tuple(decode(piece.source, Fit(piece.height, piece.width)) for piece in self._asked.pop(row))

    def drop(self, row: Hashable) -> None:
        self._asked.pop(row, None)

    def drop_all(self) -> None:
        self._asked.clear()

    def check(self) -> None:
        self._num_steps += 1

    def pending(self) -> Iterator[Future[None]]:
        return iter(())


def image_engine(
    target: Target, drafter: Drafter, batch: PackedBatch, *, kept_images: int = 64, options: Any = None,
    prepared: PreparedImages | None = None, lead: Lead | None = None, **more: Any,
) -> Engine:
    """prepared: where pixels come from; None: as in a job, from processes. lead: of several ranks."""
    from batchspec.engine.features import RowFeatures
    from batchspec.engine.loop.engine import Engine
    from batchspec.job.load.build import prepared_images

    prepared = prepared or prepared_images(target.spec, batch.max_len)
    features = RowFeatures(image_encoder=target.image_encoder, kept_images=kept_images, prepared=prepared, **more)
    batch = replace(batch, num_verified=max(batch.num_verified, drafter.shape.num_verified))
    return Engine(target, drafter, batch, device=target.device, features=features, options=options, lead=lead)


def inputs_of(folder: Path, ids: Sequence[int], images: Sequence[bytes]) -> dict[str, torch.Tensor]:
    """What transformers' model reads for a prompt, whose placeholders are expanded, and its encoded images."""
    from PIL import Image
    from transformers import (
        Gemma4ImageProcessorPil,
        Glm46VImageProcessorPil,
        PixtralImageProcessorPil,
        Qwen2VLImageProcessorPil,
    )

    row, opened = torch.tensor([list(ids)]), [Image.open(io.BytesIO(one)) for one in images]
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    if kind in ("gemma4", "gemma4_unified"):
        # The own class of gemma4_unified, which needs torchvision, joins patches to these.
        joined = {"patch_size": 12, "pooling_kernel_size": 1} if kind == "gemma4_unified" else {}
        gemma: Any = Gemma4ImageProcessorPil(**GEMMA4 | {"image_processor_type": None} | joined)
        made = gemma(opened, return_tensors="pt") if images else {}
        pixels = {name: made[name] for name in ("pixel_values", "image_position_ids") if images}
        return {"input_ids": row, "mm_token_type_ids": (row == PAD).int(), **pixels}
    if kind in OF_PIXTRAL:
        values = json.loads((folder / "preprocessor_config.json").read_text())
        pixtral: Any = PixtralImageProcessorPil(**values | {"image_processor_type": None})
        more = {"patch_size": 8} if kind == "mistral3" else {}
        return {"input_ids": row, **(pixtral(opened, **more, return_tensors="pt") if images else {})}
    found = {"input_ids": row, "mm_token_type_ids": (row == PAD).int()}
    if images:
        kinds: Any = Glm46VImageProcessorPil if kind == "glm_ocr" else Qwen2VLImageProcessorPil
        found |= kinds.from_pretrained(folder)(opened, return_tensors="pt")
    return found


def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of a folder."""
    from transformers import AutoModelForImageTextToText
    from transformers.models.gemma4_unified import modeling_gemma4_unified

    auto: Any = AutoModelForImageTextToText
    unified: Any = modeling_gemma4_unified
    unified.create_masks_for_generate = _masks_of_gemma4
    return auto.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def _masks_of_gemma4(*, block_sequence_ids: torch.Tensor | None = None, **more: Any) -> Any:
    """Those that Gemma4UnifiedForConditionalGeneration.create_masks_for_generate makes, which is called with static caches alone:
    Gemma4UnifiedModel.forward of 5.24 lets images see ahead in layers of all keys too, and beyond the window of others. Those are
    not the model's (transformers, issue 46711)."""
    from transformers.masking_utils import create_masks_for_generate
    from transformers.models.gemma4.modeling_gemma4 import create_masks_for_vision_model

    if block_sequence_ids is None or bool((block_sequence_ids < 0).all()):
        return create_masks_for_generate(**more)
    return create_masks_for_vision_model(**more, block_sequence_ids=block_sequence_ids)


@torch.no_grad()
def generated(model: Any, folder: Path, ids: Sequence[int], images: Sequence[bytes], count: int) -> list[int]:
    """transformers' greedy tokens after a prompt. After one that ends with an image its `generate` (5.24) takes new tokens for
    parts of the image, so there each token is that of a forward pass over all tokens, up to the first placeholder."""
    if ids[-1] == PAD:
        known = list(ids)
        while len(known) < len(ids) + count and (len(known) == len(ids) or known[-1] != PAD):
            known.append(int(model(**inputs_of(folder, known, images)).logits[0, -1].argmax()))
        return known[len(ids) :]
    inputs = inputs_of(folder, ids, images)
    row = model.generate(**inputs, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    found: list[int] = row[0, len(ids) :].tolist()
    if model.config.model_type in GEMMA4_KINDS.values() and PAD in found:  # the next token follows from another embedding
        return found[: found.index(PAD) + 1]
    return found
