"""Scales of an e4m3 K/V cache by calibration: the largest K and V of each head over fixed texts, with a margin.

    scale = 2 ** ceil(log2(MARGIN * largest / 448))

Scales are powers of two, so that a number that is read back is exact in bf16: prefill, which converts K and V, and rounds, which
multiply after the product, attend to the same keys. It also keeps differences in the last bits between machines out of the
scales. The margin costs no precision for numbers that are normal in e4m3, down to 1 / 3,500 of the largest; smaller ones lose
precision. It covers what other texts and rotations by RoPE (at most the square root of two) add; numbers above 448 * scale
saturate.

The texts do not depend on the job, so that a model has the same scales in all jobs: prose, code, mathematics, lists and other
languages, encoded by the tokenizer; chats, rendered by its template; and ids spread over the vocabulary. With large biases
(Qwen2.5, gpt-oss) a few channels of K are large in every text, and their rounding errors, up to 1 / 16 of them, are added to
every score: no scale avoids that. `batchspec verify --kv` measures the effect on a job's own prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.checkpoint.files import ModelFiles
from batchspec.checkpoint.wrapped import model_tensors
from batchspec.distributed.collectives import Collectives
from batchspec.errors import CheckpointError, ConfigError
from batchspec.kernels.common.card import card_of
from batchspec.kernels.common.e4m3 import LARGEST
from batchspec.model.calibration_texts import TEXTS
from batchspec.model.layers.attention.kv_scales import KVScales, checkpoint_scales, heads_of_part, names_of_scales
from batchspec.model.layers.base import Shard
from batchspec.model.single_row import forward_row
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from batchspec.process.load_progress import count_step

CALIBRATION = 1
"""Changes whenever the scales of a model would change; a job that began with scales of another version is not resumed."""
MARGIN = 4.0
MAX_TOKENS = 512
"""Number of tokens of a prompt that are read."""
_SPREAD_TOKENS, _STRIDE = 256, 7919


class Encoder(Protocol):
    """The part of a tokenizer that calibration uses."""

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Any]) -> list[int]: ...


def check_e4m3(device: torch.device, key: str = "cache.dtype") -> None:
    """Raises ConfigError for a GPU without e4m3 if `key` asks for it."""
    card = card_of(device)
    if not card.has_e4m3:
        major, minor = card.capability
        raise ConfigError(
            f"{key}=fp8 needs a GPU of compute capability 8.9 or newer, {card.name} has {major}.{minor}; use {key}=auto"
        )


def check_fp8_kv(how: str, spec: ModelSpec, files: ModelFiles | None, device: torch.device) -> None:
    """Raises as `check_e4m3`, and CheckpointError for scales that cache.scales asks for and the checkpoint lacks.

    how    the value of cache.scales
    files  None: weights are dummies, and scales calibrated
    """
    check_e4m3(device)
    if not spec.has_kv_scales and how != "auto":
        raise ConfigError(
            f"cache.scales={how}: each latent of {spec.family} has a scale of its own, that of its numbers; use cache.scales=auto"
        )
    if how == "calibrate" or files is None or not spec.has_kv_scales:
        return
    if names_of_scales(spec, model_tensors(files), files.where) is None and how == "checkpoint":
        raise CheckpointError(
            f"{files.where} has no K/V scales (k_scale, v_scale), which cache.scales=checkpoint asks for; use cache.scales=auto"
        )


def give_scales(
    target: Target, saved: KVScales | None, how: str, folder: Path | None, tokenizer: Encoder | None,
    tell: Callable[[list[list[int]]], None] = lambda prompts: None,
) -> str:
    """Set the target's scales: the saved ones, or those that cache.scales asks for. Returns their source, as text for people.

    folder  of the weights; None: they are dummy
    tell    called before a calibration with its prompts: other ranks of the target must call `calibrate` with the same ones
    Raises CheckpointError if a checkpoint has scales that cannot be used.
    """
    scales, source = saved, "of the output folder"
    if scales is None and folder is not None and how != "calibrate":
        scales, source = checkpoint_scales(folder, target.spec.whole or target.spec), "of the checkpoint"
    if scales is None:
        prompts = list(calibration_prompts(tokenizer, target.spec.vocab_size))
        tell(prompts)
        scales, source = calibrate(target, prompts), "calibrated"
    target.use_kv_scales(scales.values)
    return source


def calibration_prompts(tokenizer: Encoder | None, vocab_size: int) -> Iterator[list[int]]:
    """Token ids of each prompt, the same for a model in every process. Ids beyond the vocabulary are left out."""
    texts = [] if tokenizer is None else [tokenizer.encode(text) for text in TEXTS]
    if tokenizer is not None and tokenizer.has_chat_template:
        with suppress(ValueError):  # the template refuses a user's turn alone: only the texts are read
            texts += [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in TEXTS[:2]]
    spread = [(i * _STRIDE) % vocab_size for i in range(_SPREAD_TOKENS)]
    for ids in (*texts, spread):
        if kept := [token for token in ids if token < vocab_size][:MAX_TOKENS]:
            yield kept


def calibrate(target: Target, prompts: Iterable[list[int]]) -> KVScales:
    """See the module's docstring. Runs the target over each prompt, with each adapter that rows may have, with a cache in its own
    dtype.

    All ranks of a target have the same result, for all heads.
    """
    spec = target.spec
    largest = [torch.zeros(2, heads.stop - heads.start, dtype=torch.float64) for heads in heads_of_part(spec)]
    adapters = range(1) if spec.lora is None else spec.lora.numbers
    for ids, adapter in product(prompts, adapters):
        _, cache = forward_row(target, ids[: spec.max_len], fp8=False, kv_only=True, adapter=adapter)
        count_step()
        for layer, kv in enumerate(cache.layers):
            found = kv.pages.double().abs().nan_to_num(0.0, posinf=0.0).amax((1, 2, 4)).cpu()
            largest[layer] = torch.maximum(largest[layer], found)
    found = padded_heads(largest) if target.ranks is None else _of_all_heads(padded_heads(largest), spec, target.ranks)
    exponent = torch.where(found > 0, MARGIN * found / LARGEST, 1.0).log2().ceil()
    return KVScales(exponent.clamp(-100, 100).exp2().float())


def padded_heads(layers: Sequence[Tensor]) -> Tensor:
    """[L, 2, KVH] of the values [2, heads] of each layer, 0 beyond the heads of a layer that has fewer than others."""
    most = max(own.shape[1] for own in layers)
    return torch.stack([F.pad(own, (0, most - own.shape[1])) for own in layers])


def _of_all_heads(own: Tensor, spec: ModelSpec, ranks: Collectives) -> Tensor:
    """[L, 2, KVH] for the whole model, from those of each rank's heads [L, 2, heads]."""
    assert spec.whole is not None
    whole = [own.new_zeros(2, heads.stop) for heads in heads_of_part(spec.whole)]
    for rank, part in enumerate(ranks.gather(own)):
        for layer, heads in enumerate(heads_of_part(spec.whole.sharded(Shard(rank, ranks.ranks)))):
            whole[layer][:, heads] = part[layer, :, : heads.stop - heads.start]
    return padded_heads(whole)
