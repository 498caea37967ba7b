"""The MTP layer by its definition: one row, no cache, no batch, everything anew at each draft step.

    position p   x = fc(cat(norm(embed(token[p+1])), norm(h[p])))      h is the target's hidden state after its final norm
                 y = a decoder layer on x, RoPE position p; of Qwen its attention has gates, of Nemotron no RoPE
    draft 1      argmax lm_head(norm(y)) at the last position that the target has read
    draft k+1    the same one position on, with embed(draft k) and h = norm(y) of the position before

It reads none of batchspec's code for the layer: tensors by the names of a file, plain torch. RMS norms multiply by 1 + weight,
and those of a GLM or Nemotron are read as the difference of their weights to 1, under the names of Qwen's.
Source: Qwen3-Next, Qwen3.5, GLM and DeepSeek-V3 as in transformers (`modeling_layers.MtpLayer`, models/qwen3_next,
models/qwen3_5, models/glm4_moe, models/glm4_moe_lite, models/glm_ocr, models/deepseek_v3) and in vLLM
(model_executor/models/qwen3_next_mtp.py); Nemotron as in vLLM (nemotron_h_mtp.py), of the blocks of transformers,
models/nemotron_h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.model.target import Target
from tests.helpers.engines import one_pass
from tests.helpers.mtp_checkpoints import NAMES, mtp_prefix, stored, text_config

LAYER = "layers.0."
BLOCK = 128


@dataclass(frozen=True)
class Mtp:
    """A layer, with what it uses of its model."""

    tensors: Mapping[str, Tensor]
    """By their names in the file without `mtp.`."""
    embedding: Tensor
    """[V, H]"""
    output: Tensor
    """[V, H] the target's lm_head"""
    config: Mapping[str, Any]
    """The keys of the language model."""
    window: int | None = None
    """Number of newest keys that it reads besides the first `sink` ones; None: all."""
    sink: int = 0
    vocabulary: Sequence[int] | None = None
    """The tokens that it may draft; None: all."""

    @property
    def eps(self) -> float:
        return float(self.config.get("layer_norm_epsilon") or self.config["rms_norm_eps"])

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        eps = self.eps if eps is None else eps
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (1 + self.tensors[f"{name}.weight"])

    def __call__(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Positions 0 .. n-1: what follows `norm` [..., n, H].

        tokens  [..., n] the token after each position; hidden [..., n, H] of each position
        """
        embedded = self.norm("pre_fc_norm_embedding", F.embedding(tokens, self.embedding))
        x = self.linear("fc", torch.cat((embedded, self.norm("pre_fc_norm_hidden", hidden)), -1))
        attention = self._latent_attention if "kv_lora_rank" in self.config else self._attention
        x = x + self._after("self_attn", attention(self.norm(f"{LAYER}input_layernorm", x)))
        normed = self.norm(f"{LAYER}post_attention_layernorm", x)
        found = self._experts(normed) if f"{LAYER}mlp.gate.weight" in self.tensors else self._mlp(f"{LAYER}mlp", normed)
        return self.norm("norm", x + self._after("mlp", found))

    def _after(self, block: str, x: Tensor) -> Tensor:
        """The norm of the output of a block, of a layer that has one."""
        name = f"{LAYER}post_{block}_layernorm"
        return self.norm(name, x) if f"{name}.weight" in self.tensors else x

    def logits(self, normed: Tensor) -> Tensor:
        """[V] of the token after next, from what `norm` gave for a position, [H]; -inf for those that it may not draft."""
        logits = self.output @ normed
        if self.vocabulary is not None:
            logits[[token for token in range(len(logits)) if token not in self.vocabulary]] = -torch.inf
        return logits

    def _attention(self, x: Tensor) -> Tensor:
        name, dim = f"{LAYER}self_attn", self.config["head_dim"]
        width = self.tensors[f"{name}.q_proj.weight"].shape[0] // self.config["num_attention_heads"]
        q, *gate = self.linear(f"{name}.q_proj", x).unflatten(-1, (-1, width)).split(dim, -1)  # of each head q, then its gate
        k, v = (self.linear(f"{name}.{part}_proj", x).unflatten(-1, (-1, dim)) for part in "kv")
        if f"{name}.q_norm.weight" in self.tensors:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        q, k = self._rotated(q), self._rotated(k)
        k, v = (own.repeat_interleave(q.shape[-2] // own.shape[-2], -2) for own in (k, v))
        attended = self._attended(q, k, v)
        return self.linear(f"{name}.o_proj", (attended * gate[0].sigmoid() if gate else attended).flatten(-2))

    def _latent_attention(self, x: Tensor) -> Tensor:
        """Keys and values of all heads are made of one latent a token. The last numbers of a key, which are those of all heads,
        are rotated, and no others."""
        name, heads, config = f"{LAYER}self_attn", self.config["num_attention_heads"], self.config
        latent, rotated, plain = config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
        if config["q_lora_rank"] is None:
            q = self.linear(f"{name}.q_proj", x)
        else:
            q = self.linear(f"{name}.q_b_proj", self.norm(f"{name}.q_a_layernorm", self.linear(f"{name}.q_a_proj", x), 1e-6))
        q = q.unflatten(-1, (heads, -1))
        c, shared = self.linear(f"{name}.kv_a_proj_with_mqa", x).split((latent, rotated), -1)
        kv = self.linear(f"{name}.kv_b_proj", self.norm(f"{name}.kv_a_layernorm", c, 1e-6)).unflatten(-1, (heads, -1))
        q = torch.cat((q[..., :plain], self._turned(q[..., plain:])), -1)
        k = torch.cat((kv[..., :plain], self._turned(shared[..., None, :]).expand(*kv.shape[:-1], -1)), -1)
        return self.linear(f"{name}.o_proj", self._attended(q, k, kv[..., plain:]).flatten(-2))

    def _turned(self, x: Tensor) -> Tensor:
        """x [..., n, heads, P] at positions 0, 1, ...: numbers 2j and 2j + 1 are a pair, or j and j + P / 2; by angles in
        fp32."""
        size = x.shape[-1]
        frequency = 1 / self.config["rope_parameters"]["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        angle = torch.arange(x.shape[-3], dtype=torch.float32)[:, None, None] * frequency
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1) if self.config["rope_interleave"] else x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k and v [..., n, heads, D] -> [..., n, heads, D of v]; no query attends to a later key."""
        place = torch.arange(q.shape[-3])
        seen = place[None] <= place[:, None]
        if self.window is not None:
            seen &= (place[None] > place[:, None] - self.window) | (place[None] < self.sink)
        scores = torch.einsum("...qhd,...khd->...hqk", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        found: Tensor = torch.einsum("...hqk,...khd->...qhd", weights, v)
        return found

    def _rotated(self, x: Tensor) -> Tensor:
        """x [..., n, heads, D] at positions 0, 1, ...; only the first R numbers of each head are rotated, by angles in fp32."""
        if self.config["model_type"] == "nemotron_h":
            return x
        x, rope = self.halves(x), self.config["rope_parameters"]
        size = int(self.config["head_dim"] * rope.get("partial_rotary_factor", 1.0))
        frequency = 1 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        angle = torch.arange(x.shape[-3], dtype=torch.float32)[:, None, None] * frequency
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        first, second, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def halves(self, x: Tensor) -> Tensor:
        """x with the two numbers of a pair half of the rotated ones apart: those of GLM-OCR are neighbours."""
        return torch.cat(x.unflatten(-1, (-1, 2)).unbind(-1), -1) if self.config["model_type"] == "glm_ocr_text" else x

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        if f"{name}.gate_up_proj.weight" in self.tensors:
            gate, up = self.linear(f"{name}.gate_up_proj", x).chunk(2, -1)
            return self.linear(f"{name}.down_proj", F.silu(gate) * up)
        up = self.linear(f"{name}.up_proj", x)
        has_gate = f"{name}.gate_proj.weight" in self.tensors
        inner = F.silu(self.linear(f"{name}.gate_proj", x)) * up if has_gate else F.relu(up).square()
        return self.linear(f"{name}.down_proj", inner)

    def _experts(self, x: Tensor) -> Tensor:
        """The most probable experts of each token, between two products if they are narrower, and the one that all go through."""
        mlp, logits = f"{LAYER}mlp", self.linear(f"{LAYER}mlp.gate", x)
        found = self._mlp(f"{mlp}.shared_expert", x)
        if f"{mlp}.shared_expert_gate.weight" in self.tensors:
            found = self.linear(f"{mlp}.shared_expert_gate", x).sigmoid() * found
        scores, bias = logits.softmax(-1), self.tensors.get(f"{mlp}.gate.e_score_correction_bias")
        choices = scores
        if bias is not None:
            scores = logits.sigmoid()
            choices = self._of_best_groups(scores + bias)
        ids = choices.topk(self.config["num_experts_per_tok"], -1).indices
        weights = scores.gather(-1, ids)
        if self.config.get("norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * self.config.get("routed_scaling_factor", 1.0)
        narrow = f"{mlp}.fc1_latent_proj.weight" in self.tensors
        of_experts = self.linear(f"{mlp}.fc1_latent_proj", x) if narrow else x
        total = torch.zeros_like(of_experts)
        for expert in range(logits.shape[-1]):
            share = (weights * (ids == expert)).sum(-1, keepdim=True)
            total = total + share * self._mlp(f"{mlp}.experts.{expert}", of_experts)
        return found + (self.linear(f"{mlp}.fc2_latent_proj", total) if narrow else total)

    def _of_best_groups(self, choices: Tensor) -> Tensor:
        """-inf for experts outside the groups whose two best experts have the largest sums."""
        by_group = choices.unflatten(-1, (self.config["n_group"], -1))
        sums = by_group.topk(2, -1).values.sum(-1, keepdim=True)
        least = sums.sort(-2, descending=True).values[..., self.config["topk_group"] - 1, None, :]
        found: Tensor = by_group.masked_fill(sums < least, -torch.inf).flatten(-2)
        return found


def read_mtp(folder: Path, dtype: torch.dtype = torch.float64) -> Mtp:
    """The layer of a checkpoint folder in `dtype`, weights of FP8 multiplied by their scales."""
    tensors, config = _by_expert(_dequantised(dict(stored(folder)))), text_config(folder)
    tensors = {name.replace("model.language_model.", "model."): tensor.to(dtype) for name, tensor in tensors.items()}
    is_nemotron = config["model_type"] == "nemotron_h"
    embedding = tensors["backbone.embeddings.weight" if is_nemotron else "model.embed_tokens.weight"]
    prefix = mtp_prefix(config).replace("model.language_model.", "model.")
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    own = _named_as_qwen(own, NAMES[config["model_type"]]) if config["model_type"] in NAMES else own
    return Mtp(own, embedding, tensors.get("lm_head.weight", embedding), config)


def _named_as_qwen(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """The layer of another family; the copies of embedding and output matrix are left out."""
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if not name.startswith(("embed_tokens.", "shared_head.head.")):
            old, new = next((old, new) for old, new in names.items() if name.startswith(new))
            found[(old + name.removeprefix(new)).removeprefix("mtp.")] = tensor - 1 if "norm" in name else tensor
    return found


def _dequantised(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        scale = tensors.get(f"{name}_scale_inv")
        if scale is not None:
            spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            tensor = tensor.float() * spread[: tensor.shape[0], : tensor.shape[1]]
        found[name] = tensor
    return found


def _by_expert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """experts.gate_up_proj [E, 2 I, H] and experts.down_proj [E, H, I] -> the names of each expert's projections."""
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for i, (gate, up) in enumerate(part.chunk(2) for part in tensor):
                prefix = name.removesuffix("gate_up_proj")
                found |= {f"{prefix}{i}.gate_proj.weight": gate, f"{prefix}{i}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            found |= {f"{name.removesuffix('down_proj')}{i}.down_proj.weight": part for i, part in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def target_hidden(target: Target, ids: Sequence[int]) -> Tensor:
    """[len(ids), H] the target's hidden states after its final norm, computed from the first token in one pass."""
    hidden, _ = one_pass(target, ids)
    return hidden.cpu().clone()


Choose = Callable[[Tensor, Sequence[int]], int]
"""Logits [V] and all tokens of the row before -> the token."""


def most_probable(logits: Tensor, before: Sequence[int]) -> int:
    return int(logits.argmax())


@torch.no_grad()
def reference_drafts(
    mtp: Mtp, ids: Sequence[int], hidden: Tensor, num_drafts: int, choose: Choose = most_probable
) -> list[int]:
    """Drafts after `ids`, whose last token the target has not read. hidden [len(ids) - 1, H] of the tokens before it."""
    tokens, fed = list(ids), hidden
    for _ in range(num_drafts):
        out = mtp(torch.tensor(tokens[1:]), fed)
        tokens.append(choose(mtp.logits(out[-1]), tokens))
        fed = torch.cat((fed, out[-1:]))
    return tokens[len(ids) :]


def forced_steps(mtp: Mtp, row: Tensor, hidden: Tensor, place: int, count: int) -> list[Tensor]:
    """[H] of each of `count` draft steps after a place of a row, whose own tokens are drafted.

    row int64 [n], which goes on for `count` tokens after the place; hidden [n, H]
    """
    fed = hidden[: place + 1]
    for step in range(count):
        fed = torch.cat((fed, mtp(row[1 : place + 2 + step], fed)[-1:]))
    return list(fed[place + 1 :])


class Rows:
    """Drafts after any beginning of rows, each of whose hidden states are computed once."""

    def __init__(self, mtp: Mtp, target: Target, rows: Iterable[Sequence[int]]) -> None:
        self._mtp, self._hidden = mtp, dict[tuple[int, ...], Tensor]()
        for row in sorted(map(tuple, rows), key=len, reverse=True):
            if self._whole(row) is None:
                self._hidden[row] = target_hidden(target, row)

    def _whole(self, beginning: tuple[int, ...]) -> Tensor | None:
        return next((own for row, own in self._hidden.items() if row[: len(beginning)] == beginning), None)

    def drafts(self, beginning: Sequence[int], num_drafts: int, choose: Choose = most_probable) -> list[int]:
        """As `reference_drafts`, after a beginning of one of the rows."""
        hidden = self._whole(tuple(beginning))
        assert hidden is not None, "not the beginning of a row"
        return reference_drafts(self._mtp, beginning, hidden[: len(beginning) - 1], num_drafts, choose)


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a row's rounds draft and accept."""

    drafted: tuple[int, ...]
    """Number of drafts of each round."""
    accepted: tuple[int, ...]
    """Number of accepted ones of each round."""


def predicted_rounds(rows: Rows, prompt: Sequence[int], output: Sequence[int], num_drafts: int) -> Predicted:
    """The rounds of a greedy row that writes `output`, with `num_drafts` drafts a round as long as they fit before its end."""
    drafted, accepted, row, count = list[int](), list[int](), [*prompt, *output], len(prompt) + 1
    while count < len(row):
        drafts = rows.drafts(row[:count], min(num_drafts, len(row) - count - 1))
        agree = [draft == token for draft, token in zip(drafts, row[count:], strict=False)]
        accepted.append(agree.index(False) if False in agree else len(agree))
        drafted.append(len(drafts))
        count += accepted[-1] + 1
    return Predicted(tuple(drafted), tuple(accepted))
