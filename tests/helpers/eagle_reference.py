"""EAGLE-3 by its definition (Li et al. 2025, arXiv 2503.01840): one row, no cache, no batch, everything anew at each draft step.

It reads none of batchspec's head code: tensors by the names of a published checkpoint, plain torch, fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.model.target import Target
from tests.helpers.engines import one_pass


@dataclass(frozen=True)
class Design:
    """What a head is like; the taps are boundaries of the target's residual stream."""

    hidden: int
    target_hidden: int
    vocab: int
    draft_vocab: int | None
    taps: tuple[int, ...]
    layers: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 6
    inner: int = 20
    eps: float = 1e-5
    theta: float = 50.0
    windows: tuple[int | None, ...] = (None,)
    attention_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    mask_id: int | None = None
    """The mask token of a head that drafts in parallel."""


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rope(x: Tensor, theta: float) -> Tensor:
    """x [..., places, heads, D] at positions 0, 1, ..."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-3], dtype=x.dtype)[:, None, None] * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), -1)


def run_head(
    design: Design, tensors: dict[str, Tensor], embedding: Tensor, tokens: Tensor, taps: Tensor, fed: Tensor | None = None,
    *, window: int | None = None, sink: int = 0, target_head: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Places 0 .. m-1: what each feeds to the next draft step [..., m, H], and its logits over the draft vocabulary.

    tokens [..., m] the token after each place; taps the target's features of the first places, fed the hidden states of the
    others (where both are given for training: fed alone).
    """

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def normed(name: str, x: Tensor) -> Tensor:
        return norm(x, tensors[f"{name}.weight"], design.eps)

    if design.norm_before_fc:
        taps = normed("input_norm", taps)
    if design.fc_norm:
        taps = torch.cat([normed(f"fc_norm.{i}", chunk) for i, chunk in enumerate(taps.chunk(len(design.taps), -1))], -1)
    h = linear("fc", taps)
    if fed is not None:
        h = fed if fed.shape[-2] == tokens.shape[-1] else torch.cat((h, fed), -2)
    count = tokens.shape[-1]
    e = F.embedding(tokens, tensors.get("embed_tokens.weight", embedding))
    place = torch.arange(count)
    for i in range(design.layers):
        at = f"layers.{i}."
        if i == 0:
            h_n = normed(f"{at}hidden_norm", h)
            x = torch.cat((normed(f"{at}input_layernorm", e), h_n), -1)
            residual = h_n if design.norm_before_residual else h
        else:
            x = normed(f"{at}input_layernorm", residual)
        q, k, v = (linear(f"{at}self_attn.{n}_proj", x).unflatten(-1, (-1, design.head_dim)) for n in "qkv")
        if design.qk_norm:
            q, k = normed(f"{at}self_attn.q_norm", q), normed(f"{at}self_attn.k_norm", k)
        q, k = rope(q, design.theta), rope(k, design.theta)
        k, v = (t.repeat_interleave(design.heads // design.kv_heads, -2) for t in (k, v))
        seen = place[None] <= place[:, None]
        own = design.windows[i]
        narrow = min((w for w in (own, window) if w is not None), default=None)
        if narrow is not None:
            seen = seen & ((place[None] > place[:, None] - narrow) | (place[None] < sink))
        scores = torch.einsum("...qhd,...khd->...hqk", q, k) * design.head_dim**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        residual = residual + linear(f"{at}self_attn.o_proj", torch.einsum("...hqk,...khd->...qhd", weights, v).flatten(-2))
        x = normed(f"{at}post_attention_layernorm", residual)
        gate, up = linear(f"{at}mlp.gate_proj", x), linear(f"{at}mlp.up_proj", x)
        residual = residual + linear(f"{at}mlp.down_proj", F.silu(gate) * up)
    final = normed("norm", residual)
    logits = final @ tensors["lm_head.weight"].T if target_head is None else final @ target_head.T
    return (final if design.norm_output else residual), logits


def target_taps(target: Target, ids: Sequence[int], taps: tuple[int, ...]) -> Tensor:
    """[len(ids), len(taps) * H] of the residual stream, computed from the first token in one pass."""
    _, found = one_pass(target, ids, taps)
    assert found is not None
    return found.cpu().clone()


def target_head(design: Design, target: Target) -> Tensor | None:
    """The target's lm_head [V, H], if the head has none."""
    if design.draft_vocab is not None:
        return None
    unit = torch.eye(design.hidden, dtype=target.dtype, device=target.device)
    return target.logits(unit).T.cpu().double()


def target_ids(design: Design, tensors: dict[str, Tensor]) -> list[int]:
    """The target's token of each that the head can draft."""
    if design.draft_vocab is None:
        return list(range(design.vocab))
    return (torch.arange(design.draft_vocab) + tensors["d2t"]).tolist()


Choose = Callable[[Tensor], int]
"""Logits over the draft vocabulary -> the place of a token in it."""


def most_probable(logits: Tensor) -> int:
    return int(logits.argmax())


@torch.no_grad()
def reference_parallel_drafts(
    design: Design, tensors: dict[str, Tensor], target: Target, ids: Sequence[int], num_drafts: int,
    *, window: int | None = None, sink: int = 0, choose: Choose = most_probable,
) -> list[int]:
    """Draft tokens after `ids` in one pass: masks replace the tokens that are not known yet, a learned feature their features."""
    assert design.mask_id is not None
    masks = num_drafts - 1
    taps = target_taps(target, ids[:-1], design.taps).double()
    taps = torch.cat((taps, tensors["mask_hidden"].view(1, -1).expand(masks, -1)))
    tokens = torch.tensor([*ids[1:], *[design.mask_id] * masks])
    embedding, head = target.embedding.cpu().double(), target_head(design, target)
    _, logits = run_head(design, tensors, embedding, tokens, taps, window=window, sink=sink, target_head=head)
    drafted = target_ids(design, tensors)
    return [drafted[choose(own)] for own in logits[-num_drafts:]]


@torch.no_grad()
def reference_drafts(
    design: Design, tensors: dict[str, Tensor], target: Target, ids: Sequence[int], num_drafts: int,
    *, window: int | None = None, sink: int = 0, choose: Choose = most_probable,
) -> list[int]:
    """Draft tokens after `ids`, whose last token the target has not read yet."""
    taps = target_taps(target, ids[:-1], design.taps).double()
    embedding, head = target.embedding.cpu().double(), target_head(design, target)
    tokens, fed = list(ids[1:]), torch.empty(0, design.hidden, dtype=torch.float64)
    drafts, drafted = list[int](), target_ids(design, tensors)
    for _ in range(num_drafts):
        out, logits = run_head(
            design, tensors, embedding, torch.tensor(tokens), taps, fed, window=window, sink=sink, target_head=head
        )
        drafts.append(drafted[choose(logits[-1])])
        tokens.append(drafts[-1])
        fed = torch.cat((fed, out[-1:]))
    return drafts


@dataclass(eq=False)
class Node:
    """A node of a tree: its token, the one above it, the path's score, and the states that drafted the tokens above its own."""

    token: int
    above: Node | None
    score: float
    fed: Tensor

    @property
    def path(self) -> list[int]:
        """Tokens from the root's child down to this one."""
        return [] if self.above is None else [*self.above.path, self.token]


@torch.no_grad()
def reference_tree(
    design: Design, tensors: dict[str, Tensor], target: Target, ids: Sequence[int], *, topk: int, depth: int, nodes: int,
    window: int | None = None, sink: int = 0,
) -> list[tuple[int, int]]:
    """(token, number of the node above; 0 is the root, 1 the first here) of the tree after `ids`, every path computed anew."""
    taps = target_taps(target, ids[:-1], design.taps).double()
    embedding, head = target.embedding.cpu().double(), target_head(design, target)

    def children(level: Sequence[Node]) -> list[Node]:
        """For all nodes of a level at once: each is a separate row, with its whole path."""
        tokens = torch.tensor([[*ids[1:], *node.path] for node in level])
        fed = torch.stack([node.fed for node in level])
        features = taps.expand(len(level), -1, -1)
        out, logits = run_head(design, tensors, embedding, tokens, features, fed, window=window, sink=sink, target_head=head)
        likely = logits[:, -1].log_softmax(-1).topk(topk)
        found = []
        for row, node in enumerate(level):
            for choice, value in zip(likely.indices[row].tolist(), likely.values[row].tolist(), strict=True):
                token = choice + (int(tensors["d2t"][choice]) if "d2t" in tensors else 0)
                score = node.score + value
                found.append(Node(token, node, score, torch.cat((node.fed, out[row, -1:]))))
        return found

    grown: list[Node] = []
    level = [Node(-1, None, 0.0, torch.empty(0, design.hidden, dtype=torch.float64))]
    for _ in range(depth):
        below = children(level)
        grown += below
        level = sorted(below, key=lambda node: -node.score)[:topk]
    best = sorted(grown, key=lambda node: -node.score)[:nodes]
    kept = [node for node in grown if any(node is other for other in best)]
    number = {id(node): place for place, node in enumerate(kept, 1)}
    return [(node.token, number.get(id(node.above), 0)) for node in kept]
