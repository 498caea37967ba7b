"""Prompts that are scored (decode.score=prompts): the log-probabilities of one slot and one pass a row.

They are not bit for bit the same in bf16, so they are compared with a tolerance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

import batchspec
from batchspec.config.overrides import overrides_of
from tests.gpu_jobs.cases import Case, Group, Keys, Setting
from tests.gpu_jobs.rows import Row

CLOSE, MEAN_OF_BF16, MEAN_OF_E4M3 = 1e-5, 0.3, 0.6
"""Most that a log-probability in float64 may differ by, and all of a row in bf16 on average, and with K/V in e4m3: there a sum
that is rounded differently changes the e4m3 value of an element by 6 to 12 %. Between bf16 and float64 the mixture of experts of
these jobs differs by up to 0.28 on average (a token with two almost equal experts goes to the other one), and the 4-bit model by
0.07, with such K/V by 0.37; a score of another token differs by several nats."""


def keys_of_scoring(group: Group, top: int) -> Keys:
    own = {key: value for key, value in group.keys.items() if key.startswith(("model.", "cache.")) or key == "input.chat"}
    own.pop("model.think_tokens", None)
    return {**own, "decode.score": "prompts", "output.prompt_logprobs": top, "output.prompt_ids": True}


def prompts_of(group: Group) -> list[Row]:
    kept = ("id", group.kind, "adapter")
    return [{name: value for name, value in row.items() if name in kept} for row in group.rows]


def shape_of_scoring(keys: Keys) -> Keys:
    read = (
        "packing.max_num_seqs", "packing.pages", "packing.memory_gb", "packing.max_num_batched_tokens",
        "cluster.tensor_parallel",
    )
    return {"draft": "none", **{name: value for name, value in keys.items() if name in read}}


def plain_scores(group: Group, prompts: pl.DataFrame, top: int) -> pl.DataFrame:
    shape = {**group.plain, "packing.max_num_seqs": 1, "packing.max_num_batched_tokens": group.max_len}
    with batchspec.Engine(overrides_of({**keys_of_scoring(group, top), **shape})) as engine:
        return engine.generate(prompts)


def scores_that_differ(case: Case, found: pl.DataFrame, plain: pl.DataFrame) -> list[str]:
    by_id = {row["request_id"]: row for row in plain.iter_rows(named=True)}
    lines = [f"{name}: the row is missing" for name in by_id.keys() - set(found["request_id"])]
    lines += ["a row was written twice"] if found["request_id"].is_duplicated().any() else []
    for row in found.iter_rows(named=True):
        line = score_difference(row, by_id[row["request_id"]], allowed=_allowed(case.group.setting))
        lines += [f"{row['request_id']}/0: {line}"] if line else []
    return lines


def _allowed(setting: Setting) -> float | None:
    if setting.dtype == "float64":
        return None
    return MEAN_OF_E4M3 if setting.fp8_kv else MEAN_OF_BF16


def score_difference(row: dict[str, Any], plain: dict[str, Any], *, allowed: float | None) -> str:
    """Empty if the scores are the same. allowed: mean difference of a row; None: each may differ by CLOSE, and the top tokens are
    the same."""
    for name in ("status", "prompt_ids"):
        if row[name] != plain[name]:
            return f"{name} {str(row[name])[:200]}, plain {str(plain[name])[:200]}"
    if row["prompt_logprobs"] is None:
        return "" if plain["prompt_logprobs"] is None else "no prompt_logprobs"
    ours, theirs = (np.array(one["prompt_logprobs"][1:], np.float64) for one in (row, plain))
    if ours.shape != theirs.shape or np.isnan(ours).any():
        return f"prompt_logprobs {ours[:4]} ({len(ours)}), plain {theirs[:4]} ({len(theirs)})"
    gap = np.abs(ours - theirs)
    if len(gap) and (gap.max() > CLOSE * (1 + np.abs(theirs).max()) if allowed is None else gap.mean() > allowed):
        at = int(gap.argmax())
        return f"prompt_logprobs[{at + 1}] of {len(gap) + 1}: {ours[at]}, plain {theirs[at]}; mean difference {gap.mean():.3g}"
    tops = [[one["id"] for one in top] for top in row.get("prompt_top_logprobs") or []]
    if allowed is None and tops != [[one["id"] for one in top] for top in plain.get("prompt_top_logprobs") or []]:
        return "prompt_top_logprobs has other tokens"
    return ""
