"""Distils a Llama into a recurrent model of `tests.heads.recurrent_conversion` for some minutes: both are transformers'
own models.

At first each mixer learns alone: it reads what the Llama's layer reads, and its output should be that of the Llama's attention.
Then all weights but the embedding learn together: KL(Llama || recurrent) of the next token, and for a while the distance of the
hidden states after each layer. The clock ends it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from batchspec.heads.data import Numbers
from tests.heads.recurrent_conversion import convolution, delta_rule

ALIGNED, NEARER = 0.3, 0.65
"""The shares of the time after which all weights learn together, and after which hidden states are no longer compared."""
PART = 4096
"""Number of positions whose logits are in memory at once."""
MULTIPLE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    seconds: float = math.inf
    steps: float = math.inf
    """Batches, which end it too."""
    tokens: int = 16_384
    """Of a batch, padding included. On a GPU 16,384 need about 50 GB."""
    max_len: int = 384
    held_out: int = 192
    lr: float = 3e-3
    """Highest, of the mixers while each learns alone; then half of it for them and a quarter for the rest of the layers."""
    seed: int = 0


def read_texts(folder: Path, max_len: int) -> tuple[list[Numbers], list[Numbers]]:
    """Prompts with completions of a finished job, cut; the last 3 % of the prompts are held out."""
    found = pl.read_parquet(folder / "data" / "*.parquet").filter(pl.col("status").is_in(["ok", "truncated"])).sort("row_index")
    rows = [
        (row, np.array([*prompt, *answer][:max_len]))
        for row, prompt, answer in found.select("row_index", "prompt_ids", "token_ids").iter_rows()
    ]
    last = 0.97 * max(row for row, _ in rows)
    return [ids for row, ids in rows if row < last], [ids for row, ids in rows if row >= last]


def padded(rows: Sequence[Numbers], device: torch.device) -> tuple[Tensor, Tensor]:
    """ids [B, L], zero after a row's end, and the tokens that are real, bool [B, L]. L is a multiple of 64."""
    lengths = np.array([len(row) for row in rows])
    ids = np.zeros((len(rows), -(-lengths.max() // MULTIPLE) * MULTIPLE), dtype=np.int64)
    for line, row in zip(ids, rows, strict=True):
        line[: len(row)] = row
    real = torch.from_numpy(np.arange(ids.shape[1]) < lengths[:, None])
    return torch.from_numpy(ids).to(device), real.to(device)


def batches(rows: Sequence[Numbers], tokens: int, rng: np.random.Generator) -> Iterator[list[Numbers]]:
    """Without end; rows of like length together."""
    while True:
        order = rng.permutation(len(rows))
        for pool in np.array_split(order, max(1, len(rows) // 2048)):
            found, batch = list[list[Numbers]](), list[Numbers]()
            for row in sorted((rows[i] for i in pool), key=len):
                if batch and (len(batch) + 1) * -(-len(row) // MULTIPLE) * MULTIPLE > tokens:
                    found.append(batch)
                    batch = []
                batch.append(row)
            found.append(batch)
            yield from (found[i] for i in rng.permutation(len(found)))


@contextmanager
def quick_layers() -> Iterator[None]:
    """transformers' Qwen3.5 computes with `delta_rule` and `convolution` meanwhile."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as module

    own = {"torch_chunk_gated_delta_rule": delta_rule, "causal_conv1d_fn": convolution}
    before = {name: getattr(module, name) for name in own}
    vars(module).update(own)
    try:
        yield
    finally:
        vars(module).update(before)


class Optimisers:
    """Muon for the matrices of the layers, AdamW for their vectors and convolutions; mixers and the rest of a layer apart."""

    def __init__(self, student: Any) -> None:
        named = [(name, weight) for name, weight in student.named_parameters() if weight.requires_grad]
        self.mixers = [weight for name, weight in named if "_attn." in name]
        self.others = [weight for name, weight in named if "_attn." not in name]
        fused = self.mixers[0].is_cuda
        self._parts: list[tuple[torch.optim.Optimizer, bool]] = []
        for weights, of_mixers in ((self.mixers, True), (self.others, False)):
            matrices, vectors = ([one for one in weights if (one.ndim == 2) == turned] for turned in (True, False))
            muon = torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
            adam = torch.optim.AdamW(vectors, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
            self._parts += [(muon, of_mixers), (adam, of_mixers)]

    def step(self, lr_of_mixers: float, lr_of_others: float) -> bool:
        """False if the gradients are not finite: then nothing is changed."""
        used = [weight for weight in (*self.mixers, *self.others) if weight.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(used, 1.0)
        finite = bool(norm.isfinite())
        for part, of_mixers in self._parts:
            lr = lr_of_mixers if of_mixers else lr_of_others
            for group in part.param_groups:
                group["lr"] = lr
            if finite and lr:
                part.step()
            part.zero_grad(set_to_none=True)
        return finite


class Distillation:
    """teacher: a Llama of transformers; student: the recurrent model, fp32 weights; both on one device."""

    def __init__(self, teacher: Any, student: Any, plan: Plan, trained: list[Numbers], held_out: list[Numbers]) -> None:
        self.teacher, self.student, self.plan = teacher.eval().requires_grad_(False), student, plan
        self._device = next(student.parameters()).device
        self._trained, self._held_out = trained, sorted(held_out[: plan.held_out], key=len)
        self._output = teacher.get_output_embeddings().weight
        student.requires_grad_(True)
        student.get_input_embeddings().requires_grad_(False)
        student.get_output_embeddings().requires_grad_(False)
        self.curve = list[dict[str, float]]()

    def run(self) -> dict[str, Any]:
        """Train by the clock; returns the last measurement and the curve."""
        rng, begun, optimisers = np.random.default_rng(self.plan.seed), time.monotonic(), Optimisers(self.student)
        tokens, steps, skipped, losses, measured_at = self.plan.tokens, 0, 0, list[float](), 0.0
        found, _ = batches(self._trained, tokens, rng), self._say(0.0, 0, losses)
        while (share := max((time.monotonic() - begun) / self.plan.seconds, steps / self.plan.steps)) < 1:
            try:
                loss = self._loss(*padded(next(found), self._device), share)
                loss.backward()
                skipped += not optimisers.step(*self._rates(share))
                losses.append(loss.item())
                steps += 1
            except torch.OutOfMemoryError:
                tokens //= 2
                self.student.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()
                found = batches(self._trained, tokens, rng)
                print(f"out of memory: batches of {tokens:,} tokens from now on", flush=True)
            if share - measured_at > 0.15:
                measured_at = share
                self._say(share, steps, losses)
        last = self._say(1.0, steps, losses)
        return {**last, "steps": steps, "skipped": skipped, "tokens_of_a_batch": tokens, "curve": self.curve}

    def _rates(self, share: float) -> tuple[float, float]:
        """Each part begins at its highest rate after a short rise, and falls as a cosine."""
        alone = share < ALIGNED
        own = share / ALIGNED if alone else (share - ALIGNED) / (1 - ALIGNED)
        rate = self.plan.lr * min(1.0, own / 0.03 + 0.01) * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * own)))
        return (rate, 0.0) if alone else (rate / 2, rate / 4)

    def _cast(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._device.type == "cuda")

    def _loss(self, ids: Tensor, real: Tensor, share: float) -> Tensor:
        with torch.no_grad():
            inputs, mixed, last = self._taught(ids)
        with quick_layers(), self._cast():
            return self._alone(inputs, mixed, real) if share < ALIGNED else self._together(ids, real, inputs, last, share)

    def _taught(self, ids: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Of the Llama: the inputs of each layer, the outputs of their attention, the hidden states after the final norm."""
        inputs, mixed, hooks = list[Tensor](), list[Tensor](), []
        for layer in self.teacher.model.layers:
            hooks.append(layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0])))
            hooks.append(layer.self_attn.register_forward_hook(lambda _, given, out: mixed.append(out[0])))
        last = self.teacher.model(input_ids=ids, use_cache=False).last_hidden_state
        for own in hooks:
            own.remove()
        return inputs, mixed, last

    def _alone(self, inputs: Sequence[Tensor], mixed: Sequence[Tensor], real: Tensor) -> Tensor:
        model = self.student.model
        places = torch.arange(real.shape[1], device=real.device).expand(3, 1, -1)
        rotations = model.rotary_emb(inputs[0].float(), places)
        losses = list[Tensor]()
        for layer, given, wanted in zip(model.layers, inputs, mixed, strict=True):
            x = layer.input_layernorm(given.float())
            if hasattr(layer, "linear_attn"):
                out = layer.linear_attn(x)
            else:
                out = layer.self_attn(x, position_embeddings=rotations, attention_mask=None)[0]
            losses.append(_distance(out, wanted, wanted, real))
        return torch.stack(losses).mean()

    def _together(self, ids: Tensor, real: Tensor, inputs: Sequence[Tensor], last: Tensor, share: float) -> Tensor:
        own, hooks = list[Tensor](), []
        for layer in self.student.model.layers[1:]:
            hooks.append(layer.register_forward_pre_hook(lambda _, given: own.append(given[0])))
        hidden = self.student.model(input_ids=ids, use_cache=False).last_hidden_state
        for hook in hooks:
            hook.remove()
        loss = self._divergence(hidden[real], last[real])[0].sum() / real.sum()
        if share < NEARER:
            weight = 2 * (NEARER - share) / (NEARER - ALIGNED)
            terms = [_distance(x, y, y, real) for x, y in zip(own, inputs[1:], strict=True)]
            loss = loss + weight * torch.stack(terms).mean()
        return loss

    def _divergence(self, hidden: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """KL(Llama || recurrent) [n] and whether the likeliest tokens are equal [n], of states [n, H] after the final norms."""

        def part(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            own, right = F.linear(x, self._output.to(x.dtype)).float(), F.linear(y, self._output.to(y.dtype)).float()
            log = right.log_softmax(-1)
            return (log.exp() * (log - own.log_softmax(-1))).sum(-1), own.argmax(-1) == right.argmax(-1)

        pairs = zip(hidden.split(PART), wanted.split(PART), strict=True)
        parts = [checkpoint(part, x, y, use_reentrant=False) if x.requires_grad else part(x, y) for x, y in pairs]
        return torch.cat([kl for kl, _ in parts]), torch.cat([same for _, same in parts])

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """On the held-out rows: mean KL in nats and the share of positions whose likeliest tokens are equal."""
        divergence, equal, count = 0.0, 0, 0
        size = max(1, self.plan.tokens // self.plan.max_len)
        for at in range(0, len(self._held_out), size):
            ids, real = padded(self._held_out[at : at + size], self._device)
            with quick_layers(), self._cast():
                last = self.teacher.model(input_ids=ids, use_cache=False).last_hidden_state
                hidden = self.student.model(input_ids=ids, use_cache=False).last_hidden_state
                kl, same = self._divergence(hidden[real], last[real])
            divergence, equal, count = divergence + float(kl.sum()), equal + int(same.sum()), count + len(kl)
        return {"kl": round(divergence / max(count, 1), 4), "top1": round(equal / max(count, 1), 4)}

    def _say(self, share: float, steps: int, losses: list[float]) -> dict[str, float]:
        mean = sum(losses[-20:]) / max(1, len(losses[-20:]))
        self.curve.append({"share": round(share, 3), "steps": float(steps), "loss": round(mean, 4), **self.measure()})
        stage = "mixers alone" if share < ALIGNED else "all together"
        held_out = "KL {kl:.4f}, likeliest token equal {top1:.2%}".format_map(self.curve[-1])
        print(f"{share:4.0%} of the time, {steps:,} steps, {stage}: loss {mean:.4f}; held out: {held_out}", flush=True)
        return self.curve[-1]


def _distance(own: Tensor, wanted: Tensor, size: Tensor, real: Tensor) -> Tensor:
    """The mean over tokens of the squared distance, as a share of the squared size of what was wanted."""
    own, wanted, size = own.float(), wanted.float(), size.float().square().sum(-1)
    error = (own - wanted).square().sum(-1) / (size + 0.1 * size[real].mean())
    return error[real].mean()
