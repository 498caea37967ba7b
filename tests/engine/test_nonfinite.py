"""Rows whose logits are not finite: an error row each, with its position, and no other row's tokens change.

The embedding of one token is NaN. A row with it in its prompt fails at its first output token, a row that emits it at the next
one, and a draft of it that the target does not confirm changes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file

from batchspec import cli
from batchspec import run as run_module
from batchspec.batch.logits import tokens_left
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.draft.base import Drafter
from batchspec.draft.block import BlockDrafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.head import Head
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.pard import PardDrafter, PardModel, PardSpec
from batchspec.draft.shapes import TreeShape
from batchspec.draft.tree import TreeDrafter
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.draft.window import WindowDrafter
from batchspec.engine.rounds.records import RoundOptions
from batchspec.engine.slots.open_requests import NON_FINITE
from batchspec.model.layers.gated_delta.block import RECURRENT_CHUNK
from batchspec.model.target import Target
from batchspec.model.weights import DummyWeights
from batchspec.records import Completion, Request, SamplingParams
from tests.helpers.block_heads import tiny_block
from tests.helpers.engines import DEVICE, VOCAB, ForcedDrafter, decode, make_engine, packed, plain_tokens, request, tiny_target
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.helpers.recurrent import LoudNoise, recurrent_target
from tests.kernels.covering import covering

pytestmark = pytest.mark.usefixtures("poisoned")
BAD = 4
"""The token without finite numbers: healthy rows emit it too."""
SLOTS = 3


def healthy_target(recurrent: bool) -> Target:
    """The tiny target of the other tests."""
    return recurrent_target(window=5) if recurrent else tiny_target(window=5)


@cache
def broken_target(recurrent: bool) -> Target:
    """The same, one embedding NaN."""
    spec = healthy_target(recurrent).spec
    weights = (LoudNoise if recurrent else DummyWeights)(spec, dtype=torch.float64, device=DEVICE)
    target = Target(spec, weights, DEVICE)
    target.embedding[BAD] = float("nan")
    return target


@cache
def head(recurrent: bool) -> Head:
    spec = dummy_spec(healthy_target(recurrent).spec, draft_vocab_size=19, parallel=True)
    return dummy_head(replace(spec, aux_layer_ids=(0, 1, 2)), dtype=torch.float64, device=DEVICE)


def drafter(name: str, requests: list[Request], *, recurrent: bool) -> Drafter:
    target = broken_target(recurrent)
    known = {one.seed: plain_tokens(healthy_target(recurrent), one) for one in requests}
    made: dict[str, Any] = {
        "none": NoDrafter,
        "right": lambda: ForcedDrafter(3, known, right=True, fixed_len=True),
        "ragged": lambda: ForcedDrafter(3, known, right=True, fixed_len=False),
        "bad": lambda: ForcedDrafter(3, {seed: [BAD - 1] * len(ids) for seed, ids in known.items()}, right=False, fixed_len=True),
        "lookup": lambda: LookupDrafter(3, min_ngram=1, max_ngram=3),
        "eagle3": lambda: ChainDrafter(head(recurrent), target, 3, slots=SLOTS),
        "parallel": lambda: ParallelDrafter(head(recurrent), target, 3, slots=SLOTS),
        "block": lambda: BlockDrafter(tiny_block(target.spec), target, 3, slots=SLOTS),
        "dflash2": lambda: BlockDrafter(tiny_block(target.spec, dflash2=True), target, 3, slots=SLOTS),
        "tree": lambda: TreeDrafter(head(recurrent), target, TreeShape(topk=2, depth=3, nodes=7), slots=SLOTS),
        "window": lambda: WindowDrafter(target, 3, window=8, sink=2, slots=SLOTS),
        "pard": lambda: PardDrafter(
            PardModel(PardSpec(model=target.spec, mask_token_id=BAD), target), target.spec, 3, slots=SLOTS, parallel=False
        ),
    }
    return made[name]()  # type: ignore[no-any-return]


def prompts(count: int, sampling: SamplingParams) -> list[Request]:
    """One prompt in four holds the token; some begin alike."""
    rng = np.random.default_rng(0)
    found = []
    for index in range(count):
        ids = [token for token in rng.integers(0, VOCAB, 12).tolist() if token != BAD]
        if index % 4 == 2:
            ids.insert(index % 3, BAD)
        if index % 3 == 0:
            ids = [7, 1, 8, 2, 8, *ids]
        found.append(request(index, ids, cap=[14, 3][index % 2], sampling=sampling))
    return found


def expected(one: Request, healthy: Target) -> tuple[list[int], int | None]:
    """Tokens of the row, and its output token that cannot be chosen, or None. A healthy model's: the same up to there."""
    if BAD in one.prompt_ids:
        return [], 0
    tokens = plain_tokens(healthy, one)
    if BAD in tokens[:-1]:
        return [], tokens.index(BAD) + 1
    return tokens, None


def check(done: dict[str, Completion], requests: list[Request], *, recurrent: bool = False) -> None:
    failed = 0
    for one in requests:
        tokens, failure = expected(one, healthy_target(recurrent))
        found = done[one.request_id]
        if failure is None:
            assert found.error is None
            assert found.token_ids is not None
            assert found.token_ids.tolist() == tokens
            continue
        failed += 1
        assert found.error is not None
        assert (found.status, found.finish_reason, found.error.code) == ("error", "error", NON_FINITE)
        assert f"position {len(one.prompt_ids) + failure} (output token {failure})" in found.error.message
        assert (found.token_ids, found.text, found.logprobs) == (None, None, None)
        assert (found.seed, list(found.prompt_ids)) == (one.seed, list(one.prompt_ids))  # type: ignore[arg-type]
        assert found.stats is not None, "the engine has had it"
        assert found.stats.num_discarded == found.stats.num_prefills + found.stats.num_accepted + found.stats.num_rounds
    assert 0 < failed < len(requests)


def run(name: str, requests: list[Request], *, recurrent: bool = False, **options: Any) -> dict[str, Completion]:
    batch = packed(SLOTS, run_ahead=1, prefill_tokens=RECURRENT_CHUNK if recurrent else 16)
    drafts = drafter(name, requests, recurrent=recurrent)
    engine = make_engine(broken_target(recurrent), drafts, batch, device=DEVICE, decode=decode, **options)
    done = {completion.request_id: completion for completion in engine.run(iter(requests))}
    assert engine.pools.num_free == tuple(pool.num_pages - 1 for pool in engine.pools.pools)  # every page came back
    return done


@pytest.mark.parametrize("window", [None, 5])
def test_a_prompt_whose_row_failed_is_computed_anew(window: int | None) -> None:
    """When the cause is gone, a later call of the same engine must not find K/V that the failed row wrote."""
    target = Target.load(Path(), tiny_target(window=window).spec, dtype=torch.float64, device=DEVICE, dummy=True)
    engine = make_engine(target, NoDrafter(), packed(1), device=DEVICE)
    engine.keeps_prefixes = True
    healthy, failing = (request(i, [first, *range(5, 17)], cap=3) for i, first in enumerate((7, BAD)))
    own = target.embedding[BAD].clone()
    target.embedding[BAD] = float("nan")
    first = list(engine.run(iter([healthy, failing])))
    assert [done.status for done in first] == ["truncated", "error"]
    target.embedding[BAD] = own
    second = list(engine.run(iter([healthy, failing])))
    assert [done.error for done in second] == [None, None]
    for done, one in zip(second, (healthy, failing), strict=True):
        assert done.token_ids is not None
        assert done.token_ids.tolist() == plain_tokens(tiny_target(window=window), one)
    assert [done.cached_tokens for done in second] == [12, 0], "other rows find their prefixes"


@pytest.mark.parametrize(
    "name", ["none", "right", "ragged", "bad", "lookup", "eagle3", "parallel", "block", "dflash2", "tree", "window", "pard"]
)
def test_a_row_fails_alone_whatever_drafts(name: str) -> None:
    requests = prompts(16, SamplingParams())
    check(run(name, requests), requests)


@pytest.mark.parametrize("name", ["none", "right", "ragged", "bad", "lookup", "eagle3", "parallel"])
def test_a_row_of_a_model_with_recurrent_layers_fails_alone(name: str) -> None:
    """Its state and the rings of its inputs are not finite either; rows that follow in its slot do not read them."""
    requests = prompts(16, SamplingParams())
    check(run(name, requests, recurrent=True), requests, recurrent=True)


FORBIDDEN = tuple((token,) for token in range(VOCAB))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_error_of_a_row_without_any_token_left_says_which_rules_left_none(temperature: float) -> None:
    rows = [request(0, [7], cap=3), request(1, [7], cap=3, sampling=SamplingParams(temperature=temperature, bad_words=FORBIDDEN))]
    engine = make_engine(healthy_target(recurrent=False), NoDrafter(), packed(SLOTS), device=DEVICE)
    healthy, failed = sorted(engine.run(iter(rows)), key=lambda done: done.row_index)
    assert healthy.error is None
    assert (error := failed.error) is not None
    assert "NaN or +inf, or no finite value of a token that its bad_words do not forbid; check the weights" in error.message


def test_each_rule_that_can_leave_no_token_is_named() -> None:
    allows = "its schema, regex, choice or grammar allows (or another token was drawn)"
    assert tokens_left(SamplingMode(constrained=True)) == f" of a token that {allows}"
    assert tokens_left(SamplingMode(constrained=True, options=frozenset({"bad_words"}))) == (
        f" of a token that its bad_words do not forbid and {allows}"
    )
    assert not tokens_left(SamplingMode(penalties=True, min_tokens=True, options=frozenset({"logit_bias"})))


DRAWS = SamplingParams(temperature=1.0)
FILTERS = SamplingParams(temperature=0.8, top_k=5, top_p=0.9)
PENALTIES = SamplingParams(repetition_penalty=1.3, presence_penalty=0.2)


@pytest.mark.second
@pytest.mark.parametrize(("name", "sampling"), covering(["none", "right", "tree"], [DRAWS, FILTERS, PENALTIES]))
def test_a_row_fails_alone_however_tokens_are_chosen(name: str, sampling: SamplingParams) -> None:
    requests = prompts(16, sampling)
    check(run(name, requests), requests)


OPTIONS = ({"options": RoundOptions(argmax=False)}, {"logprobs": 2}, {"options": RoundOptions(uniform_slots=False)})


@pytest.mark.parametrize(("name", "options"), covering(["none", "right", "tree"], OPTIONS))
def test_a_row_fails_alone_with_every_option(name: str, options: dict[str, Any]) -> None:
    requests = prompts(16, SamplingParams())
    check(run(name, requests, **options), requests)


def test_masks_are_legitimate_and_a_row_all_of_whose_tokens_are_masked_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """min_new_tokens forbids stop ids; with every id a stop id nothing can be chosen."""
    some = request(0, [1, 2, 3], cap=6, stop_ids=tuple(range(16)), min_new_tokens=6)
    requests = [some, request(1, [1, 2, 3], cap=6)]
    done = run("none", requests)
    assert done["r0"].error is None
    assert done["r0"].token_ids is not None
    assert min(done["r0"].token_ids) >= 16
    target = Target.load(Path(), tiny_target(window=5).spec, dtype=torch.float64, device=DEVICE, dummy=True)
    logits = target.logits
    masked = torch.arange(16, VOCAB, device=DEVICE)
    monkeypatch.setattr(target, "logits", lambda hidden: logits(hidden).index_fill(1, masked, -float("inf")))
    engine = make_engine(target, NoDrafter(), packed(2), device=DEVICE)
    found = {one.request_id: one.error.code if one.error else None for one in engine.run(iter([some]))}
    assert found == {"r0": NON_FINITE}


def test_a_stop_before_the_failure_ends_the_row_normally() -> None:
    """In the same round: the drafts confirm the token and the stop before it."""
    for healthy in prompts(60, SamplingParams(temperature=1.0)):
        tokens = plain_tokens(tiny_target(window=5), healthy)
        failure = tokens.index(BAD) + 1 if BAD in tokens else 0
        if failure > 2 and tokens.index(tokens[failure - 2]) == failure - 2 and BAD not in healthy.prompt_ids:
            break
    by_id = replace(healthy, request_id="id", stop_ids=(tokens[failure - 2],))
    by_text = replace(healthy, request_id="text", stop=(decode([tokens[failure - 2]]),))
    done = run("right", [healthy, by_id, by_text])
    assert done[healthy.request_id].error is not None
    for name in ("id", "text"):
        assert done[name].finish_reason == "stop"
        assert done[name].token_ids.tolist() == tokens[: failure - 1]  # type: ignore[union-attr]


@pytest.mark.second
def test_a_job_writes_the_error_row_and_verify_compares_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through journal, shard and statistics; the neighbours are those of a job without the row."""
    model = make_tokenizer(make_checkpoint(tmp_path / "model", "llama", dtype=torch.float64))
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][319] = float("nan")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    rows = [{"id": f"r{i}", "prompt_ids": [5 + i, 319 if i == 3 else 6, 7]} for i in range(8)]
    outputs = {}
    for name, chosen in (("all", rows), ("healthy", [row for row in rows if row["id"] != "r3"])):
        data = tmp_path / f"{name}.parquet"
        pl.DataFrame(chosen).write_parquet(data)
        arguments = [
            f"model.path={model}", "model.dtype=float64", f"input.path={data}", f"output.dir={tmp_path / name}", "draft=lookup",
            "decode.max_new_tokens=6", "output.token_ids=true", "packing.max_num_seqs=3", "decode.n=2", "decode.temperature=1",
            "input.max_error_fraction=0.2",  # one of eight rows, whose two completions are errors
        ]
        assert run_module.main(arguments) == 0
        outputs[name] = pl.read_parquet(tmp_path / name / "data").sort("request_id", "sample_index")
    errors = outputs["all"].filter(pl.col("status") == "error")
    assert errors["request_id"].to_list() == ["r3", "r3"]
    assert {error["code"] for error in errors["error"]} == {NON_FINITE}
    assert all("position 3 (output token 0)" in error["message"] for error in errors["error"])
    columns = ["request_id", "sample_index", "token_ids"]
    healthy = outputs["all"].filter(pl.col("status") != "error").select(columns)
    assert healthy.rows() == outputs["healthy"].select(columns).rows()
    capsys.readouterr()
    assert cli.main(["verify", str(tmp_path / "all")]) == 0
    assert "14 completions decoded again one at a time and without speculation: 0 differ" in capsys.readouterr().out
