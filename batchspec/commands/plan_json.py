"""`batchspec plan --json`: the facts of a plan as one JSON object. What `status --json` tells too has the same name there."""

from __future__ import annotations

from typing import Any

from batchspec.commands.plan_text import Plan
from batchspec.job.load.memory import weight_bytes
from batchspec.job.runner.head.planned import PlannedHead
from batchspec.model.dtype import dtype_name


def facts(plan: Plan) -> dict[str, Any]:
    """The object; jobs/README.md lists its names."""
    job, survey = plan.job, plan.survey
    total = job.layout.num_rows
    found: dict[str, Any] = {
        "exit_code": plan.exit_code,
        "error": None if plan.error is None else str(plan.error),
        "path": job.config.output.dir,
        "state": "not begun" if plan.output is not None or job.config.output.dir is None else None,
        "rows": 0,
        "rows_total": total,
        "shards": 0,
        "shards_total": job.layout.num_shards,
        "completions": 0,
        **({} if plan.output is None else plan.output.facts(survey)),
        "rows_read": survey.num_rows,
        "bad_rows": {code: {"rows": count, "example": example} for code, (count, example) in sorted(survey.bad.items())},
        **({} if job.spec.vision is None else {"images": survey.num_images, "image_tokens": survey.image_tokens}),
        "card": None if plan.card is None else plan.card.card.name,
        "device": job.device.type,
        "family": job.spec.family,
        "dtype": dtype_name(job.dtype),
        "weight_bytes": weight_bytes(job),
        "drafter": job.config.draft.name,
    }
    found["completions_total"] = survey.num_outputs(found["rows_total"])
    return found | _shape(plan, found)


def _shape(plan: Plan, found: dict[str, Any]) -> dict[str, Any]:
    """Shape and times; empty where there is no row to decode, or no device to decode on."""
    batch, ahead = plan.batch, plan.forecast
    if batch is None or ahead is None:
        return {}
    tokens, seconds = plan.expected_tokens, plan.images.with_rest(ahead.prefill_s + ahead.decode_s)
    decodes = plan.job.admission.task.decodes
    return {
        "slots": batch.num_slots,
        "max_len": batch.max_len,
        "page_size": batch.page_size,
        "pages": [batch.num_pages, *batch.more_pages],
        "prefill_tokens": batch.prefill_tokens,
        "expected_tokens": round(tokens),
        "mean_acceptance_length": 1 + ahead.accepted if decodes else None,
        "draft_len": ahead.num_drafts if decodes else None,
        "rounds": ahead.rounds,
        "round_s": ahead.round_s,
        "prefill_s": ahead.prefill_s,
        "decode_s": ahead.decode_s,
        **_head(plan.head),
        **({} if plan.job.spec.vision is None else {"encoder_s": plan.images.encoder_s, "image_worker_s": plan.images.worker_s}),
        "tok_s": tokens / seconds,
        "left_s": seconds * (1 - found["rows"] / found["rows_total"]),
    }


def _head(head: PlannedHead | None) -> dict[str, Any]:
    """Of a job that trains a head for its model: whether it will draft with one, and how long decoding takes then."""
    if head is None:
        return {}
    made = head.prospect
    return {"head_pays": made is not None and made.pays, "head_decode_s": None if made is None else made.with_s}
