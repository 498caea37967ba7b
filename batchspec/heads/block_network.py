"""DSpark heads as trainable networks: many blocks of each row at once, parameters named as in checkpoints.

B rows, L positions (padded at the end), N trained positions, H hidden, W values of the target's hidden states, V vocabulary, V'
draft vocabulary, M blocks of S queries, r rank of the Markov matrices.

    context   c = norm(fc(features)) [B, L, H];  K and V of every layer are products of c
    block     the embeddings of the anchor, the newest token, and of S - 1 masks at the positions after it; its queries attend to
              the context before the anchor and to each other
    draft k   logits = lm_head state[k] + w2 w1[the token before it], which in training is the row's own

    loss = sum of w (0.1 cross entropy + 0.9 d) / sum of w  +  sum of u BCE(odds, accepted) / sum of u

with d = sum |q - p|, p the target's distribution and q the head's, accepted = 1 - d / 2 the chance that a draft drawn from q is
accepted, u = decay^k, and w = u where the target's likeliest token is in the draft vocabulary, else 0 as is accepted.
Source: DSpark (arXiv 2607.05147), whose cross entropy is with the tokens of the data; here it is with the target's distribution.
`batchspec.draft.block_head` computes the same in jobs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchspec.config.train_schema import TrainConfig
from batchspec.draft.block_parts import CONFIDENCE, CONFIDENCE_BIAS, MARKOV, MARKOV_OUT
from batchspec.draft.block_spec import BlockSpec
from batchspec.draft.block_tensors import block_layers
from batchspec.heads.block_attend import BlockAttention, Blocks, blocks_at
from batchspec.heads.draft_network import DraftNetwork
from batchspec.heads.layer import Angles, Layer, Norm, place, rms_norm, rotated
from batchspec.heads.objective import ChosenPositions, SoftCrossEntropy, positions_at_once
from batchspec.heads.teacher import TrainingBatch, on_device
from batchspec.kernels.sampling.top_candidates import top_candidates

DISTANCE_SHARE = 0.9
"""Share of d in the loss of the distributions."""


class BlockNetwork(DraftNetwork):
    """A head with Markov matrices, an estimate of being accepted that reads them, and an lm_head of its own."""

    def __init__(self, spec: BlockSpec, embedding: Tensor) -> None:
        """embedding [V, H]: of the target; not trained. It keeps its device and its dtype when the network is moved."""
        super().__init__(spec.rope, spec.head_dim)
        plain = (spec.markov_rank > 0, spec.confidence == "markov", spec.from_anchor, spec.own_head, not any(spec.windows))
        assert all(plain), "other heads are not trained"
        assert not spec.of_dflash2
        self.spec, self._embedding, hidden = spec, embedding, spec.hidden_size
        self.fc = nn.Linear(len(spec.aux_layer_ids) * hidden, hidden, bias=spec.fc_bias)
        self.hidden_norm, self.norm = Norm(hidden, spec.rms_eps), Norm(hidden, spec.rms_eps)
        self.layers = nn.ModuleDict({str(i): Layer(layer) for i, layer in enumerate(block_layers(spec))})
        self.lm_head = nn.Linear(hidden, spec.draft_vocab_size, bias=False)
        for name, rows in ((MARKOV, spec.vocab_size), (MARKOV_OUT, spec.draft_vocab_size)):
            place(self, name.removesuffix(".weight"), nn.Linear(spec.markov_rank, rows, bias=False))
        place(self, CONFIDENCE.removesuffix(".weight"), nn.Linear(hidden + spec.markov_rank, 1))

    def matrices(self) -> dict[str, Tensor]:
        """fc and the projections of the layers."""
        return {
            name: weight for name, weight in self.named_parameters() if weight.dim() == 2 and name.startswith(("fc.", "layers."))
        }

    def forward(self, batch: TrainingBatch, rows: Tensor, anchors: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The states [M, S, H] of each block's queries after the final norm, and w1 [M, S, r] of the token before each draft.

        rows, anchors  int64 [M] row and position of each anchor, sorted by both
        """
        (num_rows, length), dtype = batch.ids.shape, batch.features.dtype
        blocks = blocks_at(rows, anchors, size, num_rows=num_rows, length=length)
        before = batch.ids[rows.repeat_interleave(size), blocks.positions.clamp_max(length - 1)]
        tokens = torch.full_like(before, self.spec.mask_token_id).view(-1, size)
        tokens[:, 0] = before[::size]
        context, angles = self.hidden_norm(self.fc(batch.features)), self._angles(length + size, batch.features)
        state = F.embedding(tokens.flatten(), self._embedding).to(dtype)
        for layer, causal in zip(self.layers.values(), self.spec.causal, strict=True):
            assert isinstance(layer, Layer)
            state = layer.through(state, self._attention(layer, context, angles, blocks, causal))
        w1 = F.embedding(before, self.get_parameter(MARKOV)).to(dtype)
        return self.norm(state).view(-1, size, state.shape[1]), w1.view(-1, size, w1.shape[1])

    def _attention(self, layer: Layer, context: Tensor, angles: Angles, blocks: Blocks, causal: bool) -> BlockAttention:
        """That of one layer, with its K and V of the context."""
        spec, length = layer.spec.attention, context.shape[1]
        k, v = (
            layer.get_submodule(f"{spec.name}.{part}_proj")(context).unflatten(2, (-1, spec.head_dim)) for part in "kv"
        )
        if spec.qk_norm:
            k = rms_norm(k, layer.get_parameter(f"{spec.name}.{spec.qk_norm_names[1]}.weight"), spec.eps, wide=False)
        cos, sin = angles
        k = rotated(k, (cos[:length], sin[:length]))
        return BlockAttention(blocks, (k, v), angles, spec.head_dim, causal=causal, wide=False)

    def outputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """lm_head [V', H] and w2 [V', r] in `dtype`."""
        return self.lm_head.weight.to(dtype), self.get_parameter(MARKOV_OUT).to(dtype)

    def odds(self, states: Tensor, w1: Tensor) -> Tensor:
        """[M, S] log odds that each draft is accepted, in fp32 or fp64, as jobs compute them."""
        weight, bias = self.get_parameter(CONFIDENCE), self.get_parameter(CONFIDENCE_BIAS)
        return (torch.cat((states, w1), -1).to(weight.dtype) * weight).sum(-1) + bias

    def loss(self, batch: TrainingBatch, config: TrainConfig, step: int) -> tuple[Tensor, Tensor]:
        """Drafts count as right or wrong after the row's own tokens."""
        size, count = config.ahead, len(batch.rows)
        (at,) = on_device(batch.rows.device, drawn_anchors(count, config.anchors, seed=config.seed, step=step))
        learnt = at.unsqueeze(1) + torch.arange(size, device=at.device)
        # Trained positions of a row follow one another: draft k of an anchor learns the k-th after it, if the row has one.
        inside = (learnt < count) & (batch.rows[learnt.clamp_max(count - 1)] == batch.rows[at].unsqueeze(1))
        learnt = learnt.clamp_max(count - 1).flatten()
        states, w1 = self(batch, batch.rows[at], batch.positions[at], size)
        known = batch.known[learnt]
        everywhere = (inside * config.decay ** torch.arange(size, dtype=known.dtype, device=at.device)).flatten()
        weights, distance = everywhere * known, torch.empty_like(known, dtype=torch.promote_types(states.dtype, torch.float32))
        joined = torch.cat((states, w1), -1).flatten(0, 1)
        nats, hits = SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
            joined, torch.cat(self.outputs(joined.dtype), 1), ChosenPositions(batch.probs, learnt), batch.best_ids[learnt],
            weights, DISTANCE_SHARE, distance,
        )
        accepted, odds = known * (1 - distance / 2).clamp(0, 1), self.odds(states, w1).flatten()
        sure = F.binary_cross_entropy_with_logits(odds, accepted.to(odds.dtype), everywhere.to(odds.dtype), reduction="sum")
        right, tried = ((x > 0).view(-1, size).sum(0) for x in (hits, weights))
        return nats / weights.sum().clamp_min(1e-6) + sure / everywhere.sum(), (right / tried.clamp_min(1)).detach()

    def drafts(self, batch: TrainingBatch, draft_len: int) -> Tensor:
        """As in jobs: the best of the candidates by the logits without w2."""
        states, w1 = (x.flatten(0, 1) for x in self(batch, batch.rows, batch.positions + 1, draft_len))
        (lm_head, w2), found = self.outputs(states.dtype), []
        at_once = positions_at_once(len(lm_head))
        for state, before in zip(states.split(at_once), w1.split(at_once), strict=True):
            values, ids = _first(state @ lm_head.t(), min(self.spec.candidates, len(lm_head)))
            _, best = _first(values + (w2[ids] @ before.unsqueeze(2)).squeeze(2), 1)
            found.append(ids.gather(1, best))
        drafts = batch.ids.new_zeros(*batch.ids.shape, draft_len)
        drafts[batch.rows, batch.positions] = torch.cat(found).view(-1, draft_len)
        return drafts


def _first(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest logits of each row and their columns, of equal ones the first, as `draft.markov` chooses them."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    values, ids = logits.new_empty(len(logits), count), logits.new_empty(len(logits), count, dtype=torch.int64)
    top_candidates(logits, count, out_values=values, out_ids=ids)
    return values, ids


def drawn_anchors(count: int, share: float, *, seed: int, step: int) -> npt.NDArray[np.int64]:
    """Ascending indices of the trained positions that are anchors in batch `step`: this share of them, at least one."""
    wanted = max(1, round(share * count))
    return np.sort(np.random.default_rng((seed, 3, step)).choice(count, wanted, replace=False))
