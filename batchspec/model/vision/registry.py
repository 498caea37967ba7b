"""Which models have a vision encoder that is supported."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from batchspec.checkpoint.config_values import ConfigReader, has_file, read_json, shown
from batchspec.errors import CheckpointError
from batchspec.images.processor import PREPROCESSOR
from batchspec.model.families.registry import by_class
from batchspec.model.vision.gemma4 import read_gemma4
from batchspec.model.vision.gemma4_unified import read_gemma4_unified
from batchspec.model.vision.glm_ocr import read_glm_ocr
from batchspec.model.vision.lighton_ocr import read_lighton_ocr
from batchspec.model.vision.pixtral import read_pixtral
from batchspec.model.vision.qwen2_5_vl import read_qwen2_5_vl
from batchspec.model.vision.qwen3_vl import read_qwen3_vl
from batchspec.model.vision.spec import VisionFiles, VisionSpec

VISION_SPECS: dict[str, Callable[[VisionFiles], VisionSpec]] = {
    "gemma4": read_gemma4,
    "gemma4_unified": read_gemma4_unified,
    "glm_ocr": read_glm_ocr,
    "lighton_ocr": read_lighton_ocr,
    "mistral3": read_pixtral,
    "qwen2_5_vl": read_qwen2_5_vl,
    "qwen3_vl": partial(read_qwen3_vl, sections=(24, 20, 20), deepstack=(8, 16, 24)),
    "qwen3_5": partial(read_qwen3_vl, sections=(11, 11, 10)),
    "qwen3_5_moe": partial(read_qwen3_vl, sections=(11, 11, 10)),
}
"""model_type of config.json -> what reads the shape of its vision encoder."""
PROCESSOR, NESTED = "processor_config.json", "image_processor"
"""A file that may hold what preprocessor_config.json holds, and its key for that."""


def load_vision(folder: Path) -> VisionSpec:
    """The vision encoder of a model folder, as its config.json and preprocessor_config.json say; what processor_config.json
    holds as image_processor has precedence, as in transformers 5 (image_processing_base.py). Raises CheckpointError, also for a
    model without a vision encoder that is supported."""
    config = by_class(ConfigReader(read_json(folder / "config.json"), shown(folder / "config.json")))
    kind = config.text("model_type")
    if kind not in VISION_SPECS:
        raise CheckpointError(
            f"{shown(folder)}: model_type {kind!r} has no vision encoder that batchspec supports; supported are "
            f"{', '.join(VISION_SPECS)}; leave the images out (input.columns.images=null, model.vision=false)"
        )
    where, nested = shown(folder / PREPROCESSOR), read_json(folder / PROCESSOR).get(NESTED)
    if nested is not None:
        where = f"{shown(folder / PROCESSOR)}: {NESTED}"
        if not isinstance(nested, dict):
            raise CheckpointError(f"{where} is not an object; correct it or remove the file")
    elif not has_file(folder / PREPROCESSOR):
        raise CheckpointError(f"{shown(folder)}: no {PREPROCESSOR}, which says how images are resized; add the model's own")
    values = read_json(folder / PREPROCESSOR) if nested is None else nested
    return VISION_SPECS[kind](VisionFiles(folder, config, values, where))
