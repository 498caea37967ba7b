"""The target model: one forward pass over a flat batch of tokens, K/V in pages. T tokens, H hidden, V vocabulary, L layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch
from batchspec.batch.images import ImageEncoder
from batchspec.cache.pages import KVCache
from batchspec.checkpoint.weight_sums import WeightSums
from batchspec.distributed.collectives import Collectives
from batchspec.kernels.common.dry_run import is_dry
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.model.decoder import LayerWeights, ResidualStream
from batchspec.model.layers.attention.kv_scales import scales_of_part
from batchspec.model.layers.kind import Inputs
from batchspec.model.layers.passes import Pass
from batchspec.model.lora import Adapter, adapted
from batchspec.model.lora_products import AdapterSource, LoraStacks
from batchspec.model.output_head import Allowed, OutputHead, output_head
from batchspec.model.quant.base import Weights
from batchspec.model.rewrite import Named, rewrite
from batchspec.model.spec import EMBEDDING, LABEL_SCORES, MODEL_PREFIX, OUTPUT, ModelSpec, layer_prefix
from batchspec.model.vision.of_ranks import EncoderOfRanks
from batchspec.model.vision.spec import VisionSpec
from batchspec.model.vocabulary import gather_logits, greedy_of_ranks
from batchspec.model.weights import Checkpoint, DummyWeights


class Target:
    """A decoder of any family (`batchspec.model.families`) on one device."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, device: torch.device, ranks: Collectives | None = None,
        lora: LoraStacks | None = None,
    ) -> None:
        """
        ranks  set for a model that several processes compute, each with the spec of its part and its parts of the weights
        lora   the adapters of spec.lora
        """
        assert (ranks is None) == (spec.whole is None), spec.shard
        assert spec.lora == (None if lora is None else lora.shape)
        self.spec, self.device, self.ranks = spec, device, ranks
        self._embedding = weights.tensor(EMBEDDING)
        self.dtype = self._embedding.dtype
        self._lora = lora
        self._layers = [layer.build(self._layer_weights(weights, i)) for i, layer in enumerate(spec.layers)]
        own = spec.layer_inputs
        self._layer_inputs = None if own is None else own.build(LayerWeights(weights, spec.formats, MODEL_PREFIX, lora))
        self._norm = weights.tensor(spec.final_norm)
        self._head = self._output_head(self._output_matrix(weights))
        self._label_scores = weights.tensor(LABEL_SCORES) if spec.labels else None
        mixers = dict.fromkeys(mixer for _, mixer in spec.mixers)
        self._tables = {key: table.to(device) for mixer in mixers for key, table in mixer.tables().items()}
        self.kv_scales: tuple[Tensor, ...] | None = None
        """For each layer that keeps K and V, fp32 [2 (K, V), KVH] scales of an e4m3 cache, if spec.fp8_kv (`kv_scales.py`), on a
        rank those of its heads. Set before an engine is made: caches hold them."""
        self.all_kv_scales: Tensor | None = None
        """The same for all heads of the model, on the CPU, as `KVScales.values`."""
        self.weight_sums: WeightSums | None = None
        """Of the files that the weights came from, where `load` was asked for them."""
        self.image_encoder: ImageEncoder | None = None
        """What encodes images, if spec.vision: `load` sets it."""
        self._has_experts, self._last_kept = spec.experts is not None, spec.last_kept
        self._num_settled = len(spec.vision.deepstack) if spec.ordered and spec.vision is not None else 0
        """After so many layers the stream is summed in passes without images too: rows of images are added to such a sum."""
        self._first_live_slot = torch.ones(1, dtype=torch.int64, device=device)  # on the device: captured rounds read it
        scale = spec.embedding_scale
        self._embedding_scale = None if scale is None else float(torch.tensor(scale, dtype=self.dtype))

    @classmethod
    def load(
        cls, folder: Path, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, dummy: bool = False,
        ranks: Collectives | None = None, adapter: Adapter | None = None, adapters: AdapterSource | None = None,
        summed: bool = False,
    ) -> Target:
        """Read the folder's safetensors, merged with an adapter if there is one; with `dummy` make random weights instead.

        adapters  those of spec.lora
        summed    compute `weight_sums` too, of the files before an adapter is merged
        Raises CheckpointError as the readers of checkpoint and adapters do, and if a file was changed meanwhile.
        """
        lora = None if adapters is None else adapters.load(spec, dtype=dtype, device=device)
        if dummy:
            target = cls(spec, DummyWeights(spec, dtype=dtype, device=device), device, ranks, lora)
            if spec.vision is not None:
                target._use_vision(spec.vision, DummyWeights(spec.vision, dtype=dtype, device=device))
            return target
        with Checkpoint(folder, spec, dtype=dtype, device=device, summed=summed) as weights:
            target = cls(spec, adapted(weights, adapter, spec), device, ranks, lora)
            if summed:
                target.weight_sums = weights.sums()
            if spec.vision is not None:
                target._open_vision(folder, spec.vision, summed=summed)
            weights.check_unchanged()
            return target

    def _open_vision(self, folder: Path, spec: VisionSpec, *, summed: bool) -> None:
        """Load the vision encoder. summed: add its sums to `weight_sums`."""
        with Checkpoint(folder, spec, dtype=self.dtype, device=self.device, summed=summed) as weights:
            self._use_vision(spec, weights)
            if summed and self.weight_sums is not None:
                own = {f"visual.{name}": text for name, text in weights.sums().tensors.items()}
                self.weight_sums = replace(self.weight_sums, tensors={**self.weight_sums.tensors, **own})

    def _use_vision(self, spec: VisionSpec, weights: Weights) -> None:
        own = spec.build(weights)
        self.image_encoder = own if self.ranks is None else EncoderOfRanks(own, spec, self.ranks, self.dtype, self.device)

    def _layer_weights(self, weights: Weights, index: int) -> LayerWeights:
        return LayerWeights(weights, self.spec.formats, layer_prefix(index), self._lora)

    @torch.no_grad()
    def rewrite(self, weights: Weights) -> None:
        """Replace all weights in place, a layer at a time, by others of the same shapes and formats. No K or V may be used after
        it.

        Raises CheckpointError if more than values differs; some layers may have been replaced by then.
        """
        rewrite(self._embedding, weights.tensor(EMBEDDING), "the embedding")
        for i, (spec, layer) in enumerate(zip(self.spec.layers, self._layers, strict=True)):
            source = Named(self._layer_weights(weights, i), layer_prefix(i))
            rewrite(layer, spec.build(source), f"a part of {layer_prefix(i).rstrip('.')}", source)
        if self.spec.layer_inputs is not None:
            inputs = self.spec.layer_inputs.build(LayerWeights(weights, self.spec.formats, MODEL_PREFIX, self._lora))
            rewrite(self._layer_inputs, inputs, "the inputs of layers")
        rewrite(self._norm, weights.tensor(self.spec.final_norm), "the final norm")
        rewrite(self._head, self._output_head(self._output_matrix(weights)), "lm_head")
        if self._label_scores is not None:
            rewrite(self._label_scores, weights.tensor(LABEL_SCORES), "the score matrix")

    def use_kv_scales(self, values: Tensor) -> None:
        """Set the scales, `KVScales.values` for all heads of the model, or overwrite their values in place, where caches read
        them."""
        self.all_kv_scales = values.cpu()
        own = scales_of_part(values, self.spec)
        if self.kv_scales is None:
            self.kv_scales = tuple(layer.to(self.device).contiguous() for layer in own)
        else:
            for kept, layer in zip(self.kv_scales, own, strict=True):
                kept.copy_(layer)

    def _output_matrix(self, weights: Weights) -> Tensor:
        """[V, H]; of a model without one the embedding, so that the rest of a round has its shapes: `logits` refuses it."""
        return self._embedding[self.spec.vocab_part] if self.spec.tie else weights.tensor(OUTPUT)

    def _output_head(self, weight: Tensor) -> OutputHead:
        return output_head(weight, ordered=self.spec.ordered, scaling=self.spec.logits_scaling, cap=self.spec.logit_cap)

    def embedded(self, token_ids: Tensor) -> Tensor:
        """What enters the first layer for tokens int32 [T]: [T, H]."""
        rows = self._embedding.index_select(0, token_ids)
        return rows if self._embedding_scale is None else rows.mul_(self._embedding_scale)

    @property
    def embedding(self) -> Tensor:
        """[V, H] token embeddings, for a drafter without its own."""
        return self._embedding

    @property
    def final_norm(self) -> Tensor:
        """[H] weight of the norm before the logits."""
        return self._norm

    def pass_sizes(self, most: int) -> list[int]:
        """Numbers of tokens of a pass, up to `most`, from which on it launches other kernels, besides powers of two."""
        return sorted({size for layer in self._layers for size in layer.pass_sizes(most)})

    def experts_read(self) -> Tensor | None:
        """int32 [layers with experts]: number of experts that had tokens in the latest forward pass; None without experts. A
        copy."""
        found = [layer.num_experts_read for layer in self._layers if layer.num_experts_read is not None]
        return torch.cat(found) if found else None

    @torch.inference_mode()
    def forward(
        self,
        batch: FlatBatch,
        cache: KVCache,
        aux_layer_ids: tuple[int, ...] = (),
        *,
        ends_only: bool = False,
        kv_only: bool = False,
        window: int | None = None,
        sink: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Run T tokens of R rows, writing their K/V at batch.slot_mapping in layers 0..L-1 of the cache.

        aux_layer_ids  boundaries 0..L of the residual stream, before any norm: 0 is the embedding, i the input of layer i
        ends_only      compute only each row's last token to the end; for other tokens the last layer that keeps K and V writes
                       them only. No row is empty
        kv_only        stop after the last K/V write; the returned hidden states are undefined
        window         every layer reads only its newest `window` keys and the first `sink` ones; smaller own windows apply too
        Returns hidden [T, H], or [R, H] with ends_only, after the final norm, ready for `logits`, and the auxiliary
        hidden states [T, len(aux_layer_ids) * H], or None without any. Raises ValueError for ids that are not distinct
        boundaries.
        """
        if len(set(aux_layer_ids)) < len(aux_layer_ids) or not all(0 <= i <= self.spec.num_layers for i in aux_layer_ids):
            raise ValueError(f"aux_layer_ids {aux_layer_ids} must be different boundaries in 0 .. {self.spec.num_layers}")
        embedded, images = self.embedded(batch.token_ids), batch.images
        if images is not None:
            embedded.index_copy_(0, images.places, images.rows[:, 0])
        num_added = 0 if images is None else images.rows.shape[1] - 1  # layers after which images add to the stream
        lora, last, kept = self._lora_tokens(batch), len(self._layers) - 1, self._last_kept
        layer_inputs = None if self._layer_inputs is None else self._layer_inputs(batch.token_ids, embedded, lora, images)
        stream = ResidualStream(embedded, self._live(batch), self.ranks, layer_inputs)
        aux = self._aux_buffer(stream.residual, aux_layer_ids)
        pass_of = partial(Pass, tables=self._tables, dtype=self.dtype, ranks=self.ranks, window=window, sink=sink)
        inputs = self._inputs(pass_of(batch, lora=lora), cache)
        places = batch.cu_seqlens_q[1:] - 1 if ends_only else None
        cut = max((kept, num_added, *aux_layer_ids))  # the layer in which tokens are left out
        for i in self._one_of_each_kind(aux_layer_ids, cut) if is_dry() else range(last + 1):
            layer, stream.layer = self._layers[i], i
            begun = layer.begin(stream, inputs[i].begin, _aux_at(aux, aux_layer_ids, i))
            if kv_only and i == kept:
                cache.fold(batch)
                return stream.residual, None if aux is None else aux.flatten(1)
            if places is not None and i == cut:
                begun = None if begun is None else begun.index_select(0, places)
                stream, ends = stream.select(places), batch.ends(places)
                inputs[i:] = self._inputs(pass_of(ends, lora=self._lora_tokens(ends)), cache, first=i)
            # The final norm accepts the stream in either form: products of the last layer add as if a layer like it followed.
            following = self._layers[min(i + 1, last)]
            layer.finish(begun, stream, inputs[i].finish, add_in_product=following.norms_in_product(stream))
            if images is not None and i < num_added:
                stream.add_rows(images.places, images.rows[:, 1 + i])
            elif i < self._num_settled:
                stream.settle(None)
        cache.fold(batch)
        out = stream.normed(self._norm, self.spec.rms_eps, out_aux=_aux_at(aux, aux_layer_ids, last + 1))
        if places is not None and cut > last:
            out = out.index_select(0, places)
        return out, None if aux is None else aux.flatten(1)

    def _inputs(self, pass_: Pass, cache: KVCache, first: int = 0) -> list[Inputs]:
        """What the layers from `first` on read in a pass."""
        own = zip(self.spec.layers[first:], cache.kept[first:], strict=True)
        return [layer.inputs(pass_, kept) for layer, kept in own]

    def _one_of_each_kind(self, aux_layer_ids: tuple[int, ...], cut: int) -> list[int]:
        """Indices of the first layer of each kind, of the last layer and of `cut`: layers of one kind launch the same kernels."""
        spec, last = self.spec, len(self._layers) - 1
        kinds: dict[object, int] = {}
        for i, layer in enumerate(spec.layers):
            before = None if i == 0 else spec.layers[i - 1]
            kinds.setdefault((layer, before, i in aux_layer_ids), i)
        return sorted({*kinds.values(), last, min(cut, last)})

    def _lora_tokens(self, batch: FlatBatch) -> LoraTokens | None:
        """Which tokens go through which adapter: those of dead rows and padding through none. None in a model without
        adapters."""
        if self._lora is None:
            return None
        assert batch.row_adapters is not None, "a pass of a model with adapters must say which rows have which"
        adapters = batch.row_adapters.index_select(0, batch.row_ids)
        if batch.host is None:
            adapters = adapters * self.live_tokens(batch.slot_mapping)
        return self._lora.tokens(adapters)

    def _live(self, batch: FlatBatch) -> Tensor | None:
        """bool [T] False for tokens of dead rows and padding, whose K/V go to slot 0; None if all results are used."""
        return self.live_tokens(batch.slot_mapping) if self._has_experts and batch.host is None else None

    def live_tokens(self, slot_mapping: Tensor) -> Tensor:
        """bool [T] False for tokens that go through no expert: those of dead rows and padding, whose K/V go to slot 0."""
        return slot_mapping >= self._first_live_slot

    @contextmanager
    def dead_tokens_routed(self) -> Iterator[None]:
        """Within this block tokens of dead rows go through experts and adapters as those of live ones do, so that rounds over
        dead rows can be timed."""
        self._first_live_slot.zero_()
        try:
            yield
        finally:
            self._first_live_slot.fill_(1)

    def _aux_buffer(self, residual: Tensor, aux_layer_ids: tuple[int, ...]) -> Tensor | None:
        """[T, len(aux_layer_ids), H] for the residual stream at these boundaries, or None without any."""
        return residual.new_empty(residual.shape[0], len(aux_layer_ids), residual.shape[1]) if aux_layer_ids else None

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] from `forward` -> fp32 [N, V] (fp64 for an fp64 model); on a rank only the logits of
        `spec.vocab_part`."""
        assert self.spec.has_output, "the model has no output matrix"
        return self._head.logits(hidden)

    @torch.inference_mode()
    def label_scores(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] from `forward` -> fp32 [N, labels] (fp64 for an fp64 model) of a model with `spec.labels`, the same on
        every rank."""
        assert self._label_scores is not None, "the model has an output matrix"
        wide = torch.float64 if self.dtype is torch.float64 else torch.float32
        return hidden.to(wide) @ self._label_scores.to(wide).T

    @torch.inference_mode()
    def all_logits(self, hidden: Tensor) -> Tensor:
        """As `logits`, but [N, V] of the whole vocabulary on every rank, for drafters whose choices need all of them."""
        logits = self.logits(hidden)
        return logits if self.ranks is None else gather_logits(logits, self.spec.vocab_size, self.ranks)

    @torch.inference_mode()
    def greedy_sample(
        self, hidden: Tensor, vocab: int | None = None, *, flag_nonfinite: bool = False, allowed: Allowed | None = None,
        out_confidence: Tensor | None = None,
    ) -> Tensor:
        """int32 [N]: the token of each row's largest logit, the lowest id among equals. On a GPU the logits of a bf16 model are
        not written where one kernel was measured to be faster, unless they are scaled, capped or divided among ranks.

        vocab           choose among the first `vocab` tokens; None: among all
        flag_nonfinite  NO_TOKEN if the logits hold NaN or +inf, or no finite value; otherwise NaN counts as -inf
        allowed         only with `masks_in_product`: the tokens that may be chosen
        out_confidence  int32 [N] of any stride: how sure each choice is, as `argmax` writes it; None: not asked for
        """
        assert self.spec.has_output, "the model has no output matrix"
        if self.ranks is not None:
            return greedy_of_ranks(
                self.logits(hidden), self.spec.vocab_part.start, self.ranks, vocab, flag_nonfinite=flag_nonfinite,
                out_confidence=out_confidence,
            )
        out = torch.empty(hidden.shape[0], dtype=torch.int32, device=hidden.device)
        self._head.greedy(
            hidden, out_ids=out, vocab=vocab, flag_nonfinite=flag_nonfinite, allowed=allowed, out_confidence=out_confidence
        )
        return out

    @torch.no_grad()  # not in inference mode: training multiplies by them
    def output_rows(self, ids: Tensor) -> Tensor:
        """[n, H] a copy of the rows of the output matrix for ids int64 [n], on a rank counted from the first of
        `spec.vocab_part`."""
        return self._head.rows(ids).to(self.dtype)

    def masks_in_product(self, hidden: Tensor) -> bool:
        """Whether `greedy_sample` of these rows writes no logits, so that `allowed` must tell it which tokens may be chosen."""
        return self.ranks is None and self._head.masks_in_product(hidden)


def _aux_at(aux_hidden_states: Tensor | None, aux_layer_ids: tuple[int, ...], boundary: int) -> Tensor | None:
    """The buffer [T, H] for the residual stream at this boundary, or None."""
    return (
        None
        if aux_hidden_states is None or boundary not in aux_layer_ids
        else aux_hidden_states[:, aux_layer_ids.index(boundary)]
    )
