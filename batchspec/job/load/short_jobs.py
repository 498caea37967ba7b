"""draft=auto of a job that is too short for drafts: preparing their rounds would take longer than they save."""

from __future__ import annotations

from dataclasses import replace

from batchspec.config.draft_auto import without_drafts
from batchspec.job.load.memory import expected_drafts, forecast_of, plan_batch
from batchspec.job.prepare import Job, open_chosen
from batchspec.packing.planner import Demand, Forecast
from batchspec.packing.rates import Rates, device_rates
from batchspec.packing.survey import Survey

PREPARE_S_PER_LAYER, PREPARE_ROUNDS = 0.06, 280
"""Time in which the rounds of all draft lengths are captured and timed: seconds per layer, and a number of full rounds. On an
H200, kernels compiled before, loading took 2.1 s longer with drafts than without for the 30 layers of SmolLM2-135M, whose rounds
take 1.5 ms, and 5.7 s for the 36 layers of an 8B, whose rounds take 12 ms."""
LIKELY_GAIN = 0.2
"""Share of the decoding time that drafts are assumed to save at least: before the job runs nobody knows how much of its texts
lookup can draft."""


def drafting_of(job: Job, survey: Survey) -> Job:
    """The surveyed job, with or without drafts, as it is to be loaded. Raises as `drafting_if_it_pays`."""
    if job.device.type != "cuda":
        return job
    rates = device_rates(job.device, job.dtype, fp8=job.spec.formats.quantises)
    return drafting_if_it_pays(job, survey.demand(job.source.num_rows, job.admission.max_len, job.admission.task), rates)


def drafting_if_it_pays(job: Job, demand: Demand, rates: Rates) -> Job:
    """The job, or the same job without drafts if draft=auto chose its drafter, with the keys of `draft` as they are by default,
    and drafts will likely save less time than preparing their rounds takes.

    Only of one process on a GPU: no round is prepared elsewhere, and several ranks choose their drafter each by itself.
    Raises CapacityError if not even one row fits.
    """
    if not job.why_drafter or job.group is not None or not expected_drafts(job).are_chosen or not demand.num_completions:
        return job
    config = without_drafts(job.config)
    if config is None:
        return job
    plain = replace(
        job, config=config, drafter=open_chosen(config, job.spec, ""),
        why_drafter=f"the job is too short for draft={job.config.draft.name}, whose rounds take longer to prepare than they save",
    )
    without = _forecast(plain, demand, rates)
    prepare_s = PREPARE_S_PER_LAYER * job.spec.num_layers + PREPARE_ROUNDS * without.round_s
    pays = LIKELY_GAIN * without.decode_s >= prepare_s or without.decode_s - _forecast(job, demand, rates).decode_s >= prepare_s
    return job if pays else plain


def _forecast(job: Job, demand: Demand, rates: Rates) -> Forecast:
    return forecast_of(job, plan_batch(job, demand, rates), demand, rates)
