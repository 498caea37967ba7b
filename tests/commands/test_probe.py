"""`batchspec probe`: of the ways in which a head's config may be read it names the one that it was trained with."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from batchspec import cli
from batchspec.draft.weights import dummy_spec
from batchspec.heads.probe import Found, InContext, Probe, lines_of
from batchspec.model.spec import load_spec
from batchspec.model.target import Target
from tests.helpers.eagle_reference import Design
from tests.helpers.engines import full_logits
from tests.helpers.heads import Tensors, distilled_tensors, write_head
from tests.helpers.models import make_checkpoint

VOCAB, ROWS, TOKENS = 48, 5, 18
TAPS = (2, 3, 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of five layers, whose residual stream changes at each of them, and prompts beside it."""
    folder = tmp_path_factory.mktemp("probe") / "model"
    make_checkpoint(
        folder, "llama", vocab=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=5, initializer_range=0.5
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB, 3 + i).tolist() for i in range(ROWS)]
    pl.DataFrame({"prompt_ids": prompts}).write_parquet(folder.parent / "prompts.parquet")
    return folder


@cache
def distilled(folder: Path, **design: Any) -> tuple[Design, Tensors]:
    """A head of this design that knows the model's greedy answers to the prompts."""
    target = Target.load(folder, load_spec(folder), dtype=torch.float32, device=torch.device("cpu"))
    rows = []
    for prompt in pl.read_parquet(folder.parent / "prompts.parquet")["prompt_ids"].to_list():
        ids = list(prompt)
        for _ in range(TOKENS):
            ids.append(int(full_logits(target, ids).argmax()))
        rows.append(ids)
    known: dict[str, Any] = {"hidden": 16, "target_hidden": 16, "vocab": VOCAB, "draft_vocab": VOCAB, "taps": TAPS}
    made = Design(**(known | design))
    return made, distilled_tensors(target, made, rows, steps=80)


def probed(model: Path, head: Path, capsys: Any, *words: str) -> list[str]:
    prompts = str(model.parent / "prompts.parquet")
    assert cli.main(["probe", str(model), str(head), prompts, "--tokens", str(TOKENS), *words]) == 0
    lines: list[str] = capsys.readouterr().out.splitlines()
    return lines


def with_config(head: Path, **changes: Any) -> Path:
    stored = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**stored, **changes}))
    return head


@pytest.mark.second
def test_a_head_that_is_read_as_it_was_trained_stays_as_it_is(model: Path, tmp_path: Path, capsys: Any) -> None:
    lines = probed(model, write_head(tmp_path / "h", *distilled(model)), capsys)
    assert lines[0] == f"probe     {ROWS} prompts, greedy; accepted of drafts 1 .. 3, each given those before it"
    shares = [float(line.split()[0]) for line in lines[1:8]]
    assert shares[0] > 0.7
    assert shares[0] == max(shares)
    assert min(shares) < shares[0] - 0.2
    said = "boundaries 2, 3, 4, residual from the feature without a norm, fed back before the final norm"
    assert lines[8] == f"verdict   as config.json is read: {said}"
    assert lines[9].startswith("context   ")
    assert len(lines) == 10


@pytest.mark.second
def test_layer_ids_that_mean_outputs_are_found(model: Path, tmp_path: Path, capsys: Any) -> None:
    head = write_head(tmp_path / "h", *distilled(model, taps=(3, 4, 5)))
    verdict = probed(model, with_config(head, eagle_aux_hidden_state_layer_ids=[2, 3, 4]), capsys)[-2]
    assert verdict.startswith("verdict   the head was trained with boundaries 3, 4, 5, ")
    assert verdict.endswith("; set draft.aux_layers=output")


@pytest.mark.second
def test_ids_that_begin_with_1_and_mean_inputs_are_found(model: Path, tmp_path: Path, capsys: Any) -> None:
    head = write_head(tmp_path / "h", *distilled(model, taps=(1, 2, 3)))
    verdict = probed(model, head, capsys)[-2]
    assert verdict.startswith("verdict   the head was trained with boundaries 1, 2, 3, ")
    assert verdict.endswith("; set draft.aux_layers=input")


@pytest.mark.second
def test_a_residual_stream_from_the_normed_feature_is_found(model: Path, tmp_path: Path, capsys: Any) -> None:
    head = write_head(tmp_path / "h", *distilled(model, norm_before_residual=True))
    verdict = probed(model, with_config(head, norm_before_residual=False), capsys)[-2]
    assert verdict.endswith("; set norm_before_residual true in config.json")


@pytest.mark.second
def test_a_head_of_another_model_is_none_of_them(model: Path, tmp_path: Path, capsys: Any) -> None:
    design, tensors = distilled(model)
    rng = torch.Generator().manual_seed(0)
    noise = {name: torch.randn(t.shape, generator=rng) if t.is_floating_point() else t for name, t in tensors.items()}
    verdict = probed(model, write_head(tmp_path / "h", design, noise), capsys)[-2]
    assert verdict.startswith("verdict   none of them: ")
    assert verdict.endswith("is the head made for this model?")


@pytest.mark.second
def test_acceptance_is_measured_after_longer_contexts_of_the_same_prompts(model: Path, tmp_path: Path, capsys: Any) -> None:
    """The head knows the answers by heart and nothing else: after other rows its drafts are wrong."""
    head = write_head(tmp_path / "h", *distilled(model))
    *_, context, warning = probed(model, head, capsys, "--contexts", "4096,40,90")
    assert " after 5 tokens, " in context
    assert " after 40 tokens, " in context
    assert context.endswith(" after 90 tokens")  # the model goes no further
    assert warning.startswith("warning   first drafts collapse in long contexts: draft.window=512 draft.sink_tokens=4")


def found(*accepted: tuple[float, ...], fed: tuple[float, ...] | None = None, contexts: tuple[float, ...] = (0.6,)) -> Probe:
    """A made-up probe: the first way is the stored one, boundaries 2, 4, 5."""
    spec = replace(dummy_spec(_spec(), draft_vocab_size=9), aux_layer_ids=(2, 4, 5))
    specs = [spec, replace(spec, norm_before_residual=True), replace(spec, aux_layer_ids=(3, 5, 6))]
    return Probe(
        ways=tuple(Found(spec=s, accepted=a, rounds=4000) for s, a in zip(specs, accepted, strict=False)),
        fed=None if fed is None else Found(spec=replace(spec, feed_normed=True), accepted=fed, rounds=4000),
        readings={(2, 4, 5): "auto"}, contexts=tuple(InContext(tokens=10**i, accepted=a) for i, a in enumerate(contexts)),
        num_rows=64,
    )


@cache
def _spec() -> Any:
    from tests.helpers.engines import tiny_target

    return tiny_target().spec


def test_a_small_lead_is_no_verdict_and_a_clear_one_is() -> None:
    few = found((0.6, 0.5, 0.4), (0.7, 0.5, 0.4))
    assert replace(few, ways=tuple(replace(way, rounds=50) for way in few.ways)).best.accepted[0] == 0.6
    near, clear = found((0.6, 0.5, 0.4), (0.62, 0.5, 0.4)), found((0.6, 0.5, 0.4), (0.7, 0.5, 0.4))
    assert near.best is near.ways[0]
    assert clear.best is clear.ways[1]
    fed = found((0.6, 0.3, 0.2), (0.61, 0.3, 0.2), fed=(0.6, 0.5, 0.4))
    assert fed.best is fed.fed
    assert lines_of(fed)[-2].endswith("; set norm_output true in config.json")


def test_boundaries_that_no_reading_gives_are_named_whole() -> None:
    lines = lines_of(found((0.1, 0.1, 0.1), (0.1, 0.1, 0.1), (0.6, 0.5, 0.4)))
    assert lines[-2].endswith("; set eagle_aux_hidden_state_layer_ids [3, 5, 6] in config.json and draft.aux_layers=input")


def test_a_warning_takes_a_third_less_at_the_longest_context() -> None:
    assert not lines_of(found((0.6, 0.5, 0.4), contexts=(0.6, 0.3, 0.5)))[-1].startswith("warning")
    assert lines_of(found((0.6, 0.5, 0.4), contexts=(0.6, 0.5, 0.3)))[-1].startswith("warning")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["m"], "the following arguments are required: HEAD; `batchspec probe --help` lists its arguments"),
        (["m", "h", "--tokens", "2"], "probe --tokens 2 must be at least 4"),
        (["m", "h", "--contexts", "1k"], "probe --contexts 1k must be lengths in tokens"),
        (["./nowhere", "h"], "MODEL=./nowhere: no such folder"),
    ],
)
def test_what_cannot_be_probed_is_one_line(words: list[str], said: str, capsys: Any) -> None:
    assert cli.main(["probe", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
