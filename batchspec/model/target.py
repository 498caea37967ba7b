"""The target model: one forward over a flat batch of tokens, K/V in pages. T tokens, H hidden, V vocabulary, L layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch
from batchspec.cache.attention import plan_attention
from batchspec.cache.pages import KVCache
from batchspec.errors import ConfigError
from batchspec.kernels.gemm.lm_head import lm_head
from batchspec.kernels.sampling.argmax import argmax
from batchspec.model.fused import add_norm, rms_norm
from batchspec.model.layers import DecoderLayer, Linear
from batchspec.model.quant.base import Weights
from batchspec.model.rope import rope_frequencies, rope_of
from batchspec.model.spec import ModelSpec
from batchspec.model.tuning import best
from batchspec.model.weights import Checkpoint, DummyWeights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def resolve_dtype(name: str, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """model.dtype -> the dtype to compute in. `auto`: the checkpoint's, but fp32 on a CPU without fast bf16 products.

    Raises ConfigError where the checkpoint's own dtype is fp16, which is not built, and none is named.
    """
    if name != "auto":
        return DTYPES[name]
    if spec.dtype not in DTYPES:
        raise ConfigError(f"model.dtype=auto: the checkpoint is {spec.dtype}, which is not built; set bfloat16 or float32")
    dtype = DTYPES[spec.dtype]
    slow = device.type == "cpu" and not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return torch.float32 if dtype is torch.bfloat16 and slow else dtype


class Target:
    """A Llama-like decoder (Llama, SmolLM2, Qwen2, Qwen3, Mistral) on one device."""

    def __init__(self, spec: ModelSpec, weights: Weights, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self._embedding = weights.tensor("model.embed_tokens.weight")
        self.dtype = self._embedding.dtype
        self._layers = [DecoderLayer(spec, weights, i) for i in range(spec.num_layers)]
        self._norm = weights.tensor("model.norm.weight")
        head = self._embedding if spec.tie else weights.tensor("lm_head.weight")
        # Logits are reduced and kept in fp32: rounded to bf16 they would tie, and ties fall differently in other batch shapes.
        self._head_dtype = torch.float64 if self.dtype is torch.float64 else torch.float32
        # A GPU multiplies bf16 into fp32 itself; elsewhere the head is kept in the dtype of the logits.
        self._narrow_head = head if head.is_cuda and head.dtype is torch.bfloat16 else None
        self._head = Linear(head.to(self._head_dtype)) if self._narrow_head is None else None
        self._freqs = rope_frequencies(spec.rope, spec.head_dim).to(device)

    @classmethod
    def load(cls, folder: Path, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, dummy: bool = False) -> Target:
        """Read the folder's safetensors, or with `dummy` make noise of their shapes. Raises CheckpointError as those do."""
        if dummy:
            return cls(spec, DummyWeights(spec, dtype=dtype, device=device), device)
        with Checkpoint(folder, spec, dtype=dtype, device=device) as weights:
            return cls(spec, weights, device)

    @property
    def embedding(self) -> Tensor:
        """[V, H] token embeddings, for a drafter without its own."""
        return self._embedding

    @property
    def final_norm(self) -> Tensor:
        """[H] weight of the norm before the logits."""
        return self._norm

    @torch.inference_mode()
    def forward(
        self,
        batch: FlatBatch,
        cache: KVCache,
        aux_layer_ids: tuple[int, ...] = (),
        *,
        ends_only: bool = False,
        keys_only: bool = False,
        window: int | None = None,
        sink: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Run T tokens of R rows, writing their K/V to batch.slots of layers 0..L-1 of the cache.

        aux_layer_ids  boundaries 0..L of the residual stream, before any norm: 0 is the embedding, i what enters layer i
        ends_only  only each row's last place is asked for: of the others the last layer makes no more than K/V. No row is empty
        keys_only  nothing but K/V is asked for: the last layer stops there, and what is returned means nothing
        window     newest keys that any layer reads, beside the first `sink` ones; layers with a smaller window keep theirs
        Returns hidden [T, H], or [R, H] with ends_only, behind the final norm, ready for `logits`, and the auxiliary
        hidden states [T, len(aux_layer_ids) * H], or None without any. Raises ValueError for ids that are no different
        boundaries.
        """
        if len(set(aux_layer_ids)) < len(aux_layer_ids) or not all(0 <= i <= self.spec.num_layers for i in aux_layer_ids):
            raise ValueError(f"aux_layer_ids {aux_layer_ids} must be different boundaries in 0 .. {self.spec.num_layers}")
        residual = self._embedding.index_select(0, batch.token_ids)
        rope = rope_of(batch.positions, self._freqs, self.spec.rope.attention_factor, self.dtype)
        batches = [batch.of_group(group) for group in range(cache.groups.num_groups)]
        # Layers with the same window are of one group, and a plan fits any of them.
        any_layer = {own: i for i, own in enumerate(self.spec.windows)}
        group_of = cache.groups.target_layers
        ranges = {own: _narrowed(own, window, sink) for own in any_layer}
        plans = {
            own: plan_attention(batches[group_of[i]], cache.layer(i), num_heads=self.spec.num_heads, **ranges[own])
            for own, i in any_layer.items()
        }
        aux_hidden_states = (
            residual.new_empty(residual.shape[0], len(aux_layer_ids), residual.shape[1]) if aux_layer_ids else None
        )
        hidden: Tensor | None = None
        last = len(self._layers) - 1
        places = batch.cu_seqlens_q[1:] - 1 if ends_only else batch.cu_seqlens_q
        for i, layer in enumerate(self._layers):
            kv, plan, own_batch = cache.layer(i), plans[layer.window], batches[group_of[i]]
            q = layer.queries(hidden, residual, rope, kv, own_batch.slot_mapping, _aux_at(aux_hidden_states, aux_layer_ids, i))
            if keys_only and i == last:
                return residual, aux_hidden_states
            if ends_only and i == last and last + 1 not in aux_layer_ids:
                q, residual = q.index_select(0, places), residual.index_select(0, places)
                plan = plan_attention(_ends(own_batch, places), kv, num_heads=self.spec.num_heads, **ranges[layer.window])
            hidden = layer.finish(q, residual, kv, plan)
        out_aux = _aux_at(aux_hidden_states, aux_layer_ids, last + 1)
        if hidden is not None:
            out = add_norm(hidden, residual, self._norm, self.spec.rms_eps, out_aux)
        else:
            out = rms_norm(residual, self._norm, self.spec.rms_eps)
            if out_aux is not None:
                out_aux.copy_(residual)
        if ends_only and last + 1 in aux_layer_ids:
            out = out.index_select(0, places)
        return out, None if aux_hidden_states is None else aux_hidden_states.flatten(1)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] of `forward` -> fp32 [N, V] (fp64 for an fp64 model)."""
        if self._head is None:
            assert self._narrow_head is not None
            return torch.mm(hidden, self._narrow_head.t(), out_dtype=torch.float32)
        return self._head(hidden.to(self._head_dtype))

    @torch.inference_mode()
    def greedy_sample(self, hidden: Tensor, vocab: int | None = None, *, flag_nonfinite: bool = False) -> Tensor:
        """int32 [N]: the token of each row's largest logit, the lowest id of equals. On a GPU the logits are not written out.

        vocab           of the first so many tokens, None: of all
        flag_nonfinite  NO_TOKEN where the logits hold NaN or +inf, or no finite value; else NaN counts as -inf
        """
        out = torch.empty(hidden.shape[0], dtype=torch.int32, device=hidden.device)
        tile = None
        if self._narrow_head is not None:
            tile = best("lm_head", hidden.shape[0], self._narrow_head.shape[0], self._narrow_head.shape[1], hidden.device)
        if tile is None:
            argmax(self.logits(hidden), out_ids=out, vocab=vocab, flag_nonfinite=flag_nonfinite)
        else:
            assert self._narrow_head is not None
            lm_head(hidden, self._narrow_head, out_ids=out, tile=tile, vocab=vocab, flag_nonfinite=flag_nonfinite)
        return out


class _Range(TypedDict):
    window: int | None
    sink: int


def _narrowed(own: int | None, window: int | None, sink: int) -> _Range:
    """What a layer with its own window reads under one that is asked for."""
    if window is None or (own is not None and own <= window):
        return {"window": own, "sink": 0}
    return {"window": window, "sink": sink if own is None else 0}


def _ends(batch: FlatBatch, places: Tensor) -> FlatBatch:
    """The last place of each row, which sees all of the row's keys."""
    count = torch.arange(len(places) + 1, dtype=torch.int32, device=places.device)
    return replace(
        batch,
        token_ids=batch.token_ids.index_select(0, places),
        row_ids=count[:-1],
        positions=batch.positions.index_select(0, places),
        slot_mapping=batch.slot_mapping.index_select(0, places),
        cu_seqlens_q=count,
        max_q=1,
        host=None,
    )


def _aux_at(aux_hidden_states: Tensor | None, aux_layer_ids: tuple[int, ...], boundary: int) -> Tensor | None:
    """Where the residual stream at this boundary goes, [T, H], or None."""
    return (
        None
        if aux_hidden_states is None or boundary not in aux_layer_ids
        else aux_hidden_states[:, aux_layer_ids.index(boundary)]
    )
