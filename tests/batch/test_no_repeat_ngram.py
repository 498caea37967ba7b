"""no_repeat_ngram, of the job and of a row: no n-gram of the output comes twice in the window. That drafts, K, preemption and
resumption change no token is tested with the other ways to sample (test_lossless.py), forced tokens in test_thinking.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec import run
from batchspec.batch.device_batch import DeviceBatch
from batchspec.commands import verify
from batchspec.config.compose import compose
from batchspec.config.decode_schema import NoRepeatNgramConfig
from batchspec.draft.base import Drafter
from batchspec.engine.rounds.round import Round
from batchspec.errors import BadRow, ConfigError
from batchspec.job.prepare import open_job
from batchspec.model.target import Target
from batchspec.packing.no_repeat_ngram import read_no_repeat_ngram
from batchspec.records import MAX_LISTED, Completion, Request, SamplingParams
from tests.batch.test_bad_words import check_answers, outputs, words_of
from tests.batch.test_logit_rules import ALL, TARGET, tokens
from tests.batch.test_logit_rules import run as decoded
from tests.helpers.engines import VOCAB, plain_tokens, request
from tests.helpers.ngrams import forbidden
from tests.helpers.runs import make_model
from tests.helpers.stand_in_gpu import stand_in_gpu

GROUP = "decode.no_repeat_ngram"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model")


def breaks(output: Sequence[int], rule: tuple[int, int, Sequence[int]]) -> bool:
    return any(token in forbidden(output[:i], rule) for i, token in enumerate(output))


@pytest.mark.second
def test_outputs_of_a_job_repeat_no_ngram(model: Path, tmp_path: Path) -> None:
    """Of the job, of rows of their own in every form, and of rows that turn it off; with several samples of a row."""
    prompts = [f"Say {i} again and again" for i in range(5)]
    rows: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
    assert run.main(words_of(model, tmp_path, rows, "draft=none")) == 0
    free = [row["token_ids"] for row in outputs(tmp_path)]
    of_job = (2, 100, ())
    assert any(breaks(line, of_job) for line in free), "the model repeats nothing by itself: this test shows nothing"
    for drafter in ("none", "lookup"):
        assert run.main(words_of(model, tmp_path, rows, f"draft={drafter}", f"{GROUP}.ngram_size=2")) == 0
        kept = [row["token_ids"] for row in outputs(tmp_path)]
        assert not any(breaks(line, of_job) for line in kept)
    listed = max({token for line in free for token in line}, key=lambda token: sum(line.count(token) for line in free))
    own_map, without = {"ngram_size": 3, "window_size": 6}, {"ngram_size": 1, "whitelist_token_ids": [listed]}
    texts = [None, "0", "1", json.dumps(own_map), json.dumps(without)]
    rules: list[Any] = [of_job, None, (1, 100, ()), (3, 6, ()), (1, 100, (listed,))]
    own = [{"prompt": prompt, "no_repeat_ngram": text} for prompt, text in zip(prompts, texts, strict=True)]
    assert run.main(words_of(model, tmp_path, own, "draft=lookup", f"{GROUP}.ngram_size=2")) == 0
    for row, before, always, rule in zip(outputs(tmp_path), free, kept, rules, strict=True):
        assert row["token_ids"] == (before if rule is None else always if rule == of_job else row["token_ids"])
        assert rule is None or not breaks(row["token_ids"], rule)
    assert verify.main([str(tmp_path / "out"), "--rows", "0"]) == 0
    sampled = ("decode.temperature=0.8", "decode.n=3", f"{GROUP}.ngram_size=2", f"{GROUP}.window_size=10")
    found = []
    for drafter in ("none", "lookup"):
        assert run.main(words_of(model, tmp_path, rows, f"draft={drafter}", *sampled)) == 0
        found.append([row["token_ids"] for row in outputs(tmp_path)])
    assert found[0] == found[1]
    assert len(found[0]) == 15
    assert not any(breaks(line, (2, 10, ())) for line in found[0])


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (20, (20, 100, ())), (20.0, (20, 100, ())), ("20", (20, 100, ())), (0, None), ({"ngram_size": 0, "window_size": 5}, None),
        ({"ngram_size": 3, "window_size": 3}, (3, 3, ())), ('{"ngram_size": 3, "window_size": null}', (3, 100, ())),
        ({"ngram_size": 2, "whitelist_token_ids": [9, 4.0, 9]}, (2, 100, (4, 9))), (NoRepeatNgramConfig(), None),
        (NoRepeatNgramConfig(ngram_size=5, window_size=50, whitelist_token_ids=[1]), (5, 50, (1,))),
    ],
)
def test_a_rule_is_a_number_or_a_map(value: Any, rule: tuple[int, int, tuple[int, ...]] | None) -> None:
    assert read_no_repeat_ngram(value, None, 10) == rule


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (-1, "no_repeat_ngram.ngram_size=-1 must be in 0 .. 1024; 0 is off"),
        (2.5, "no_repeat_ngram.ngram_size=2.5 must be a whole number"),
        (True, "no_repeat_ngram must be an integer or an object, not true or false"),
        ("[2]", "no_repeat_ngram must be an integer or an object, not a list"),
        ("{2", "no_repeat_ngram is text, and "),
        ({"size": 2}, "no_repeat_ngram has 'size', which is none of ngram_size, window_size, whitelist_token_ids; take it out"),
        ({"window_size": 2}, "no_repeat_ngram has no ngram_size, without which it forbids nothing"),
        ({"ngram_size": 9, "window_size": 8}, "window_size=8 is below ngram_size=9, so that no n-gram fits; raise it"),
        ({"ngram_size": 2, "window_size": 0}, "no_repeat_ngram.window_size=0 must be in 1 .. 1000000"),
        ({"ngram_size": 2, "whitelist_token_ids": 5}, "whitelist_token_ids must be a list of token ids, not a number"),
        ({"ngram_size": 2, "whitelist_token_ids": ["5"]}, "whitelist_token_ids='5' must be a whole number"),
        ({"ngram_size": 2, "whitelist_token_ids": [5, 100]}, "names token 100, outside the vocabulary 0 .. 99; remove it"),
        ({"ngram_size": 2, "whitelist_token_ids": [-1, 5]}, "names token -1, outside the vocabulary"),
        ({"ngram_size": 2, "whitelist_token_ids": list(range(MAX_LISTED + 1))}, "has 65 tokens, at most 64 are supported"),
    ],
)
def test_what_is_no_rule_is_refused(value: Any, said: str) -> None:
    with pytest.raises(BadRow) as caught:
        read_no_repeat_ngram(value, None, 100)
    assert said in str(caught.value)
    assert caught.value.code == "bad_parameter"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("ngram_size=8", "window_size=7"), r"^decode.no_repeat_ngram.window_size=7 is below ngram_size=8"),
        (("window_size=7",), r"^decode.no_repeat_ngram.window_size=7 has no effect with ngram_size=0, and cells of a column"),
        (("whitelist_token_ids=[3]",), r"^decode.no_repeat_ngram.whitelist_token_ids=\[3\] has no effect with ngram_size=0"),
        (("ngram_size=2", "whitelist_token_ids=[320]"), r"^decode.no_repeat_ngram.whitelist_token_ids names token 320, outside"),
    ],
)
def test_keys_of_a_job_that_fit_nothing_are_refused(keys: tuple[str, ...], said: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        open_job(compose(words_of(model, tmp_path, [{"prompt": "a"}], *(f"{GROUP}.{key}" for key in keys))))


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv"])
def test_rules_of_rows_in_files_without_types(name: str, model: Path, tmp_path: Path) -> None:
    """A column may hold numbers and objects in JSON lines, and text in CSV; a malformed value makes an error row."""
    values = [20, None, {"ngram_size": 3, "window_size": 50}, "x"]
    lines = [json.dumps({"prompt": f"p{i}", "no_repeat_ngram": value}) for i, value in enumerate(values)]
    if name == "in.csv":
        lines = ["prompt,no_repeat_ngram", "p0,20", "p1,", 'p2,"{""ngram_size"": 3, ""window_size"": 50}"', "p3,x"]
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    job = open_job(compose([*words_of(model, tmp_path, [{"prompt": "a"}]), f"input.path={tmp_path / name}"]))
    *made, bad = (one for shard in job.source.shards(4) for one in job.admission.admit(shard))
    assert [one.sampling.no_repeat_ngram for one in made if isinstance(one, Request)] == [(20, 100, ()), None, (3, 50, ())]
    assert isinstance(bad, Completion)
    assert bad.error is not None
    assert "no_repeat_ngram is text, and it is not JSON" in bad.error.message


@pytest.mark.second
@pytest.mark.parametrize("drafter", ["none", "lookup"])
def test_a_row_whose_constraint_leaves_a_repeated_ngram_alone_is_an_error_for_good(model: Path, drafter: str) -> None:
    """For finite and lazy constraints. The other rows of the call are decoded."""
    alone = "of 1 that the regex allows there the n-grams of no_repeat_ngram forbid 1; change one of these, or drop the row"
    rows: list[tuple[dict[str, Any], str | None, str]] = [
        ({"regex": "7777", "no_repeat_ngram": "2"}, None, f"regex: no token is left for output token 3: {alone}"),
        ({"regex": "7777", "no_repeat_ngram": "4"}, "7777", ""),
        ({"regex": "7(8|9)7(8|9)7", "no_repeat_ngram": "1"}, None, f"output token 3: {alone}"),
        ({"grammar": 'start: "7" start "8" | "7"', "no_repeat_ngram": "1"}, "7", ""),
        ({"grammar": 'start: "a" start "b" | "77"', "no_repeat_ngram": "1"}, None, "the n-grams of no_repeat_ngram forbid"),
        ({"regex": "7777", "no_repeat_ngram": None}, "7777", ""),
    ]
    check_answers(model, drafter, rows)


RULE = (2, 40, (5,))


def note_drafts(drafter: Drafter, patch: pytest.MonkeyPatch) -> list[tuple[list[int], int]]:
    """(output and drafts before it, draft) of every draft that is verified in live rows; of a tree every node."""
    found = list[tuple[list[int], int]]()

    def note(rows: DeviceBatch, row: int, line: list[int], parents: list[int]) -> None:
        output = rows.tokens[row, rows.prompt_len[row] : rows.num_tokens[row]].tolist()
        paths: list[list[int]] = [[]]
        for token, parent in zip(line, parents, strict=True):
            found.append((output + paths[parent], token))
            paths.append([*paths[parent], token])

    draft, propose = Round._draft, drafter.propose

    def drafted(self: Round, rows: DeviceBatch, *rest: Any) -> Any:
        drafts = draft(self, rows, *rest)
        for row in rows.live.nonzero().flatten().tolist():
            line = drafts.ids[row, : int(drafts.length[row])].tolist()
            note(rows, row, line, [*range(len(line))])
        return drafts

    def proposed(rows: DeviceBatch, draft_ids: Tensor, *rest: Any) -> Any:
        parents = propose(rows, draft_ids, *rest)
        assert parents is not None
        for row in rows.live.nonzero().flatten().tolist():
            note(rows, row, draft_ids[row].tolist(), parents[row].tolist()[1:])
        return parents

    if drafter.name == "tree":
        patch.setattr(drafter, "propose", proposed)
    else:
        patch.setattr(Round, "_draft", drafted)
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", [name for name in ALL if name != "none"])
def test_no_drafter_drafts_a_token_that_is_forbidden(name: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a lookup, which finds n-grams that came before; the tokens are those of the definition."""
    own, usual = (SamplingParams(temperature=temperature, no_repeat_ngram=rule) for rule in (RULE, None))
    requests = [request(i, [i, 5, 30, i, 5], cap=36, sampling=own) for i in range(4)]
    drafter = ALL[name]()
    drafted = note_drafts(drafter, monkeypatch)
    found = tokens(decoded(drafter, requests))
    assert found == {each.row_index: plain_tokens(TARGET(), each) for each in requests}
    assert drafted
    assert not any(token in forbidden(before, RULE) for before, token in drafted)
    monkeypatch.undo()
    free = tokens(decoded(ALL[name](), [request(i, [i, 5, 30, i, 5], cap=36, sampling=usual) for i in range(4)]))
    assert any(breaks(line, RULE) for line in free.values())


def test_masks_of_a_product_leave_the_tokens_that_the_logits_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no other rule masks logits, a GPU chooses the tokens of greedy rows in the output product and writes no logits."""
    chosen, told = Target.greedy_sample, [0]

    def masked(self: Target, hidden: Tensor, vocab: int | None = None, *, allowed: Any = None, **flags: Any) -> Tensor:
        if allowed is None:
            return chosen(self, hidden, vocab, **flags)
        masks, lines = allowed
        told[0] += int((lines >= 0).sum())
        ids = torch.arange(VOCAB, device=hidden.device)
        gone = ((masks[lines.clamp(min=0).long()][:, ids >> 5] >> (ids & 31).int()) & 1 == 0) & (lines >= 0)[:, None]
        return self.logits(hidden).masked_fill(gone, -torch.inf).argmax(1).int()

    monkeypatch.setattr(Target, "greedy_sample", masked)
    monkeypatch.setattr(Target, "masks_in_product", lambda *_: True)
    requests = [request(i, [i, 5], cap=24, sampling=SamplingParams(no_repeat_ngram=RULE if i % 3 else None)) for i in range(6)]
    for name in ("none", "lookup", "eagle3", "tree"):
        assert tokens(decoded(ALL[name](), requests)) == {each.row_index: plain_tokens(TARGET(), each) for each in requests}
    assert told[0] > 20


@pytest.mark.second
@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted; test_gpu_engine.py runs on a GPU")
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["none", "lookup", "eagle3", "parallel", "tree", "pard", "hybrid"])
def test_the_kernels_of_a_gpu_forbid_and_cut_the_same_in_whole_rounds(name: str, temperature: float) -> None:
    """Beside rows without the rule, after the first rounds of the others."""
    rules = (RULE, None, (1, 6, ()), (3, 90, ()))
    samplings = [SamplingParams(temperature=temperature, no_repeat_ngram=rule) for rule in rules]
    requests = [request(i, [i, 5, 30, i, 5], cap=14, sampling=sampling) for i, sampling in enumerate(samplings)]
    with stand_in_gpu(torch.float64, torch.float32) as launches:
        found = tokens(decoded(ALL[name](), requests))
    assert found == {each.row_index: plain_tokens(TARGET(), each) for each in requests}
    assert launches["forbid_ngrams_kernel"] > 5
    assert bool(launches["cut_ngrams_kernel"]) == (name in ("lookup", "hybrid"))
