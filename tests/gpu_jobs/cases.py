"""Draws a case from its number: the group is the job (model, rows, keys of decoding), the case is how it is run.

All cases of a group must give the same tokens, so the reference run (plain.py) is computed once a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from batchspec.engine.slots.expected_pages import SHORT_CAP_TOKENS
from tests.gpu_jobs.models import Model, make_model
from tests.gpu_jobs.rows import CONSTRAINTS, Row, draw_rows

GROUP = 8
"""Cases of a group."""
OUTGROWING, OUTGROWN = 3, SHORT_CAP_TOKENS + 8
"""With ranks, in which nothing is patched, so many rows of every second group have as many tokens. Pages for half of them are
promised to such a row, so that several enter a small cache and the youngest is preempted."""
ENDS = ("decode.stop", "decode.repetition_detection")
"""Keys, by their beginning, that end rows before that."""
Keys = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Model and arithmetic of a group."""

    model: str
    dtype: str = "bfloat16"
    fp8_kv: bool = False
    keys: tuple[tuple[str, Any], ...] = ()
    adapter: bool = False
    """All rows have one adapter, which is merged into the weights."""
    adapters: bool = False
    """Rows name their adapters."""

    def __str__(self) -> str:
        more = [*(["fp8-kv"] if self.fp8_kv else []), *(f"{key}={value}" for key, value in self.keys)]
        more += [name for name, given in (("merged adapter", self.adapter), ("adapters", self.adapters)) if given]
        return " ".join([self.model, self.dtype, *more])


_CONVERTED = (("model.activations", "dtype"),)
_AT_LOAD = (("model.quantize", "fp8"),)
ON_GPU = (
    Setting(model="smol"),
    Setting(model="gpt_oss"),
    Setting(model="smol:fp8_block"),
    Setting(model="llama", dtype="float64", adapters=True),
    Setting(model="smol", fp8_kv=True),
    Setting(model="gemma3"),
    Setting(model="smol:gpt_oss_mxfp4"),
    Setting(model="llama", fp8_kv=True),
    Setting(model="smol:moe"),
    Setting(model="mistral", adapter=True),
    Setting(model="smol:fp8_channel", fp8_kv=True),
    Setting(model="qwen3_moe"),
    Setting(model="smol", adapter=True),
    Setting(model="gpt_oss", dtype="float64"),
    Setting(model="smol:moe_fp8_block"),
    Setting(model="phi3"),
    Setting(model="smol:fp8_channel", keys=_CONVERTED),
    Setting(model="odd"),
    Setting(model="smol:moe_fp8_channel"),
    Setting(model="dummy"),
    Setting(model="smol:gpt_oss_mxfp4", fp8_kv=True),
    Setting(model="glm4", fp8_kv=True),
    Setting(model="smol:gpt_oss"),
    Setting(model="minimax_m2"),
    Setting(model="qwen3", dtype="float64", fp8_kv=True, adapters=True),
    Setting(model="mixtral"),
    Setting(model="olmo2"),
    Setting(model="qwen3_5"),
    Setting(model="qwen3_next"),
    Setting(model="qwen3_5", dtype="float64", fp8_kv=True, adapters=True),
    Setting(model="qwen3_next", dtype="float64"),
    Setting(model="qwen3_5", adapter=True),
    Setting(model="glm4_moe"),
    Setting(model="olmo3"),
    Setting(model="exaone4", adapter=True),
    Setting(model="seed_oss", fp8_kv=True),
    Setting(model="smollm3"),
    Setting(model="granite", dtype="float64", adapters=True),
    Setting(model="granite4"),
    Setting(model="ministral3"),
    Setting(model="glm4_moe", dtype="float64", fp8_kv=True),
    Setting(model="granite", fp8_kv=True),
    Setting(model="gemma4"),
    Setting(model="gemma4", dtype="float64", fp8_kv=True, adapters=True),
    Setting(model="gemma4_moe"),
    Setting(model="gemma4_moe", fp8_kv=True),
    Setting(model="gemma4_inputs", fp8_kv=True),
    Setting(model="gemma4_inputs", dtype="float64", adapters=True),
    Setting(model="lfm2"),
    Setting(model="lfm2", dtype="float64", fp8_kv=True, adapters=True),
    Setting(model="lfm2_moe"),
    Setting(model="lfm2", adapter=True),
    Setting(model="nemotron_h"),
    Setting(model="nemotron_h", dtype="float64", fp8_kv=True),
    Setting(model="glm4_moe_lite"),
    Setting(model="glm4_moe_lite", dtype="float64"),
    Setting(model="falcon_h1"),
    Setting(model="int4_gptq"),
    Setting(model="smol", keys=_AT_LOAD),
    Setting(model="falcon_h1", dtype="float64", fp8_kv=True),
    Setting(model="qwen3_5_images", dtype="float64"),
    Setting(model="int4_awq", dtype="float64", fp8_kv=True),
    Setting(model="qwen3_moe", keys=_AT_LOAD),
    Setting(model="qwen3_vl", dtype="float64"),
    Setting(model="int4_packed"),
)
IN_FLOAT64 = (
    Setting(model="llama", dtype="float64", adapters=True),
    Setting(model="gpt_oss", dtype="float64"),
    Setting(model="tiny:fp8_block", dtype="float64"),
    Setting(model="gemma3", dtype="float64", fp8_kv=True),
    Setting(model="mistral", dtype="float64", adapter=True),
    Setting(model="tiny:gpt_oss_mxfp4", dtype="float64", fp8_kv=True),
    Setting(model="qwen3", dtype="float64", fp8_kv=True, adapters=True),
    Setting(model="odd", dtype="float64"),
    Setting(model="qwen3_moe", dtype="float64"),
    Setting(model="dummy", dtype="float64"),
    Setting(model="tiny:moe_fp8_channel", dtype="float64"),
    Setting(model="phi3", dtype="float64", fp8_kv=True),
    Setting(model="mixtral", dtype="float64"),
    Setting(model="minimax_m2", dtype="float64"),
    Setting(model="olmo2", dtype="float64", adapter=True),
    Setting(model="glm4", dtype="float64"),
    Setting(model="tiny:fp8_channel", dtype="float64", adapter=False),
    Setting(model="qwen3_5", dtype="float64", adapters=True),
    Setting(model="qwen3_next", dtype="float64", fp8_kv=True),
    Setting(model="qwen3_5", dtype="float64", fp8_kv=True, adapter=True),
    Setting(model="glm4_moe", dtype="float64"),
    Setting(model="granite", dtype="float64", adapters=True),
    Setting(model="exaone4", dtype="float64", fp8_kv=True),
    Setting(model="ministral3", dtype="float64"),
    Setting(model="olmo3", dtype="float64"),
    Setting(model="granite4", dtype="float64"),
    Setting(model="smollm3", dtype="float64"),
    Setting(model="seed_oss", dtype="float64"),
    Setting(model="gemma4", dtype="float64", fp8_kv=True, adapters=True),
    Setting(model="gemma4", dtype="float64"),
    Setting(model="gemma4_moe", dtype="float64", fp8_kv=True),
    Setting(model="gemma4_inputs", dtype="float64", fp8_kv=True, adapters=True),
    Setting(model="lfm2", dtype="float64", adapters=True),
    Setting(model="lfm2_moe", dtype="float64", fp8_kv=True),
    Setting(model="nemotron_h", dtype="float64"),
    Setting(model="glm4_moe_lite", dtype="float64"),
    Setting(model="falcon_h1", dtype="float64", fp8_kv=True),
    Setting(model="qwen3_vl", dtype="float64"),
    Setting(model="int4_gptq", dtype="float64"),
    Setting(model="llama", dtype="float64", keys=_AT_LOAD),
    Setting(model="qwen3_5_images", dtype="float64"),
    Setting(model="int4_awq", dtype="float64", fp8_kv=True),
    Setting(model="int4_packed", dtype="float64"),
)
"""On a CPU, and with ranks on a GPU too: they refuse decode.deterministic, without which tokens in bf16 depend on the run."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A job: model, rows and the keys that determine the tokens."""

    number: int
    setting: Setting
    gpu: bool
    ranks: int
    """cluster.tensor_parallel of its cases; the reference run has one."""
    model: Model
    kind: str
    """Column of the prompts."""
    keys: Keys
    plain: Keys
    """How the reference run is run."""
    rows: list[Row]
    max_len: int
    outgrowing: bool = False
    """Whether OUTGROWING rows have OUTGROWN tokens."""

    @property
    def bits(self) -> bool:
        """Whether log-probabilities too are bit for bit the same."""
        return self.setting.dtype == "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Case:
    number: int
    group: Group
    entry_point: str
    """engine, job, generate, killed (commands that are killed and resumed), or scored (an engine that scores the prompts)."""
    runs: tuple[Keys, ...]
    """Keys of each run of the job: one run, or several if it is killed, of which the last one completes it."""
    eager: bool
    """Requests enter slots as soon as there are pages for their prompts, so that many are preempted later (in this process; with
    ranks by OUTGROWING rows)."""
    seed: int

    def __str__(self) -> str:
        return f"case {self.number} [{self.group.setting}] {self.entry_point}"


def draw_group(number: int, folder: Path, *, gpu: bool, ranks: int = 1) -> Group:
    rng = Random(f"group {number}")
    settings = ON_GPU if gpu and ranks == 1 else IN_FLOAT64
    setting = settings[number % len(settings)]
    model = make_model(setting.model, folder)
    is_long = rng.random() < (0.4 if gpu else 0.15)
    max_len, longest, cap = (3400, 3000, 160) if is_long else (900, 600, rng.choice([100, 250]))
    count = rng.choice([24, 40, 70, 300 if not is_long else 40])
    if not gpu:
        max_len, longest, cap, count = (
            (2400, 2200, 12, 6) if is_long else (260, 150, rng.choice([20, 100]), rng.choice([6, 12, 20]))
        )
    kind = "messages" if model.reads_images else rng.choice(["prompt", "prompt", "messages", "messages", "prompt_ids"])
    think = rng.random() < 0.25
    rows = draw_rows(
        rng, model, kind=kind, count=count, cap=cap, longest=longest, think=think,
        adapters=len(model.adapters) if setting.adapters else 0,
    )
    outgrowing = ranks > 1 and number % 2 == 1 and not is_long
    if outgrowing:
        max_len += OUTGROWN
        kept, asked = {"id", kind, "images", "temperature", "seed", "adapter"}, {"max_new_tokens": OUTGROWN}
        asked["min_new_tokens"] = OUTGROWN
        rows[:OUTGROWING] = [
            {name: row[name] if name in kept else asked.get(name) for name in row} for row in rows[:OUTGROWING]
        ]
    filled = {name for row in rows for name, value in row.items() if value is not None}
    rows = [{name: value for name, value in row.items() if name in filled} for row in rows]
    constrained = any(name in filled for name, _ in CONSTRAINTS)
    default = cap // 2
    keys: Keys = {
        "model.path": str(model.folder), "model.dtype": setting.dtype, "model.max_len": max_len,
        "decode.max_new_tokens": default, "decode.seed": rng.randrange(1 << 30), **dict(setting.keys),
        **({"decode.deterministic": True} if setting.dtype == "bfloat16" else {}),
        **({"cache.dtype": "fp8", "cache.scales": "calibrate"} if setting.fp8_kv else {}),
        **({"model.adapter": model.adapters[0]} if setting.adapter else {}),
        **({"model.load_format": "dummy"} if setting.model == "dummy" else {}),
        **({"input.chat": True} if kind == "prompt" and rng.random() < 0.5 else {}),
        **({"decode.stop": rng.choice([["\n\n"], ["?", " is"]])} if rng.random() < 0.2 else {}),
        **({"decode.stop_ids": [1 if constrained else rng.randrange(3, model.vocab)]} if rng.random() < 0.2 else {}),
        **({"decode.min_new_tokens": min(default, rng.choice([1, 3, 8]))} if rng.random() < 0.25 else {}),
        **(_repetition(rng) if rng.random() < 0.3 else {}),
        **({"decode.ignore_eos": True} if rng.random() < 0.3 and not constrained else {}),
        **({"output.logprobs": rng.choice([0, 2, 5])} if rng.random() < 0.5 else {}),
    }
    if setting.dtype == "float64" and setting.fp8_kv and setting.model == "dummy":
        del keys["cache.scales"]
    if "adapter" in filled:
        keys["model.adapters"] = {f"a{i}": folder for i, folder in enumerate(model.adapters)}
    if outgrowing:
        keys = {name: value for name, value in keys.items() if not name.startswith(ENDS)}
    if think:
        keys["model.think_tokens"] = rng.choice([[5], [5], [6, 5]])
        keys |= {"decode.thinking_token_budget": rng.choice([3, 12])} if rng.random() < 0.5 else {}
        if rng.random() < 0.5 and ("decode.thinking_token_budget" in keys or "thinking_token_budget" in filled):
            keys["decode.thinking_closing"] = " So."
    named = {name: name for name in ("schema", "regex", "choice", "grammar", "images") if name in filled}
    if named:
        keys["input.columns"] = named
    plain = {"draft": "none", "packing.max_num_seqs": 16 if count > 70 else rng.choice([1, 1, 2, 5]), **_memory(gpu)}
    return Group(
        number=number, setting=setting, gpu=gpu, ranks=ranks, model=model, kind=kind, keys=keys, plain=plain, rows=rows,
        max_len=max_len, outgrowing=outgrowing,
    )


def _repetition(rng: Random) -> Keys:
    """Rows end where they repeat themselves, which those of small random models soon do."""
    least, most = sorted((rng.choice([1, 2, 5]), rng.choice([1, 4, 20])))
    values = {"min_pattern_size": least, "max_pattern_size": most, "min_count": rng.choice([2, 3, 6])}
    return {f"decode.repetition_detection.{name}": value for name, value in values.items()}


def _memory(gpu: bool) -> Keys:
    return {"packing.memory_gb": 2.5 if gpu else 0.3}


def draw_case(number: int, group: Group) -> Case:
    rng = Random(f"case {number}")
    entry_point = rng.choice(["engine"] * 10 + ["job"] * 7 + ["generate"] + ["killed"] * 2)
    count = rng.choice([1, 2, 2, 3]) if entry_point == "killed" else 1
    of_job = _of_job(rng, group) if entry_point in ("job", "killed") else {}
    runs = tuple({**of_job, **_shape(rng, group, entry_point)} for _ in range(count + (entry_point == "killed")))
    if Random(f"scored {number}").random() < 0.06:
        entry_point = "scored"
    return Case(
        number=number, group=group, entry_point=entry_point, runs=runs, eager=rng.random() < 0.6, seed=rng.randrange(1 << 40)
    )


def _of_job(rng: Random, group: Group) -> Keys:
    return {
        "output.shard_rows": rng.choice([1, 3, 8, 50]),
        "input.num_workers": rng.choice([0, 0, 2]),
        "input.max_error_fraction": 1.0,
        **({"cluster.workers": 1} if group.ranks > 1 else {}),
    }


def _shape(rng: Random, group: Group, entry_point: str) -> Keys:
    """How one run computes: drafter, slots, pages, passes, and what is switched off."""
    gpu = group.gpu
    slots = rng.choice([1, 2, 3, 5, 8, 16, 32, 64, 256] if gpu else [1, 2, 3, 5, 8, 16])
    keys: Keys = {**_drafter(rng, group), "packing.max_num_seqs": slots}
    keys |= {"packing.pages": rng.choice([2, 2, 2 * group.max_len // 16])} if rng.random() < 0.6 else _memory(gpu)
    if group.outgrowing:
        keys = {name: value for name, value in keys.items() if name != "packing.memory_gb"} | {"packing.pages": 2}
    options: Keys = {
        "packing.max_num_batched_tokens": rng.choice([16, 63, 257, 1024, 4096]), "packing.run_ahead": rng.choice([0, 1, 3]),
        "ablation.dead_rows": False, "ablation.argmax": False, "ablation.uniform_slots": False,
        "ablation.prefill_graphs": False,
    }
    likely = {"packing.max_num_batched_tokens": 0.5, "packing.run_ahead": 0.4}
    keys |= {name: value for name, value in options.items() if rng.random() < likely.get(name, 0.12)}
    return {**keys, **({"cluster.tensor_parallel": group.ranks} if group.ranks > 1 else {})}


def _drafter(rng: Random, group: Group) -> Keys:
    model, exact = group.model, group.setting.dtype == "float64"
    is_dummy = group.setting.model == "dummy"
    names = ["none", "lookup", "lookup", "eagle3", "eagle3", "eagle3", "hybrid", "parallel", "block", "block", "window"]
    names += ["window", "pard"]
    if is_dummy:
        names.remove("pard")
    names += ["tree"] * 2 if exact else []
    names += ["mtp"] * 4 if model.has_mtp or model.assistant is not None else []
    name = rng.choice([name for name in names if name not in model.refused])
    keys: Keys = {"draft": name}
    if name == "none":
        return keys
    keys["draft.num_speculative_tokens"] = rng.choice([1, 2, 3, 4, 7, 12])
    if group.gpu and rng.random() < 0.6:
        keys["draft.adaptive"] = False
    if name in ("eagle3", "hybrid", "tree") and not is_dummy:
        keys["draft.path"] = model.head
    if name == "parallel" and not is_dummy:
        keys["draft.path"] = model.parallel_head
    if name == "block" and not is_dummy:
        keys["draft.path"] = rng.choice(model.block_heads)
    if name == "mtp" and model.assistant is not None:
        keys["draft.path"] = model.assistant
    if name == "pard":
        keys["draft.path"] = model.small
    if name == "window":
        keys |= {"draft.window": rng.choice([1, 20, 300]), "draft.sink_tokens": rng.choice([0, 4])}
    if name in ("lookup", "hybrid"):
        if rng.random() < 0.4:
            keys["draft.corpus_tokens"] = rng.choice([200, 100_000])
        if rng.random() < 0.4:
            keys |= {"draft.prompt_lookup_min": 1, "draft.prompt_lookup_max": rng.choice([1, 3])}
    if name == "tree":
        keys["draft.num_speculative_tokens"] = rng.choice([2, 3, 5])
        keys |= {"draft.tree.topk": rng.choice([2, 3, 8]), "draft.tree.nodes": rng.choice([None, 4, 6])}
    if name in ("eagle3", "hybrid", "parallel", "block") or (name == "mtp" and model.assistant is None):
        if rng.random() < 0.25:
            keys |= {"draft.window": rng.choice([3, 64]), "draft.sink_tokens": rng.choice([0, 4])}
        if rng.random() < 0.2 and not exact:
            keys["draft.cache_dtype"] = "fp8"
        if name != "block" and rng.random() < 0.15:
            keys["ablation.dead_positions"] = False
    if name in ("eagle3", "hybrid", "parallel", "block", "mtp", "window", "pard") and rng.random() < 0.2:
        keys["draft.coupled"] = rng.choice([False, True])
    return keys
