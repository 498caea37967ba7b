"""The fingerprint of a job: everything that changes its results. And the facts that the manifest records of a run."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from batchspec import __version__
from batchspec.config.schema import TEMPLATE_DATE, CacheConfig
from batchspec.model.config_values import has_file, read_text
from batchspec.model.deterministic import ORDER_VERSION
from batchspec.model.kv_calibration import CALIBRATION
from batchspec.model.quant.modelopt import CONFIG_FILE
from batchspec.model.weight_files import weight_files
from batchspec.packing.constraints import KINDS
from batchspec.prepare import Job
from batchspec.runstate.manifest import fingerprint

CONSTRAINTS_VERSION = 2
"""Raised with every change of what is written for a constraint: a job that began with another version is refused."""
NEWER_KEYS = ("bad_words", "frequency_penalty", "logit_bias", "repetition_detection", "score")
"""Keys of `decode` that are left out where they are off, so that jobs begun before these keys existed resume."""


def job_fingerprint(job: Job) -> dict[str, str]:
    """Everything that changes results. Drafter, slots, pages and versions do not; they may differ between the runs of one job."""
    config, decode = job.config, asdict(job.config.decode)
    think, calls = job.admission.settings.think, job.admission.has_calls(job.columns)
    schema = job.admission.schema_of(job.source.schema, job.columns, config.output)
    return fingerprint(
        {
            "model.config": read_text(job.folder / "config.json"),
            **weight_parts(job.folder, dummy=job.dummy),
            # Left out without one, so that jobs begun before this key existed resume.
            **({} if job.adapter is None else {"model.adapter": job.adapter.fingerprint}),
            **({} if not config.model.adapters else {"model.adapters": _named(job, "fingerprint")}),
            "model.tokenizer": None if job.tokenizer is None else job.tokenizer.fingerprint,
            "model.dtype": str(job.dtype).removeprefix("torch."),
            # As resolved on this device, and left out where plain, so that jobs begun before this key existed resume.
            **({"model.activations": "fp8"} if job.spec.formats.quantises else {}),
            **_kv_parts(config.cache),
            "model.max_len": job.admission.max_len,
            "model.end_ids": sorted(job.admission.settings.end_ids),
            "model.think_tokens": None if think is None else (think.begin_id, think.end_id),
            **({"model.tool_calls": form.name} if calls and (form := job.admission.tool_form) is not None else {}),
            **{f"decode.{key}": value for key, value in decode.items() if key not in (*KINDS, *NEWER_KEYS, "deterministic")},
            **({"decode.deterministic": ORDER_VERSION} if config.decode.deterministic else {}),  # left out without, as above
            **_newer_parts(job),
            **_constraint_parts(job),
            **({"decode.choice": config.decode.choice} if config.decode.score == "choices" else {}),
            "draft.synthetic": config.draft.synthetic,
            "input.files": [file.identity for file in job.source.files],
            "input.columns": dict(sorted(job.columns.names.items())),
            **{f"input.{key}": getattr(config.input, key) for key in ("chat", "on_overlong", "limit", "template_kwargs")},
            # Left out at their defaults, so that jobs begun before these keys existed resume.
            **({} if config.input.template_date == TEMPLATE_DATE else {"input.template_date": config.input.template_date}),
            **({} if config.input.final_assistant == "error" else {"input.final_assistant": config.input.final_assistant}),
            **({} if config.input.system is None else {"input.system": config.input.system}),
            **({"input.drop": sorted(config.input.drop)} if config.input.drop else {}),
            "output.schema": [(field.name, str(field.type)) for field in schema],
            "output.messages": config.output.messages,
            "output.reasoning_in_messages": config.output.reasoning_in_messages,
            "output.logprobs": config.output.logprobs,
            **({} if config.output.prompt_logprobs is None else {"output.prompt_logprobs": config.output.prompt_logprobs}),
        }
    )


def weight_parts(folder: Path, *, dummy: bool) -> dict[str, Any]:
    """What identifies a model's weights before they are loaded: their files, and the file that says how they are quantised."""
    file = folder / CONFIG_FILE
    parts = {"model.quantization": read_text(file) if has_file(file) else None}
    if dummy:
        return {**parts, "model.weights": "dummy"}
    files = weight_files(folder)
    return {**parts, "model.weights": files.fingerprint, "model.tensors": files.tensors}


def _newer_parts(job: Job) -> dict[str, Any]:
    """Those of NEWER_KEYS that are not off."""
    decode, repetition = job.config.decode, job.admission.settings.repetition
    parts = {
        "decode.bad_words": job.admission.settings.bad_words,
        "decode.frequency_penalty": decode.frequency_penalty,
        "decode.logit_bias": job.admission.settings.logit_bias,
        "decode.repetition_detection": None if repetition is None else asdict(repetition),
        "decode.score": None if decode.score == "none" else decode.score,
    }
    return {key: value for key, value in parts.items() if value}


def _named(job: Job, what: str) -> dict[str, str]:
    """The fingerprint, or the digest, of each of model.adapters by its name."""
    return {name: getattr(own, what) for name, own in job.named_adapters.items()}


def _constraint_parts(job: Job) -> dict[str, Any]:
    """The job's own schema, regex, choice or grammar, of a file its content; left out where there is none, as above."""
    constraints = job.admission.constraints
    if constraints is None:
        return {}
    own = {} if constraints.of_job is None else {f"decode.{constraints.of_job[0]}": constraints.of_job[1]}
    return own | {"decode.constraints": CONSTRAINTS_VERSION}


def _kv_parts(cache: CacheConfig) -> dict[str, Any]:
    """What changes results of how K and V are stored; keys at their defaults are left out, as above."""
    parts = {"cache.dtype": cache.dtype, "cache.scales": cache.scales}
    given = {key: value for key, value in parts.items() if value != "auto"}
    return given | ({"cache.calibration": CALIBRATION} if cache.dtype == "fp8" else {})


def recorded_facts(job: Job) -> dict[str, Any]:
    device = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu"
    return {
        "batchspec": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "device": device if job.group is None else f"{job.group.ranks} x {device}",
        "model": str(job.config.model.path),
        "drafter": job.config.draft.name,
        **({} if job.adapter is None else {"adapter_sha256": job.adapter.digest}),
        **({} if not job.config.model.adapters else {"adapters_sha256": _named(job, "digest")}),
    }
