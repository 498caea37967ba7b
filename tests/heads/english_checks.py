"""What `tests.heads.english_recurrent check` compares, on the text of a recurrent model with a trained MTP layer.

jobs, killed  tokens of whole jobs, bit for bit, with decode.deterministic: no drafts, lookup, MTP, other slots, after SIGKILL
transformers  greedy tokens in fp32 against transformers' own forward and `generate`
acceptance    of the MTP layer with K = 3 in fp32, by position, against a reference in plain torch
speed         `batchspec bench`: none, lookup and mtp in bf16
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import polars as pl
import torch
from torch import Tensor

from tests.helpers.mtp_definition import LAYER, Mtp, read_mtp

DRAFTS = 3
NEAR = 1e-3
"""Logits that differ by less are a tie: fp32 kernels of two programs round differently."""
SHARD_ROWS = 32
Rows = dict[str, tuple[list[int], list[int]]]
"""Prompt and output tokens by request."""


def forced_drafts(mtp: Mtp, ids: Tensor, hidden: Tensor, count: int) -> Tensor:
    """int64 [n - 1, count]: at position t the drafts of tokens t+2, t+3, .. if the row's own tokens are drafted before each.

    ids int64 [n]; hidden [n, H] after the final norm. Step k of position t attends to K/V of the true hidden states of positions
    0 .. t, and to those of its own steps before
    """
    name, heads = f"{LAYER}self_attn", mtp.config["num_attention_heads"]
    dim, length, group = mtp.config["head_dim"], len(ids) - 1, heads // mtp.config["num_key_value_heads"]
    place, state, found = torch.arange(length, device=ids.device), hidden[:-1], list[Tensor]()
    true: tuple[Tensor, Tensor] | None = None
    own = list[tuple[Tensor, Tensor]]()
    for step in range(count):
        tokens = ids[(place + 1 + step).clamp(max=length)]
        embedded = mtp.norm("pre_fc_norm_embedding", mtp.embedding[tokens])
        x = mtp.linear("fc", torch.cat((embedded, mtp.norm("pre_fc_norm_hidden", state)), -1))
        normed = mtp.norm(f"{LAYER}input_layernorm", x)
        q, gate = mtp.linear(f"{name}.q_proj", normed).unflatten(-1, (heads, -1)).split(dim, -1)
        k, v = (mtp.linear(f"{name}.{part}_proj", normed).unflatten(-1, (-1, dim)) for part in "kv")
        q = _rotated(mtp, mtp.norm(f"{name}.q_norm", q), place + step)
        k = _rotated(mtp, mtp.norm(f"{name}.k_norm", k), place + step).repeat_interleave(group, 1)
        v = v.repeat_interleave(group, 1)
        if true is None:
            true = k, v
        else:
            own.append((k, v))
        scores = torch.einsum("qhd,khd->hqk", q, true[0]).masked_fill(place[None] > place[:, None], -torch.inf)
        scores = torch.cat((scores, *((q * key).sum(-1).t()[..., None] for key, _ in own)), -1) * dim**-0.5
        weights = scores.softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights[..., :length], true[1])
        for i, (_, value) in enumerate(own):
            mixed = mixed + weights[..., length + i].t()[..., None] * value
        x = x + mtp.linear(f"{name}.o_proj", (mixed * gate.sigmoid()).flatten(-2))
        x = x + mtp._mlp(f"{LAYER}mlp", mtp.norm(f"{LAYER}post_attention_layernorm", x))
        state = mtp.norm("norm", x)
        found.append((state @ mtp.output.t()).argmax(-1))
    return torch.stack(found, -1)


def _rotated(mtp: Mtp, x: Tensor, places: Tensor) -> Tensor:
    """x [n, heads, D], each at its place."""
    rope = mtp.config["rope_parameters"]
    size = int(mtp.config["head_dim"] * rope["partial_rotary_factor"])
    frequency = 1 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32, device=x.device) / size)
    angle = places.float()[:, None, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def replayed(ids: Sequence[int], prompt: int, drafts: Sequence[Sequence[int]], most: int) -> tuple[list[int], list[int]]:
    """Over the rounds of a row: how often each position was drafted, and accepted. The last token is never drafted."""
    drafted, accepted, count = [0] * most, [0] * most, prompt + 1
    while count < len(ids):
        asked = min(most, len(ids) - count - 1)
        right = [drafts[count - 2][j] == ids[count + j] for j in range(asked)]
        kept = right.index(False) if False in right else asked
        for j in range(asked):
            drafted[j] += 1
            accepted[j] += j < kept
        count += kept + 1
    return drafted, accepted


def rows_of(folder: Path) -> Rows:
    found = pl.read_parquet(folder / "data" / "*.parquet").sort("row_index")
    lines = found.select("request_id", "prompt_ids", "token_ids").iter_rows()
    return {request: (prompt, answer or []) for request, prompt, answer in lines}


class Checks:
    STEPS: ClassVar[tuple[str, ...]] = ("jobs", "killed", "transformers", "acceptance", "speed")

    def __init__(self, args: argparse.Namespace, command: Callable[..., None]) -> None:
        self._args, self._out, self._command = args, Path(args.out), command
        self._model, self._on_gpu = self._out / "model", torch.cuda.is_available()
        self._device = torch.device("cuda" if self._on_gpu else "cpu")
        # decode.deterministic needs a GPU; elsewhere fp64 has the same promise.
        self._exact = ["model.dtype=bfloat16", "decode.deterministic=true"] if self._on_gpu else ["model.dtype=float64"]

    def steps(self, run: Callable[[str, Callable[[], dict[str, Any]]], None]) -> None:
        """run: of a step with its name"""
        for name in self._args.steps:
            run(name, getattr(self, f"_{name}"))

    def _words(self, name: str, *words: str) -> list[str]:
        """The command of a job into OUT/jobs/NAME."""
        return [
            "batchspec.run", f"model.path={self._model}", f"input.path={self._args.prompts}", "input.chat=true",
            f"output.dir={self._out / 'jobs' / name}", "output.token_ids=true", "output.prompt_ids=true",
            f"output.shard_rows={SHARD_ROWS}", *words,
        ]

    def _job(self, name: str, *words: str) -> Rows:
        shutil.rmtree(self._out / "jobs" / name, ignore_errors=True)
        self._command(self._out / "logs" / f"{name}.log", *self._words(name, *words))
        return rows_of(self._out / "jobs" / name)

    def _compared(self, slots: int, *words: str) -> list[str]:
        return [
            *self._exact, f"input.limit={self._args.rows}", f"decode.max_new_tokens={self._args.tokens}",
            f"packing.max_num_seqs={slots}", *words,
        ]

    def _jobs(self) -> dict[str, Any]:
        slots = self._args.slots
        first = self._job("none", *self._compared(slots, "draft=none"))
        others = {
            "lookup": self._compared(max(1, slots // 4), "draft=lookup"),
            "mtp": self._compared(max(1, slots // 2), "draft=mtp"),
            "mtp_k2": self._compared(slots, "draft=mtp", "draft.num_speculative_tokens=2", "draft.adaptive=false"),
        }
        found: dict[str, Any] = {"rows": len(first), "tokens": sum(len(answer) for _, answer in first.values())}
        for name, words in others.items():
            try:
                found[f"rows of {name} that differ"] = _differing(first, self._job(name, *words))
            except Exception as error:
                found[f"rows of {name} that differ"] = f"{type(error).__name__}: {error}"[:300]
        if any(isinstance(value, str) for value in found.values()):
            found["error"] = "a job failed"
        return found

    def _killed(self) -> dict[str, Any]:
        """SIGKILL when a third of the shards is there; then the same command again."""
        folder, log = self._out / "jobs" / "killed", self._out / "logs" / "killed.log"
        shutil.rmtree(folder, ignore_errors=True)
        words = self._words("killed", *self._compared(self._args.slots // 4 or 1, "draft=mtp"))
        wanted = max(1, self._args.rows // SHARD_ROWS // 3)
        with log.open("wb") as file:
            process = subprocess.Popen([sys.executable, "-m", *words], env=os.environ, stdout=file, stderr=file)
            deadline = time.monotonic() + 300
            while process.poll() is None and len(list(folder.glob("data/part-*"))) < wanted and time.monotonic() < deadline:
                time.sleep(0.01)
            ended_before, there = process.poll() is not None, len(list(folder.glob("data/part-*")))
            process.send_signal(signal.SIGKILL)
            process.wait()
        self._command(log, *words)
        found = {"shards before the kill": there, "rows that differ": _differing(self._first(), rows_of(folder))}
        return {**found, "error": "it had ended before the kill"} if ended_before else found

    def _first(self) -> Rows:
        return rows_of(self._out / "jobs" / "none")

    def _measured(self) -> Rows:
        """The job whose acceptance is counted: fp32, always K drafts, all answers equally long."""
        folder = self._out / "jobs" / "measured"
        words = [
            "model.dtype=float32", "draft=mtp", f"draft.num_speculative_tokens={DRAFTS}", "draft.adaptive=false",
            f"input.limit={self._args.measured}", "decode.ignore_eos=true", f"packing.max_num_seqs={self._args.slots}",
            f"decode.max_new_tokens={self._args.measured_tokens}",
        ]
        return rows_of(folder) if (folder / "data").is_dir() else self._job("measured", *words)

    def _target(self) -> Any:
        from transformers import AutoModelForCausalLM

        torch.set_float32_matmul_precision("highest")
        auto: Any = AutoModelForCausalLM
        return auto.from_pretrained(self._model, dtype=torch.float32).to(self._device).eval()

    @torch.inference_mode()
    def _transformers(self) -> dict[str, Any]:
        model, rows = self._target(), self._measured()
        equal, ties, different, count = 0, 0, 0, 0
        for prompt, answer in rows.values():
            ids = torch.tensor([prompt + answer], device=self._device)
            logits = model(ids[:, :-1], logits_to_keep=len(answer)).logits[0]
            gaps = logits.max(-1).values - logits.gather(-1, ids[0, -len(answer) :, None])[:, 0]
            count, ties = count + len(answer), ties + int(((gaps > 0) & (gaps < NEAR)).sum())
            different += int((gaps >= NEAR).sum())
        for prompt, answer in list(rows.values())[: self._args.generated]:
            ids = torch.tensor([prompt], device=self._device)
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(answer), min_new_tokens=len(answer), do_sample=False
            )
            equal += made[0, len(prompt) :].tolist() == answer
        return {
            "tokens": count, "not the likeliest one": different, f"ties within {NEAR}": ties,
            "answers equal to generate": f"{equal} of {self._args.generated}",
        }

    @torch.inference_mode()
    def _acceptance(self) -> dict[str, Any]:
        rows, model, mtp = self._measured(), self._target(), read_mtp(self._model, torch.float32)
        on = {name: tensor.to(self._device) for name, tensor in mtp.tensors.items()}
        mtp = Mtp(on, mtp.embedding.to(self._device), mtp.output.to(self._device), mtp.config)
        drafted, accepted = [0] * DRAFTS, [0] * DRAFTS
        for prompt, answer in rows.values():
            ids = torch.tensor(prompt + answer, device=self._device)
            hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            drafts = forced_drafts(mtp, ids, hidden, DRAFTS).tolist()
            for total, own in zip((drafted, accepted), replayed(prompt + answer, len(prompt), drafts, DRAFTS), strict=True):
                total[:] = [x + y for x, y in zip(total, own, strict=True)]
        frame = pl.read_parquet(self._out / "jobs" / "measured" / "data" / "*.parquet")
        of_rows = [row for row in frame["spec_decode"].to_list() if row]
        asked = [sum(row["drafted_per_position"][j] for row in of_rows) for j in range(DRAFTS)]
        kept = [
            sum(round((row["acceptance_per_position"][j] or 0) * row["drafted_per_position"][j]) for row in of_rows)
            for j in range(DRAFTS)
        ]
        shares = [[round(x / max(y, 1), 4) for x, y in zip(*own, strict=True)] for own in ((kept, asked), (accepted, drafted))]
        apart = max(abs(x - y) for x, y in zip(*shares, strict=True))
        return {
            "prompts": len(rows), "batchspec": shares[0], "reference": shares[1], "largest difference": round(apart, 5),
            "details": {"batchspec": [asked, kept], "reference": [drafted, accepted]},
        }

    def _speed(self) -> dict[str, Any]:
        out = self._out / "bench.jsonl"
        out.unlink(missing_ok=True)
        self._command(
            self._out / "logs" / "bench.log", "batchspec.cli", "bench", str(out), "english", "--model", str(self._model),
            "--input", str(self._args.prompts), "--chat", "--eos", "--batch", str(self._args.slots), "--gen",
            str(self._args.tokens), "--requests", str(self._args.timed), "--draft", "none", "lookup", "mtp", "--k", "auto",
            str(DRAFTS), "--runs", str(self._args.runs),
        )
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        return {line["variant"]: f"{line['total_tok_s']} tok/s" for line in lines} | {"details": lines}


def _differing(first: Rows, other: Rows) -> int:
    """Rows that are not in both with the same tokens."""
    return sum(first.get(key) != other.get(key) for key in first.keys() | other.keys())
