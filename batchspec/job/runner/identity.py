"""The fingerprint of a job: everything that changes its results. And the facts that the manifest records of a run."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from batchspec.checkpoint.config_values import has_file, read_text
from batchspec.checkpoint.weight_files import weight_files
from batchspec.config.schema import CacheConfig, InputConfig
from batchspec.data.runstate.manifest import fingerprint
from batchspec.images.processor import IMAGE_VERSION
from batchspec.job.prepare import Job
from batchspec.model.deterministic import ORDER_VERSION
from batchspec.model.dtype import dtype_name
from batchspec.model.kv_calibration import CALIBRATION
from batchspec.model.quant.modelopt import CONFIG_FILE
from batchspec.packing.constraints import KINDS
from batchspec.version import __version__

CONSTRAINTS_VERSION = 2
"""Raised with every change of what is written for a constraint: a job that began with another version is refused."""
INPUT_KEYS = ("chat", "system", "on_overlong", "final_assistant", "limit", "template_kwargs", "template_date")
OUTPUT_KEYS = ("messages", "reasoning_in_messages", "logprobs", "prompt_logprobs")


def job_fingerprint(job: Job) -> dict[str, str]:
    """Everything that changes results. Drafter, slots, pages and versions do not; they may differ between the runs of one job."""
    config, settings = job.config, job.admission.settings
    form = job.admission.tool_form if job.admission.has_calls(job.columns) else None
    schema = job.admission.schema_of(job.source.schema, job.columns, config.output)
    return fingerprint(
        {
            "model.config": read_text(job.folder / "config.json"),
            **weight_parts(job.folder, dummy=job.dummy),
            "model.adapter": None if job.adapter is None else job.adapter.fingerprint,
            "model.adapters": _named(job, "fingerprint"),
            "model.tokenizer": None if job.tokenizer is None else job.tokenizer.fingerprint,
            "model.dtype": dtype_name(job.dtype),
            "model.quantize": config.model.quantize,
            "model.activations": "fp8" if job.spec.formats.quantises else "dtype",  # as resolved on this device
            "model.max_len": job.admission.max_len,
            "model.end_ids": sorted(settings.end_ids),
            "model.think_tokens": None if settings.think is None else (settings.think.begin_id, settings.think.end_id),
            "model.tool_calls": None if form is None else form.name,
            **_image_parts(job),
            **_cache_parts(config.cache),
            **_decode_parts(job),
            "draft.synthetic": config.draft.synthetic,
            "input.files": [file.identity for file in job.source.files],
            "input.columns": dict(sorted(job.columns.names.items())),
            "input.prompt": job.admission.templates.sources.get("prompt"),  # of a file its content
            "input.drop": sorted(config.input.drop),
            **_rows_taken(job.admission.input),
            **{f"input.{key}": getattr(config.input, key) for key in INPUT_KEYS},
            "output.schema": [(field.name, str(field.type)) for field in schema],
            **{f"output.{key}": getattr(config.output, key) for key in OUTPUT_KEYS},
        }
    )


def _rows_taken(input: InputConfig) -> dict[str, Any]:
    """What says which rows of an earlier job are the input; empty for another input."""
    if input.from_job is None:
        return {}
    return {"input.from_status": sorted(set(input.from_status)), "input.from_where": input.from_where}


def weight_parts(folder: Path, *, dummy: bool) -> dict[str, Any]:
    """What identifies a model's weights before they are loaded: their files, and the file that says how they are quantised."""
    file = folder / CONFIG_FILE
    parts = {"model.quantization": read_text(file) if has_file(file) else None}
    if dummy:
        return {**parts, "model.weights": "dummy"}
    files = weight_files(folder)
    return {**parts, "model.weights": files.fingerprint, "model.tensors": files.tensors}


def _decode_parts(job: Job) -> dict[str, Any]:
    """All keys of `decode`, as the job uses them."""
    config, settings, constraints = job.config.decode, job.admission.settings, job.admission.constraints
    parts = asdict(config) | {
        **dict.fromkeys(KINDS),
        "deterministic": ORDER_VERSION if config.deterministic else None,
        **settings.read,
        "repetition_detection": None if settings.repetition is None else asdict(settings.repetition),
        "constraints": None if constraints is None else CONSTRAINTS_VERSION,
    }
    if constraints is not None and constraints.of_job is not None:
        kind, text = constraints.of_job  # of a file its content
        parts[kind] = text
    return {f"decode.{key}": value for key, value in parts.items()} | job.admission.task.identity(job.config)


def _image_parts(job: Job) -> dict[str, Any]:
    """How images become pixels and tokens; empty in a job without images."""
    vision = job.spec.vision
    return {} if vision is None else {"model.vision": [IMAGE_VERSION, asdict(vision.processor)]}


def _named(job: Job, what: str) -> dict[str, str]:
    """The fingerprint, or the digest, of each of model.adapters by its name."""
    return {name: getattr(own, what) for name, own in job.named_adapters.items()}


def _cache_parts(cache: CacheConfig) -> dict[str, Any]:
    """What changes results of how K, V and states are stored."""
    return {
        "cache.dtype": cache.dtype, "cache.scales": cache.scales, "cache.state_dtype": cache.state_dtype,
        "cache.calibration": CALIBRATION if cache.dtype == "fp8" else None,
    }


def recorded_facts(job: Job) -> dict[str, Any]:
    kept, dtype = job.spec.formats.kept, dtype_name(job.dtype)
    device = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu"
    return {
        "batchspec": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "device": device if job.group is None else f"{job.group.ranks} x {device}",
        "model": str(job.config.model.path),
        "weights": f"{kept}, the rest in {dtype}" if kept else dtype,
        "drafter": job.config.draft.name,
        **({"why_drafter": f"draft=auto: {job.why_drafter}"} if job.why_drafter else {}),
        **({} if job.adapter is None else {"adapter_sha256": job.adapter.digest}),
        **({} if not job.config.model.adapters else {"adapters_sha256": _named(job, "digest")}),
    }
