"""The weights of an assistant (`assistant_spec.py`), and its network bound to a target. R rows, H and h' as there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchspec.checkpoint.files import ModelFiles, stored_tensors
from batchspec.draft.assistant_spec import ORDER, AssistantSpec
from batchspec.draft.coupled import Draws
from batchspec.draft.output import DraftOutput
from batchspec.kernels.sampling.argmax import argmax
from batchspec.model.decoder import LayerWeights, ResidualStream
from batchspec.model.fused_experts import tensors_of
from batchspec.model.layers.attention.kv_layout import LayerKV
from batchspec.model.layers.attention.paged import PagedAttend, PagedStore
from batchspec.model.layers.attention.plan import AttentionPlan
from batchspec.model.layers.attention.rope import Rope, rope_frequencies, rope_of
from batchspec.model.layers.attention.rope_config import RopeSpec
from batchspec.model.layers.forward import Product
from batchspec.model.layers.layer import DecoderLayer
from batchspec.model.spec import EMBEDDING, FINAL_NORM, layer_prefix
from batchspec.model.target import Target
from batchspec.model.weight_checks import check_tensors
from batchspec.model.weights import Checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class Assistant:
    """The weights that this process holds."""

    spec: AssistantSpec
    before: Product
    layers: Sequence[DecoderLayer]
    norm: Tensor
    after: Product
    embedding: Tensor
    """[tokens of `spec.vocab_part`, h']"""
    centroids: Product | None = None
    cluster_of: Tensor | None = None
    """int64 [V] the cluster of each token"""


def check_assistant(files: ModelFiles, spec: AssistantSpec) -> None:
    """The headers of the files against the spec. Raises CheckpointError for tensors of wrong names, shapes or dtypes."""
    check_tensors(files.where, spec, tensors_of(spec, files.where, stored_tensors(files)))


def load_assistant(folder: Path, spec: AssistantSpec, *, dtype: torch.dtype, device: torch.device) -> Assistant:
    """Raises CheckpointError as `Checkpoint`, and if a file was changed meanwhile."""
    with Checkpoint(folder, spec, dtype=dtype, device=device) as weights:
        around, ends = LayerWeights(weights, spec.formats, ""), spec.ends
        layers = [layer.build(LayerWeights(weights, spec.formats, layer_prefix(i))) for i, layer in enumerate(spec.layers)]
        clusters: dict[str, Any] = {}
        if ends.num_clusters:
            order, each = weights.stored(ORDER).long(), spec.vocab_size // ends.num_clusters
            cluster_of = torch.empty_like(order)
            cluster_of[order] = torch.arange(len(order), device=device) // each
            clusters = {"centroids": around.product(ends.centroids), "cluster_of": cluster_of}
        found = Assistant(
            spec, around.product(ends.before), layers, weights.tensor(FINAL_NORM), around.product(ends.after),
            weights.tensor(EMBEDDING), **clusters,
        )
        weights.check_unchanged()
    return found


class ClusterOutput(DraftOutput):
    """Drafts tokens of the best clusters alone."""

    def __init__(self, centroids: Product, cluster_of: Tensor, count: int, *args: Any, **options: Any) -> None:
        """count: number of the best clusters"""
        super().__init__(*args, **options)
        self._centroids, self._cluster_of, self._count = centroids, cluster_of, count

    def choose(
        self, normed: Tensor, out_ids: Tensor, draws: Draws | None = None, out_confidence: Tensor | None = None
    ) -> None:
        """As that of any head. The confidence is one among the tokens of these clusters."""
        logits = self.logits(normed)
        if draws is not None:
            draws.choose(logits, out_ids, out_confidence=out_confidence)
        else:
            argmax(logits, out_ids=out_ids, out_confidence=out_confidence)

    def logits(self, normed: Tensor) -> Tensor:
        scores: Tensor = self._centroids(normed, None)
        left_out = torch.ones_like(scores, dtype=torch.bool)
        left_out.scatter_(1, scores.topk(self._count, dim=1).indices, False)
        return super().logits(normed).masked_fill_(left_out.index_select(1, self._cluster_of), -torch.inf)


class BoundAssistant:
    """An assistant and the target whose K and V it reads."""

    def __init__(self, assistant: Assistant, target: Target, *, argmax: bool = True) -> None:
        """argmax: see `DraftOutput`"""
        self._own, self._target = assistant, target
        spec = assistant.spec
        self._ranks = None if spec.whole is None else target.ranks
        self._eps = spec.eps
        self._kinds = [(layer.attention.rotation, layer.attention.head_dim) for layer in spec.layers]
        self._freqs = {kind: rope_frequencies(*kind).to(target.device) for kind in dict.fromkeys(self._kinds)}
        values: dict[str, Any] = {
            "draft_vocab_size": spec.vocab_size, "part": spec.vocab_part, "ranks": self._ranks, "argmax": argmax
        }
        matrix, centroids, cluster_of = assistant.embedding, assistant.centroids, assistant.cluster_of
        if centroids is not None and cluster_of is not None:
            self.output: DraftOutput = ClusterOutput(
                centroids, cluster_of, spec.ends.num_chosen, target, matrix, None, **values
            )
        else:
            self.output = DraftOutput(target, matrix, None, **values)

    def ropes(self, positions: Tensor) -> list[Rope]:
        """Of each layer, for queries at positions int64 [R]."""
        made: dict[tuple[RopeSpec, int], Rope] = {
            kind: rope_of(positions, freqs, kind[0], self._target.dtype) for kind, freqs in self._freqs.items()
        }
        return [made[kind] for kind in self._kinds]

    def step(
        self, tokens: Tensor, hidden: Tensor, ropes: Sequence[Rope], kv: Sequence[LayerKV], plans: Sequence[AttentionPlan],
        slots: Tensor,
    ) -> Tensor:
        """tokens int32 [R] and hidden [R, H] -> the state after the final norm [R, h'].

        ropes, kv, plans  of each layer: of the query, and of the K and V that it reads
        slots             int64 [R]; they are not read, since nothing is stored
        """
        joined = torch.cat((self._target.embedded(tokens), hidden), 1)
        stream = ResidualStream(self._own.before(joined, None), None, self._ranks)
        layers = self._own.layers
        for i, layer in enumerate(layers):
            begun = layer.begin(stream, PagedStore(rope=ropes[i], slot_mapping=slots, kv=kv[i]), None)
            following = layers[min(i + 1, len(layers) - 1)]
            attend = PagedAttend(kv=kv[i], plan=plans[i])
            layer.finish(begun, stream, attend, add_in_product=following.norms_in_product(stream))
        return stream.normed(self._own.norm, self._eps)

    def next_hidden(self, normed: Tensor) -> Tensor:
        """What `step` reads after the token that its result [R, h'] chose: [R, H]."""
        found: Tensor = self._own.after(normed, None)
        return found
