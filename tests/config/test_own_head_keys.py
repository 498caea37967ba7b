"""The keys of a head that a job trains for itself (draft.train.*): what they are, and what is refused by name."""

from __future__ import annotations

import pytest

import batchspec
from batchspec.config.compose import compose
from batchspec.config.draft_auto import with_drafter, with_head, without_drafts
from batchspec.config.schema import RunConfig
from batchspec.errors import ConfigError
from batchspec.warm.options import warm_config

JOB = ["model.path=model", "input.path=prompts.parquet", "output.dir=out"]


def config(*words: str) -> RunConfig:
    return with_drafter(compose([*JOB, "draft=trained", *words]), has_mtp=False)[0]


def test_before_its_head_a_job_drafts_as_auto_does() -> None:
    assert config().draft.name == "lookup"
    assert with_drafter(compose([*JOB, "draft=trained"]), has_mtp=True)[0].draft.name == "mtp"
    assert config("draft.name=none").draft.name == "none"


def test_a_short_job_that_may_train_a_head_drafts_nothing_before_it() -> None:
    short = without_drafts(config("draft.train.minutes=5"))
    assert short is not None
    assert (short.draft.name, short.draft.train.kind, short.draft.train.minutes) == ("none", "eagle3", 5.0)
    assert without_drafts(config("draft.corpus_tokens=100")) is None


@pytest.mark.parametrize(("kind", "usual"), [("eagle3", 3), ("block", 5)])
def test_the_head_has_its_usual_k_or_that_of_the_job(kind: str, usual: int) -> None:
    own = f"draft.train.kind={kind}"
    head = with_head(config(own, "draft.lengths=fixed"), "HEAD").draft
    assert (head.name, head.path, head.num_speculative_tokens, head.lengths) == (kind, "HEAD", usual, "fixed")
    assert head.train.kind is None, "the job that drafts with it is one with a head, to be verified and continued as such"
    assert with_head(config(own, "draft.num_speculative_tokens=4"), None).draft.num_speculative_tokens == 4
    more = ("draft.window=512", "draft.sink_tokens=4", "draft.cache_dtype=fp8")
    kept = with_head(config(own, "draft.name=mtp", *more), None).draft
    assert (kept.window, kept.sink_tokens, kept.cache_dtype) == (512, 4, "fp8")
    assert with_head(config(own, "draft.name=none"), None).draft.num_speculative_tokens == usual


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["draft=lookup", "draft.train.minutes=5"], "draft.train.minutes=5.0 has no effect without draft.train.kind"),
        (["draft=lookup", "draft.train.store=heads"], "draft.train.store=heads has no effect without draft.train.kind"),
        (["draft=eagle3", "draft.path=HEAD", "draft.train.kind=eagle3"], "with draft=eagle3, which has a head already"),
        (["draft=hybrid", "draft.path=HEAD", "draft.train.kind=block"], "with draft=hybrid, which has a head already"),
        (["model.load_format=dummy"], "with model.load_format=dummy: random weights"),
        (["model.adapter=ADAPTER"], "with LoRA adapters is not supported: a training reads the model without them"),
        (["model.adapters={a: ADAPTER}", "input.columns={adapter: a}"], "with LoRA adapters is not supported"),
        (["cluster.tensor_parallel=2"], "with cluster.tensor_parallel=2 is not supported: a head is trained on one GPU"),
        (["cluster.tensor_parallel=auto"], "with cluster.tensor_parallel=auto is not supported"),
        (["draft.name=lookup", "draft.synthetic=[0.5]", "draft.num_speculative_tokens=1"], "with draft.synthetic: accepted"),
        (["draft.train.kind=block", "draft.num_speculative_tokens=17"], "a block has at most 16 tokens; lower it"),
        (["draft.train.store=s3://bucket/heads"], "heads are kept in a local folder; name one"),
        (["draft.train.minutes=0"], "draft.train.minutes=0.0 must be above 0"),
        (["draft.train.tokens=10"], "draft.train.tokens=10 must be at least 1000"),
        (["decode.score=prompts"], "drafts nothing; remove the keys of draft"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(words: list[str], said: str) -> None:
    first = [] if words[0].startswith("draft=") else ["draft=trained"]
    with pytest.raises(ConfigError) as caught:
        compose([*JOB, *first, *words])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_calls_from_python_without_a_job_train_no_head() -> None:
    with pytest.raises(ConfigError, match=r"^draft\.train\.kind=eagle3 is not for batchspec\.Engine: it trains no head"):
        warm_config({"model.path": "model", "draft": "trained"})
    with pytest.raises(ConfigError, match=r"^draft\.train\.kind=eagle3 is not for batchspec\.generate: without output\.dir"):
        batchspec.generate([{"prompt": "a"}], overrides=["model.path=model", "draft=trained"])
