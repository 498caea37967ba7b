"""Whole jobs of models whose layers keep row tensors: features in combination, kills, retries, conversations, scores, refusals.

The rows of every job are those of a run without drafts and with one slot, which has no row preempted. Each row of a job asks for
something else, so that a job of one drafter meets them all; the models take the drafters, and what happens to jobs, in turn.
test_recurrent_lossless.py and test_mtp_lossless.py have every pair of a model and a drafter, without jobs.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from transformers import AutoTokenizer

import batchspec
from batchspec import run
from batchspec.config.overrides import overrides_of
from batchspec.errors import ConfigError
from batchspec.model.spec import load_spec
from batchspec.text.tokenizer import Tokenizer
from tests.gpu_jobs.compare import Rows, differences, rows_of
from tests.gpu_jobs.models import Model, make_model
from tests.gpu_jobs.rows import PERSON
from tests.helpers.runs import run_apart, signalled_after_commits
from tests.job.test_retry import failing_q8
from tests.model.test_target import oracle
from tests.structured.test_grammar_jobs import SUMS, TREE
from tests.warm.test_conversations import as_many_as_the_row_says, chats

pytestmark = pytest.mark.second

ROWS, CAP, THINK = 12, 24, 5
HYBRIDS, CONVS, MAMBA = ("qwen3_5", "qwen3_next"), ("lfm2_moe",), ("nemotron_h",)
STATES = (*HYBRIDS, *MAMBA)
MODELS = (*STATES, *CONVS)
Keys = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, folder: Path) -> Model:
    return make_model(request.param, folder)


def of(*models: str) -> pytest.MarkDecorator:
    """The models of a test."""
    return pytest.mark.parametrize("model", models, indirect=True, scope="module")


ASKED: tuple[Keys, ...] = (
    {},
    {"regex": "[A-Z][a-z ,]{3,30}\\."},
    {"schema": json.dumps(PERSON)},
    {"schema": json.dumps(TREE), "temperature": 1.0},  # recursive: states of the automaton are computed while rows wait
    {"grammar": SUMS, "temperature": 1.0, "n": 3},
    {"n": 4, "temperature": 1.0, "top_p": 0.9},
    {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    {"bad_words": ["e", " the", "fox"], "temperature": 0.7},
    {"stop": ["e", " is"], "temperature": 1.0, "max_new_tokens": 40},
    {"thinking_token_budget": 7, "temperature": 1.0},
    {"choice": ["yes", "no", "not at all"]},
)
"""What rows ask for, in turn; an adapter too where the model has some."""


def prompts(model: Model) -> pl.DataFrame:
    """Some prompts are longer than two chunks of the recurrence, and some begin alike."""
    beginnings = ["The quick brown fox. " * (i % 5 * (4 if i % 3 else 1)) for i in range(ROWS)]
    rows = [
        {
            "id": f"q{i}", "prompt": "" if i == ROWS - 1 else f"{beginnings[i]}Say word{i % 7}", **ASKED[i % len(ASKED)],
            "adapter": f"a{i % 3}" if model.adapters and i % 4 else None,
        }
        for i in range(ROWS)
    ]
    columns = ("id", "prompt", "adapter", *dict.fromkeys(name for one in ASKED for name in one))
    types: dict[str, Any] = {**dict.fromkeys(("bad_words", "stop", "choice"), pl.List(pl.String)), "n": pl.Int32}
    values = [{name: row.get(name) for name in columns} for row in rows]
    frame = pl.DataFrame(values, schema_overrides=types, infer_schema_length=None)
    return frame if model.adapters else frame.drop("adapter")


def keys_of(model: Model, **more: Any) -> Keys:
    named = {name: name for name in ("schema", "regex", "choice", "grammar")}
    adapters = {"model.adapters": {f"a{i}": folder for i, folder in enumerate(model.adapters)}} if model.adapters else {}
    return {
        "model.path": str(model.folder), "model.dtype": "float64", "model.think_tokens": [THINK], "input.columns": named,
        "decode.max_new_tokens": CAP, "decode.thinking_token_budget": 4, "output.token_ids": True, "output.prompt_ids": True,
        "output.logprobs": 2, "packing.memory_gb": 0.05, **adapters, **more,
    }


def command(model: Model, folder: Path, out: Path, **more: Any) -> list[str]:
    """Of a job that reads folder/prompts.parquet."""
    own = {"input.path": folder / "prompts.parquet", "output.dir": out, "output.shard_rows": 5, "input.max_error_fraction": 1.0}
    return overrides_of({**keys_of(model), **{key: str(value) for key, value in own.items()}, **_keys(more)})


def _keys(named: Keys) -> Keys:
    """Keys of a job, of names with __ for their dots."""
    return {name.replace("__", "."): value for name, value in named.items()}


def written(model: Model, out: Path) -> Rows:
    return rows_of(pl.read_parquet(out / "data"), prompts(model).columns)


@pytest.fixture(scope="module")
def job(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the prompts and the output of the plain run."""
    folder = tmp_path_factory.mktemp("job")
    prompts(model).write_parquet(folder / "prompts.parquet")
    assert run.main(command(model, folder, folder / "plain", draft="none", packing__max_num_seqs=1)) == 0
    return folder


@pytest.fixture(scope="module")
def plain(model: Model, job: Path) -> Rows:
    return written(model, job / "plain")


@of(*MODELS)
def test_the_rows_have_what_they_ask_for(model: Model, plain: Rows) -> None:
    asked, tokenizer = {f"q{i}": ASKED[i % len(ASKED)] for i in range(ROWS)}, Tokenizer(model.folder)
    texts = [(asked[key[0]], row) for key, row in plain.items() if row["status"] != "error"]
    assert {key[0] for key, row in plain.items() if row["status"] == "error"} == {f"q{ROWS - 1}"}
    for own, row in texts:
        if row["status"] == "ok" and "regex" in own:
            assert re.fullmatch(own["regex"], row["completion"])
        assert "choice" not in own or row["completion"] in own["choice"]
        for word in own.get("bad_words", ()):  # other tokens may have it in their text
            banned, found = tokenizer.encode_part(word), list(row["token_ids"])
            assert banned not in [found[i : i + len(banned)] for i in range(len(found))], word
        assert len(row["logprobs"]) == len(row["token_ids"])
    assert {row["finish_reason"] for _, row in texts} == {"stop", "length"}
    assert len(plain) == ROWS + 2 + 3


FEW_PAGES: Keys = {"packing.max_num_seqs": 5, "packing.pages": 34, "packing.memory_gb": None, "packing.run_ahead": 2}
MTP: Keys = {"draft": "mtp", "packing.max_num_seqs": 3}
DRAFTS: dict[str, tuple[str, Keys]] = {
    "many rows": ("qwen3_next", {"draft": "none", "packing.max_num_seqs": 16}),
    "lookup, one slot": ("qwen3_5", {"draft": "lookup", "packing.max_num_seqs": 1, "draft.num_speculative_tokens": 3}),
    "lookup, few pages": ("lfm2_moe", {"draft": "lookup", "draft.corpus_tokens": 2000, **FEW_PAGES}),
    "eagle3": ("qwen3_5", {"draft": "eagle3", "draft.num_speculative_tokens": 4, "packing.max_num_seqs": 3}),
    "parallel": ("qwen3_next", {"draft": "parallel", "draft.num_speculative_tokens": 5, "packing.max_num_seqs": 4}),
    "hybrid": (
        "lfm2_moe",
        {"draft": "hybrid", "draft.num_speculative_tokens": 2, "packing.max_num_seqs": 4, "packing.run_ahead": 1},
    ),
    "pard": (
        "lfm2_moe",
        {
            "draft": "pard", "draft.num_speculative_tokens": 3, "packing.max_num_seqs": 4,
            "packing.max_num_batched_tokens": 64,
        },
    ),
    "mtp, four drafts": ("qwen3_5", {**MTP, "draft.num_speculative_tokens": 4}),
    "mtp, eight drafts, few pages": ("qwen3_next", {**MTP, "draft.num_speculative_tokens": 8, **FEW_PAGES}),
    "mtp, 64 tokens may be drafted, one slot": ("qwen3_5", {**MTP, "draft.vocab_size": 64, "packing.max_num_seqs": 1}),
    "mtp, a window and e4m3, the long ways": (
        "qwen3_next",
        {
            **MTP, "draft.window": 5, "draft.sink_tokens": 2, "draft.cache_dtype": "fp8", "ablation.dead_positions": False,
            "ablation.uniform_slots": False, "ablation.argmax": False,
        },
    ),
    "mtp, deterministic": ("qwen3_5", {**MTP, "decode.deterministic": True}),
    "lookup, deterministic": (
        "nemotron_h",
        {"draft": "lookup", "draft.num_speculative_tokens": 5, "decode.deterministic": True, "packing.max_num_seqs": 3},
    ),
    "parallel, few pages": (
        "nemotron_h", {"draft": "parallel", "draft.num_speculative_tokens": 3, "packing.max_num_batched_tokens": 64, **FEW_PAGES}
    ),
}
"""Name -> the model and the keys of a job."""


def drafts(model: Model, name: str) -> Keys:
    keys = DRAFTS[name][1]
    paths = {"eagle3": model.head, "hybrid": model.head, "parallel": model.parallel_head, "pard": model.small}
    return {**keys, **({"draft.path": paths[keys["draft"]]} if keys["draft"] in paths else {})}


@pytest.mark.parametrize(
    ("model", "name"), [(model, name) for name, (model, _) in DRAFTS.items()], indirect=["model"], scope="module"
)
def test_tokens_do_not_depend_on_drafting_or_packing(name: str, model: Model, job: Path, plain: Rows, tmp_path: Path) -> None:
    assert run.main(command(model, job, tmp_path / "out", **drafts(model, name))) == 0
    assert differences(written(model, tmp_path / "out"), plain, bits=False) == []
    stats = pl.read_parquet(tmp_path / "out" / "data")["spec_decode"].drop_nulls().struct
    assert set(stats.field("drafter")) == {DRAFTS[name][1]["draft"]} - {"none"}
    assert not name.startswith("mtp") or int(stats.field("num_draft_tokens").sum()) > 100


@of("qwen3_next")
def test_tokens_of_an_e4m3_cache_do_not_depend_on_drafting_or_packing(model: Model, job: Path, tmp_path: Path) -> None:
    outs: list[Path] = []
    for keys in ({"draft": "none", "packing.max_num_seqs": 1}, drafts(model, "eagle3")):
        outs.append(tmp_path / str(len(outs)))
        assert run.main(command(model, job, outs[-1], cache__dtype="fp8", cache__scales="calibrate", **keys)) == 0
    assert differences(written(model, outs[1]), written(model, outs[0]), bits=False) == []


@pytest.mark.parametrize(
    ("model", "name"), [("lfm2_moe", "eagle3"), ("nemotron_h", "eagle3"), ("qwen3_5", "mtp, four drafts")], indirect=["model"]
)
def test_a_killed_job_is_finished_by_the_same_command(
    name: str, model: Model, job: Path, plain: Rows, tmp_path: Path
) -> None:
    words = command(model, job, tmp_path / "out", **drafts(model, name))
    assert run_apart(words, tmp_path / "log", partial(signalled_after_commits, 2, signal.SIGKILL))[0] == -signal.SIGKILL
    assert len(list((tmp_path / "out/data").iterdir())) == 2
    assert run.main(words) == 0
    assert differences(written(model, tmp_path / "out"), plain, bits=False) == []


@pytest.mark.parametrize(("model", "name"), [("lfm2_moe", "eagle3"), ("qwen3_next", "mtp, four drafts")], indirect=["model"])
def test_two_ranks_write_what_one_process_does(name: str, model: Model, job: Path, plain: Rows, tmp_path: Path) -> None:
    """Each with its key heads and their value heads, its query heads, and its part of experts and of adapters."""
    words = command(model, job, tmp_path / "out", cluster__tensor_parallel=2, **drafts(model, name))
    code, said = run_apart(words, tmp_path / "log")
    assert code == 0, said
    assert "in float64 on 2 x cpu" in said
    assert differences(written(model, tmp_path / "out"), plain, bits=False) == []


@pytest.mark.parametrize(("model", "name"), [("lfm2_moe", "eagle3"), ("qwen3_next", "mtp, four drafts")], indirect=["model"])
def test_rows_that_were_cut_off_resume_and_failed_ones_are_computed_again(
    name: str, model: Model, job: Path, plain: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    # Logprobs of tokens that are there already are not computed again, so rows with some would not resume.
    keys: Keys = {"output__logprobs": None, **drafts(model, name)}
    with monkeypatch.context() as patch:
        failing_q8(patch)
        assert run.main(command(model, job, out, decode__max_new_tokens=9, **keys)) == 0
    assert run.main(command(model, job, out, decode__max_new_tokens=9, resume="error", **keys)) == 0
    assert run.main(command(model, job, out, resume="length", **{**keys, "draft.num_speculative_tokens": 2})) == 0
    found, wanted = written(model, out), {key: {**row} for key, row in plain.items()}
    for row in wanted.values():
        del row["logprobs"], row["top_logprobs"]
    assert differences(found, wanted, bits=False) == []
    resumed = pl.read_parquet(out / "data")["spec_decode"].drop_nulls().struct.field("num_prefills")
    assert int(resumed.max()) > 1  # type: ignore[arg-type]


@of("lfm2_moe")
def test_more_rows_join_a_job(model: Model, job: Path, plain: Rows, tmp_path: Path) -> None:
    out, keys = tmp_path / "out", drafts(model, "lookup, few pages")
    for limit, more in ((7, {}), (ROWS, {"resume": "extend"})):
        assert run.main(command(model, job, out, input__limit=limit, **more, **keys)) == 0
    assert differences(written(model, out), plain, bits=False) == []


@of("qwen3_5")
def test_every_turn_of_a_conversation_is_what_its_chat_alone_would_give(model: Model) -> None:
    keys = keys_of(model, **{"input.chat": True, "model.max_len": 300, "decode.max_new_tokens": 12, "packing.max_num_seqs": 3})
    del keys["input.columns"]
    with batchspec.Engine(overrides_of({**keys, **drafts(model, "eagle3")})) as engine:
        frame = engine.converse(chats(), as_many_as_the_row_says)
        again = engine.generate({"prompt_ids": frame["prompt_ids"].to_list()})
    with batchspec.Engine(overrides_of({**keys, "draft": "none", "packing.max_num_seqs": 1})) as engine:
        alone = engine.generate({"prompt_ids": frame["prompt_ids"].to_list()})
    assert frame["token_ids"].to_list() == again["token_ids"].to_list() == alone["token_ids"].to_list()
    assert frame["turn"].max() == 3


# --- scores


TEXTS = ["The lazy dog and the fox " * 8, "a", "Say word1", "In 2024 the city of Paris counted"]


def logprobs_by_transformers(model: Model, ids: list[int]) -> torch.Tensor:
    """fp64 [tokens, V] of the token after each."""
    with torch.inference_mode():
        logits: torch.Tensor = oracle(model.folder, torch.float64, experts_implementation="eager")(torch.tensor([ids])).logits[0]
    return logits.log_softmax(1)


def scored(model: Model, **more: Any) -> pl.DataFrame:
    keys = {
        "model.path": str(model.folder), "model.dtype": "float64", "output.prompt_ids": True, "packing.max_num_seqs": 3,
        "packing.max_num_batched_tokens": 64,
    }
    return batchspec.generate(TEXTS, overrides=overrides_of({**keys, **_keys(more)}))


@of(*MODELS)
def test_scores_of_prompts_are_those_of_transformers(model: Model) -> None:
    for row in scored(model, decode__score="prompts").iter_rows(named=True):
        ids = row["prompt_ids"]
        wanted = logprobs_by_transformers(model, ids)[range(len(ids) - 1), ids[1:]].numpy()
        np.testing.assert_allclose(np.array(row["prompt_logprobs"][1:], np.float64), wanted, atol=1e-5, rtol=1e-5)


@of(*MODELS)
def test_scores_of_choices_are_those_of_transformers(model: Model) -> None:
    choices, tokenizer = ["yes", "never", "word1 again"], AutoTokenizer.from_pretrained(model.folder)
    for row in scored(model, decode__score="choices", decode__choice=choices).iter_rows(named=True):
        for one in row["choice_probs"]:
            prompt, ids = row["prompt_ids"], tokenizer(one["choice"], add_special_tokens=False)["input_ids"]
            wanted = logprobs_by_transformers(model, [*prompt, *ids])[range(len(prompt) - 1, len(prompt) + len(ids) - 1), ids]
            assert one["logprob"] == pytest.approx(float(wanted.sum()), abs=1e-5)


# --- what is refused


_RECURRENT, _CONV = "has recurrent layers", "has short convolutions"


@pytest.mark.parametrize(
    ("models", "drafter", "said"),
    [
        (STATES, "window", f"draft=window: {{family}} {_RECURRENT}, which keep one state of a row: only chains can be"),
        (STATES, "tree", f"draft=tree: {{family}} {_RECURRENT}, which keep one state of a row: only chains can be"),
        (STATES, "pard", f"{{family}} {_RECURRENT}; PARD drafts with attention alone"),
        (CONVS, "tree", f"draft=tree: {{family}} {_CONV}, which read the tokens before in one order: only chains can be"),
        (CONVS, "pard", f"{{family}} {_CONV}, whose inputs a drafter does not keep; PARD drafts with attention alone"),
    ],
)
def test_drafters_that_cannot_be_are_refused_by_name(models: Sequence[str], drafter: str, said: str, folder: Path) -> None:
    for model in (make_model(name, folder) for name in models):
        paths = {"tree": {"draft.path": model.head}, "pard": {"draft.path": str(model.folder)}}
        with pytest.raises(ConfigError) as caught:
            batchspec.Engine(overrides_of({**keys_of(model), "draft": drafter, **paths.get(drafter, {})}))
        assert said.format(family=load_spec(model.folder).family) in str(caught.value)
        assert "\n" not in str(caught.value)
