"""The MTP layer of a checkpoint as a draft head: see `batchspec.model.mtp`. T tokens, H hidden."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from batchspec.batch.image_inputs import ImageInputs
from batchspec.checkpoint.files import ModelFiles, stored_tensors
from batchspec.draft.bound_head import BoundHead, layer_gemms, put_images
from batchspec.draft.frequent_tokens import FrequentTokens
from batchspec.draft.output import DraftOutput
from batchspec.kernels.drafting.eagle_head_input import eagle_head_input
from batchspec.model.checkpoint_part import formats_as_stored
from batchspec.model.decoder import LayerWeights
from batchspec.model.fused import rms_norm
from batchspec.model.fused_experts import tensors_of
from batchspec.model.layers.attention.rope_config import RopeSpec
from batchspec.model.layers.forward import Product
from batchspec.model.layers.head_mixer import HeadMixerSpec
from batchspec.model.layers.layer import DecoderLayer
from batchspec.model.mtp import MtpSpec
from batchspec.model.products import gemm_products
from batchspec.model.quant.base import Weights
from batchspec.model.spec import ModelSpec, tokens_of
from batchspec.model.target import Target
from batchspec.model.weight_checks import check_tensors
from batchspec.model.weights import Checkpoint, DummyWeights
from batchspec.tuning.table import Product as TunedProduct


@dataclass(frozen=True, slots=True)
class MtpShape:
    """An MTP layer, or one rank's part of it, as the head of a target: a `HeadShape`."""

    mtp: MtpSpec
    aux_layer_ids: tuple[int, ...]
    """The boundary after the target's last layer; the head norms what it reads there as the target does."""
    num_layers = 1
    feed_normed = True

    @staticmethod
    def of(target: ModelSpec, mtp: MtpSpec) -> MtpShape:
        return MtpShape(mtp, (target.num_layers,))

    @property
    def hidden_size(self) -> int:
        return self.mtp.join.hidden_size

    @property
    def mixer(self) -> HeadMixerSpec:
        return self.mtp.layer.of_head

    @property
    def head_dim(self) -> int:
        return self.mixer.rotated_size

    @property
    def rope(self) -> RopeSpec:
        return self.mixer.rotation

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (self.mixer.window,)


@dataclass(frozen=True, slots=True, eq=False)
class Mtp:
    """The weights of an MTP layer."""

    spec: MtpShape
    fc: Product
    norms: Mapping[str, Tensor]
    """The norms around the layer, by the names that `JoinSpec` gives them."""
    layer: DecoderLayer
    vocabulary: FrequentTokens | None = None
    """The tokens that it may draft; None: all."""

    def bind(self, target: Target, *, argmax: bool = True) -> MtpHead:
        return MtpHead(self, target, argmax=argmax)


class MtpHead(BoundHead):
    """An MTP layer bound to its target, whose embedding and output matrix it uses."""

    def __init__(self, mtp: Mtp, target: Target, *, argmax: bool = True) -> None:
        join, ranks = mtp.spec.mtp.join, None if mtp.spec.mtp.whole is None else target.ranks
        self._vocabulary = mtp.vocabulary
        matrix, map_ids = (None, None) if mtp.vocabulary is None else self._chosen(mtp.vocabulary, target)
        size = target.spec.vocab_size if map_ids is None else len(map_ids)
        part = tokens_of(target.spec.shard, size)
        output = DraftOutput(target, matrix, map_ids, draft_vocab_size=size, part=part, ranks=ranks, argmax=argmax)
        super().__init__(target, [mtp.layer], mtp.norms[join.out_norm], join.eps, output, ranks)
        self._fc, self._input_norm = mtp.fc, mtp.layer.of_head.norm
        self._embedding_norm, self._hidden_norm = mtp.norms[join.embedding_norm], mtp.norms[join.hidden_norm]

    @staticmethod
    def _chosen(vocabulary: FrequentTokens, target: Target) -> tuple[Tensor, Tensor]:
        """Rows of the output matrix for this rank's part of the vocabulary for drafts, and its target ids int32 [V]."""
        ids = torch.from_numpy(vocabulary.choose())
        own = ids[tokens_of(target.spec.shard, len(ids))].long() - target.spec.vocab_part.start
        return target.output_rows(own.to(target.device)), ids.to(target.device)

    @torch.inference_mode()
    def choose_vocabulary(self) -> None:
        """Draft the tokens that are most frequent by now. Only with a vocabulary of its own."""
        assert self._vocabulary is not None
        self.output.rewrite(*self._chosen(self._vocabulary, self._target))

    def features(self, aux_hidden_states: Tensor) -> Tensor:
        return rms_norm(aux_hidden_states, self._target.final_norm, self._target.spec.rms_eps)

    def enter(
        self, tokens: Tensor, hidden: Tensor, *, row_ids: Tensor | None = None, positions: Tensor | None = None,
        images: ImageInputs | None = None,
    ) -> tuple[Tensor, Tensor]:
        joined = hidden.new_empty(hidden.shape[0], 2 * hidden.shape[1])
        eagle_head_input(
            tokens, hidden, self._target.embedding, self._embedding_norm, self._hidden_norm, self._eps, out=joined,
            row_ids=row_ids, positions=positions,
        )
        put_images(images, self._embedding_norm, self._eps, joined[:, : hidden.shape[1]])
        stream = self._fc(joined, None)
        return rms_norm(stream, self._input_norm, self._eps), stream


def products(spec: MtpSpec) -> list[TunedProduct]:
    """The matrix products that drafting may use besides the output matrix: with R * S tokens fc, qkv and K/V, with R tokens the
    others."""
    return gemm_products([*spec.join.gemms(1), *layer_gemms(spec.layer)], spec.join.hidden_size)


def open_mtp(files: ModelFiles, spec: MtpSpec) -> MtpSpec:
    """The MTP layer in the files of a model, or of a folder that has nothing else, checked by the headers of the files.

    Products that are stored unquantised are plain, whatever the model's quantization_config says of them.
    Raises CheckpointError for tensors of wrong names, shapes or dtypes.
    """
    stored = tensors_of(spec, files.where, stored_tensors(files))
    spec = replace(spec, formats=formats_as_stored(spec, stored))
    check_tensors(files.where, spec, stored)
    return spec


def load_mtp(folder: Path, shape: MtpShape, *, dtype: torch.dtype, device: torch.device) -> Mtp:
    """Read the MTP layer that `open_mtp` has checked, in a folder, for a target that computes in `dtype`.

    Raises CheckpointError as `Checkpoint`, and if a file was changed meanwhile.
    """
    with Checkpoint(folder, shape.mtp, dtype=dtype, device=device) as weights:
        found = _build(shape, weights)
        weights.check_unchanged()
    return found


def dummy_mtp(shape: MtpShape, *, dtype: torch.dtype, device: torch.device) -> Mtp:
    """Random weights of the right shapes, the same in every run on one kind of device."""
    return _build(shape, DummyWeights(shape.mtp, dtype=dtype, device=device))


def _build(shape: MtpShape, weights: Weights) -> Mtp:
    spec = shape.mtp
    around, inside = (LayerWeights(weights, spec.formats, prefix) for prefix in (spec.prefix, spec.layer_prefix))
    names = (spec.join.embedding_norm, spec.join.hidden_norm, spec.join.out_norm)
    fc, norms = around.product(spec.join.product), {name: around.vector(f"{name}.weight") for name in names}
    return Mtp(shape, fc, norms, spec.layer.build(inside))
