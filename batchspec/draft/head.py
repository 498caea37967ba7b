"""The network of an EAGLE-3 head: features in, layers, draft tokens out. T tokens, R rows, H hidden, NH heads of D numbers.

Ranks may compute a head together (`batchspec.draft.shard`); NH is then the number of a rank's heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchspec.cache.attention import AttentionPlan
from batchspec.cache.layout import LayerKV
from batchspec.draft.coupled import Draws
from batchspec.draft.formats import HeadSpec
from batchspec.draft.weights import HIDDEN_NORM, Head, fc_product, head_layers, head_prefix
from batchspec.kernels.drafting.eagle_head_input import eagle_head_input
from batchspec.kernels.gemm.lm_head import lm_head
from batchspec.kernels.gemm.tiles import Tile
from batchspec.kernels.norm_rope.norm import rms_norm as tap_norm
from batchspec.kernels.sampling.argmax import argmax
from batchspec.model.blocks.base import Gemm, GroupedSpec, ProductSpec
from batchspec.model.blocks.forward import GroupedProduct
from batchspec.model.blocks.layer import LayerSpec
from batchspec.model.decoder import PagedAttend, PagedStore, ResidualStream
from batchspec.model.fused import rms_norm
from batchspec.model.products import gemm_products
from batchspec.model.quant.plain import Linear
from batchspec.model.rope import Rope
from batchspec.model.target import Target
from batchspec.model.vocabulary import gather_logits, greedy_of_ranks
from batchspec.tuning.policy import gemm_tile
from batchspec.tuning.table import Product


@dataclass(frozen=True, slots=True)
class Place:
    """Rotations and K/V slots of the tokens of a pass."""

    rope: Rope
    """The RoPE rotations of their positions."""
    slots: Tensor
    """int64 [T] where their K/V are written"""


class _Layer:
    """A decoder layer of the head, and the K and V rows of its first product."""

    def __init__(self, spec: LayerSpec, head: Head, index: int) -> None:
        self._spec, source = spec, _HeadWeights(head.tensors, head_prefix(index))
        self._prefix = head_prefix(index)
        self.decoder = spec.build(source)
        self.attention = self.decoder.attention
        weight, bias = source.fused[spec.attention.qkv]
        self._num_q = spec.attention.inner_size
        self.kv = Linear(weight[self._num_q :], None if bias is None else bias[self._num_q :])
        """On a GPU these are rows of the whole product's weight, not a copy."""
        self.products = [(source.products[product], product) for block in spec.blocks for product in block.products]


class _HeadWeights:
    """A BlockSource: a layer's weights among those of a head, which are not quantised."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        self._tensors, self._prefix = tensors, prefix
        self.fused: dict[ProductSpec, tuple[Tensor, Tensor | None]] = {}
        self.products: dict[ProductSpec, Linear] = {}

    def product(self, spec: ProductSpec) -> Linear:
        self.fused[spec] = _fused(self._tensors, self._prefix, spec)
        self.products[spec] = Linear(*self.fused[spec])
        return self.products[spec]

    def vector(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name]

    def grouped(self, spec: GroupedSpec) -> GroupedProduct:
        raise NotImplementedError  # layers of heads are dense


def _fused(tensors: Mapping[str, Tensor], prefix: str, spec: ProductSpec) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a product."""
    names = [prefix + part.name for part in spec.parts]
    weight = torch.cat([tensors[f"{name}.weight"] for name in names])
    return weight, torch.cat([tensors[f"{name}.bias"] for name in names]) if spec.bias else None


class EagleHead:
    """Weights of a head bound to a target, whose embedding and lm_head it uses if its checkpoint has none."""

    def __init__(self, head: Head, target: Target, *, argmax: bool = True) -> None:
        spec, tensors = head.spec, head.tensors
        self.spec, self._argmax, self.map_ids = spec, argmax, head.map_ids
        self._fc = None if spec.final_hidden else Linear(tensors["fc.weight"], tensors.get("fc.bias"))
        self._input_norm = tensors.get("input_norm.weight")
        self._tap_norms = [tensors[f"fc_norm.{i}.weight"] for i in range(len(spec.aux_layer_ids))] if spec.fc_norm else []
        self._hidden_norm = tensors[HIDDEN_NORM]
        self._norm = tensors["norm.weight"]
        self._layers = [_Layer(layer, head, i) for i, layer in enumerate(head_layers(spec))]
        self._norms = {name: tensor for name, tensor in tensors.items() if "norm" in name}
        own = tensors.get("embed_tokens.weight")
        same = own is not None and own.shape == target.embedding.shape and torch.equal(own, target.embedding)
        self._embedding = target.embedding if own is None or same else own
        self._lm_head = tensors.get("lm_head.weight")
        self._target = target
        self._ranks = None if spec.whole is None else target.ranks
        """The ranks that compute the head together; None: this process computes all of it."""
        # As for the target: logits are in fp32, so that rounding makes no ties. A GPU multiplies bf16 with fp32 results itself.
        self._fp32_out = self._lm_head is not None and self._lm_head.is_cuda and self._lm_head.dtype is torch.bfloat16
        self.logits_dtype = torch.float64 if target.dtype is torch.float64 else torch.float32
        self._scores = None
        if self._lm_head is not None and not self._fp32_out:
            self._scores = Linear(self._lm_head.to(self.logits_dtype))

    def features(self, aux_hidden_states: Tensor) -> Tensor:
        """Aux hidden states [T, W] of the target -> features [T, H]."""
        if self._fc is None:
            return rms_norm(aux_hidden_states, self._target.final_norm, self._target.spec.rms_eps)
        eps = self.spec.rms_eps
        if self._input_norm is not None:
            aux_hidden_states = rms_norm(aux_hidden_states, self._input_norm, eps)
        elif self._tap_norms:
            normed, size = torch.empty_like(aux_hidden_states), self.spec.target_hidden_size
            for tap, out, weight in zip(aux_hidden_states.split(size, 1), normed.split(size, 1), self._tap_norms, strict=True):
                tap_norm(tap, weight, eps, out=out)
            aux_hidden_states = normed
        return self._fc(aux_hidden_states)

    def enter(
        self, tokens: Tensor, hidden: Tensor, *, row_ids: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """tokens int32 [T] and hidden [T, H] -> the input of layer 0 [T, 2H], the embedding first, and the residual stream.

        row_ids, positions  [T]: tokens is [rows, M], and each position reads the token after it in its row
        The residual stream is `hidden` or a view of the input; layers change it in place. Nothing reads the input after layer 0.
        """
        size = self.spec.hidden_size
        normed = hidden.new_empty(hidden.shape[0], 2 * size)
        eagle_head_input(
            tokens, hidden, self._embedding, self._layers[0].attention.norm, self._hidden_norm, self.spec.rms_eps,
            out=normed, row_ids=row_ids, positions=positions,
        )
        return normed, normed[:, size:] if self.spec.norm_before_residual else hidden

    def layer(
        self, index: int, normed: Tensor, residual: Tensor, at: Place, kv: LayerKV, plan: AttentionPlan,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Layer `index` on normed [T, 2H] (layer 0) or [T, H]; writes K/V of all T tokens, adds to residual [T, H] in place.

        positions  int64 [T], if they are later than the plan's
        Returns the residual stream after the next layer's norm, for the last layer after the final norm.
        """
        attend = PagedAttend(kv=kv, plan=plan, positions=positions)
        return self.finish(index, self.queries(index, normed, at, kv), residual, attend)

    def queries(self, index: int, normed: Tensor, at: Place, kv: LayerKV) -> Tensor:
        """The first half of `layer`: q [T, NH, D], and K/V of all T tokens in their pages."""
        return self._layers[index].attention.queries_of(normed, _store(at, kv))

    def keep(self, index: int, normed: Tensor, at: Place, kv: LayerKV) -> None:
        """Write K/V of all T tokens, normed [T, H], and nothing else: for tokens whose hidden states of layer `index` are not
        used."""
        layer = self._layers[index]
        layer.attention.queries_of(normed, _store(at, kv), layer.kv)

    def finish(self, index: int, q: Tensor, residual: Tensor, attend: PagedAttend, out: Tensor | None = None) -> Tensor:
        """The second half of `layer`, from q [T, NH, D]; out [T, H]: the result is written here if it is given."""
        stream = ResidualStream(residual, ranks=self._ranks)
        self._layers[index].decoder.finish(q, stream, attend, add_in_product=False)  # the norm that follows is the head's
        following = self._layers[index + 1].attention.norm if index + 1 < len(self._layers) else self._norm
        return stream.normed(following, self.spec.rms_eps, out=out)

    def choose(self, normed: Tensor, out_ids: Tensor, draws: Draws | None = None) -> None:
        """normed [R, H] after the final norm -> the target id of each row's most probable draft token, int32 [R] of any stride.

        draws  noise and rules that are applied before the choice
        """
        if draws is not None:
            draws.choose(self.logits(normed), out_ids, self.map_ids)
            return
        if self._argmax and self._ranks is not None and self._lm_head is not None:
            ids = greedy_of_ranks(self._own_logits(normed, self._lm_head), self.spec.draft_part.start, self._ranks)
            out_ids.copy_(ids if self.map_ids is None else self.map_ids.index_select(0, ids))
            return
        tile = self._fused_tile(normed) if self._argmax else None
        if tile is not None and self._lm_head is not None:
            lm_head(normed, self._lm_head, out_ids=out_ids, map_ids=self.map_ids, tile=tile)
            return
        logits = self.logits(normed)
        if self._argmax:
            argmax(logits, out_ids=out_ids, map_ids=self.map_ids)
        else:
            ids = torch.softmax(logits, -1).topk(1, dim=-1).indices.squeeze(1)
            out_ids.copy_(ids if self.map_ids is None else self.map_ids[ids])

    def branches(self, normed: Tensor, count: int, draws: Draws | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """normed [N, H] after the final norm -> the most probable draft tokens of each, in descending order.

        Returns their logits [N, count], the log of the sum of all exponentials [N], and their draft ids int64 [N, count].
        """
        logits = self.logits(normed)
        if draws is not None:
            draws.branches(logits, self.map_ids)
        best = logits.topk(count, dim=1)
        return best.values, torch.logsumexp(logits, 1), best.indices

    def _fused_tile(self, normed: Tensor) -> Tile | None:
        """The tile with which lm_head and argmax are one kernel, if that was measured to be faster than two; else None."""
        if self._lm_head is None or not self._fp32_out:
            return None
        vocab, size = self._lm_head.shape
        return gemm_tile("lm_head", normed.shape[0], vocab, size, normed.device)

    def logits(self, normed: Tensor) -> Tensor:
        """fp32 [R, draft vocabulary] (fp64 for an fp64 model)."""
        if self._lm_head is None:
            return self._target.all_logits(normed)
        own = self._own_logits(normed, self._lm_head)
        return own if self._ranks is None else gather_logits(own, self.spec.draft_vocab_size, self._ranks)

    def _own_logits(self, normed: Tensor, lm_head: Tensor) -> Tensor:
        """Logits [R, draft ids of `spec.draft_part`]."""
        if self._scores is None:
            return torch.mm(normed, lm_head.t(), out_dtype=torch.float32)
        return self._scores(normed.to(self.logits_dtype))


def _store(at: Place, kv: LayerKV) -> PagedStore:
    return PagedStore(rope=at.rope, slot_mapping=at.slots, kv=kv)


def products(spec: HeadSpec) -> list[Product]:
    """The matrix products that drafting may use: with R * S tokens fc, qkv and K/V, with R tokens the others."""
    fc = fc_product(spec)
    gemms = [] if fc is None else [Gemm(product=fc, ops=("linear",))]
    for layer in head_layers(spec):
        attention, (_, out), (gate_up, down) = layer.attention, layer.attention.gemms(1), layer.mlp.gemms(1)
        # The head norms the inputs of its layers itself, so no product has a norm before it or adds to the residual stream.
        gemms += [Gemm(product=product, ops=("linear",)) for product in (attention.qkv, attention.kv)]
        gemms += [out, gate_up, replace(down, ops=("linear",))]
    return [*gemm_products(gemms, spec.hidden_size), ("lm_head", spec.draft_vocab_size, spec.hidden_size)]
