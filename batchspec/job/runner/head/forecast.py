"""Whether it pays to train a head for what is left of a job, and to draft with it: times by the cost model of `plan`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchspec.config.draft_auto import with_head
from batchspec.job.load.memory import expected_drafts, plan_batch
from batchspec.job.prepare import Job, open_chosen
from batchspec.packed_batch import PackedBatch
from batchspec.packing.expected_drafts import accepted_of_few
from batchspec.packing.planner import Demand, forecast
from batchspec.packing.rates import Rates
from batchspec.records import LEAST_TEMPERATURE

ASSUMED_ACCEPTED = 1.5
"""Accepted drafts of a row and round, of 3 or more, of a head that the job trains. One that was trained for six minutes on 17.5 M
tokens of answers of SmolLM2-135M accepted 2.16 of 3 on prompts of the same kind and 1.49 on others (jobs/pages/NOTEBOOK.md,
"Drafters")."""
SAMPLED_FACTOR = 3.0
"""Drafts that rounds of sampled rows accept at most, relative to held-out answers. The one job that was measured, with a
temperature of 1, accepted 0.86 in its rounds and 0.36 on held-out answers."""
Batches = tuple[PackedBatch, PackedBatch]
RELOAD_S = 120.0
"""Seconds that loading a model and capturing its rounds is assumed to take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """How long the decoding of what is left takes."""

    without_s: float
    """As it is."""
    with_s: float
    """With a head, what comes before it included."""
    before: float
    """Drafts that a round accepts as it is."""
    accepted: float
    """With the head."""

    @property
    def pays(self) -> bool:
        return self.with_s < self.without_s


def accepted_by_rounds(job: Job, held_out: float, draft_len: int) -> float:
    """Drafts of a row that rounds with `draft_len` are taken to accept, from those of answers that were held out.

    They were counted with the likeliest drafts (`heads/evaluate.py`). Rows that are sampled draw their drafts with the noise of
    the target's draw, which are accepted more often. So for a job with a temperature (columns of its input are not looked at) it
    is SAMPLED_FACTOR times as many, but no more than is assumed of any head. A head whose rounds accept less is let go once it
    has lost time.
    """
    if job.config.decode.temperature < LEAST_TEMPERATURE:
        return held_out
    return max(held_out, min(SAMPLED_FACTOR * held_out, accepted_of_few(ASSUMED_ACCEPTED, draft_len)))


def with_own_head(job: Job, path: str | None) -> Job:
    """The job that drafts with the head at `path`; None: with one of the usual shape, for forecasts. Raises as `open_chosen`."""
    config = with_head(job.config, path)
    return replace(job, config=config, drafter=open_chosen(config, job.spec, ""), why_drafter="")


def batches_of(job: Job, demand: Demand, rates: Rates) -> Batches:
    """The batches that a job plans for itself as it drafts now and with a head. Nothing is in the device's memory yet.

    Raises CapacityError if not even one row fits.
    """
    return plan_batch(job, demand, rates), plan_batch(with_own_head(job, None), demand, rates)


def prospect(
    job: Job, batches: Batches, demand: Demand, rates: Rates, *, before: float | None = None, accepted: float | None = None,
    cost_s: float = RELOAD_S, runs: int = 1, others_decode: bool = False,
) -> Prospect:
    """The prospect of `demand`, which `runs` of the same speed divide.

    job       as it drafts now; batches: of `batches_of`
    before    drafts that its rounds accept; None: as many as `plan` assumes
    accepted  drafts that the head's rounds accept, if they verify K; None: as many as are assumed
    cost_s    seconds that pass before the head drafts, in which nothing is decoded
    others_decode  only this run decodes nothing in this time, because it trains; the others go on
    """
    drafts = expected_drafts(job)
    if before is not None:
        drafts = replace(drafts, accepted=min(before, float(drafts.counts[-1])))
    of_head = expected_drafts(with_own_head(job, None))
    most = of_head.counts[-1]
    of_head = replace(of_head, accepted=accepted_of_few(ASSUMED_ACCEPTED, most) if accepted is None else min(accepted, most))
    without_s, with_s = (
        forecast(
            batch, job.spec, rates, demand, found, dtype=job.dtype, correlation=job.config.packing.expert_correlation
        ).decode_s
        for batch, found in zip(batches, (drafts, of_head), strict=True)
    )
    left = max(0.0, 1.0 - (runs - 1) * cost_s / without_s) if others_decode and without_s else 1.0
    return Prospect(
        without_s=without_s / runs, with_s=cost_s + left * with_s / runs, before=drafts.accepted, accepted=of_head.accepted
    )


def with_training(job: Job, batches: Batches, demand: Demand, rates: Rates) -> Prospect:
    """The prospect of a whole job that trains its head, as `plan` tells it: nothing of it is measured yet."""
    own = job.config.draft.train
    tokens = demand.num_completions * demand.output_tokens
    whole = prospect(job, batches, demand, rates, cost_s=0.0)
    share = min(1.0, own.tokens / max(1.0, tokens))
    with_s = share * whole.without_s + training_s(own.minutes) + (1.0 - share) * whole.with_s
    return replace(whole, with_s=with_s)


def training_s(minutes: float) -> float:
    """Seconds from the last round before a training to the first one after it: the model is loaded twice."""
    return 60.0 * minutes + 2 * RELOAD_S
