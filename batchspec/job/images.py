"""Which jobs read images, and what is not supported with them yet: each is refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from batchspec.checkpoint.files import ModelFiles, StoredTensor, listed, stored_tensors
from batchspec.config.no_effect import refuse_given
from batchspec.config.schema import RunConfig
from batchspec.data.dataset.columns import IMAGES, ColumnMap
from batchspec.errors import CheckpointError, ConfigError
from batchspec.images.header import pillow
from batchspec.model.layers.base import FLOATS
from batchspec.model.spec import ModelSpec
from batchspec.model.vision.registry import load_vision
from batchspec.model.weight_checks import check_tensors
from batchspec.tasks.registry import task_of

KEYS = ("input.image_root", "input.min_pixels", "input.max_pixels")
NO_EFFECT = "has no effect without input.columns.images or model.vision; remove the key"


def with_images(config: RunConfig, columns: ColumnMap) -> tuple[RunConfig, ColumnMap]:
    """The configuration and columns of a job, which say whether its prompts may have images. Raises ConfigError for prompts that
    are no chats."""
    column = columns.get(IMAGES)
    if column is None and not config.model.vision:
        refuse_given(config, KEYS, NO_EFFECT)
        if mapped := [name for name in ("min_pixels", "max_pixels") if columns.get(name) is not None]:
            raise ConfigError(f"input.columns.{mapped[0]}={columns.get(mapped[0])} {NO_EFFECT}")
        return config, columns
    why, instead = "model.vision=true" if column is None else f"input.columns.images={column}", "remove the key"
    if column is not None and config.input.columns.get(IMAGES) is None:
        why, instead = "pages of PDFs", "set input.columns.images=null"
    if columns.prompt_kind == "prompt_ids" or (columns.prompt_kind == "prompt" and not config.input.chat):
        raise ConfigError(
            f"{why}: images are read in chats, and the prompts of this input are {columns.prompt_kind}; set input.chat=true, "
            f"give messages, or {instead}"
        )
    return replace(config, model=replace(config.model, vision=True)), replace(columns, has_images=True)


def of_engine(config: RunConfig) -> RunConfig:
    """The configuration of a warm engine: rows of its calls may have images if it names a column of them, or sets model.vision.
    Raises ConfigError for a key that has no effect without images."""
    if config.input.columns.get(IMAGES) is None:
        if not config.model.vision:
            refuse_given(config, KEYS, NO_EFFECT)
        return config
    return replace(config, model=replace(config.model, vision=True))


def of_call(config: RunConfig, columns: ColumnMap) -> ColumnMap:
    """The columns of a call of a warm engine, which say whether prompts may have images. Raises ConfigError for a column of
    images if prompts are not chats."""
    if columns.get(IMAGES) is not None:
        return with_images(config, columns)[1]
    return replace(columns, has_images=config.model.vision)


def with_vision(config: RunConfig, spec: ModelSpec, files: ModelFiles) -> ModelSpec:
    """The spec with the vision encoder of the model's files, if the job has images. Raises ConfigError for what is not supported
    with them, and CheckpointError for a model without one."""
    if not config.model.vision:
        return spec
    pillow()
    if not task_of(config).reads_images:
        raise ConfigError(
            f"{task_of(config).asked} is not supported with images (input.columns.images, model.vision); leave it out, or the "
            "images"
        )
    vision = replace(load_vision(files.folder), ordered=config.decode.deterministic)
    try:
        vision = replace(vision, processor=vision.processor.within(config.input.min_pixels, config.input.max_pixels))
    except ValueError as error:
        raise ConfigError(f"input.{error}; correct it, or leave it to the model") from None
    most, given = vision.processor.most_whole, config.packing.max_num_batched_tokens
    if vision.ordered and most:
        raise ConfigError(
            f"decode.deterministic=true is not supported with images of {spec.family}, whose tokens attend to each other; remove "
            "it, or leave the images out (input.columns.images, model.vision)"
        )
    if given is not None and given < most:
        raise ConfigError(
            f"packing.max_num_batched_tokens={given} is below {most}, the tokens of an image, which attend to each other in one "
            "prefill pass; raise it, or lower input.max_pixels"
        )
    if config.model.load_format != "dummy":
        own = vision.own(files.where, stored_tensors(files))
        _check_unquantised(files.where, own.values())
        check_tensors(files.where, vision, own)
    return replace(spec, vision=vision)


def _check_unquantised(where: str, own: Iterable[StoredTensor]) -> None:
    """Raises CheckpointError for tensors of a vision encoder that hold quantised weights. The files tell: lists in
    quantization_config may leave out modules that its tool never quantises."""
    if found := [f"{tensor.name} ({tensor.dtype})" for tensor in own if tensor.dtype not in (*FLOATS, "I64", "BOOL")]:
        raise CheckpointError(
            f"{where}: the vision encoder is quantised, {listed(found, 1)}, and it is supported in {', '.join(FLOATS)}; use a "
            "checkpoint that quantises the language model alone, or leave the images out"
        )
