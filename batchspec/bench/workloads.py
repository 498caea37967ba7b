"""What `batchspec bench` runs: dummy weights of a known shape on random prompts, or a real model on real prompts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from batchspec.config.typed import from_dict
from batchspec.distributed.group import Group
from batchspec.engine.ranks.lead import Lead
from batchspec.errors import ConfigError
from batchspec.job.load.build import load_message
from batchspec.job.prepare import open_job, part_of_group, with_states
from batchspec.model.deterministic import in_one_order
from batchspec.model.dtype import resolve_dtype
from batchspec.model.families.shapes import config_json, shape_spec
from batchspec.model.kv_calibration import check_e4m3, give_scales
from batchspec.model.lora_products import DummyAdapters
from batchspec.model.spec import ModelSpec, load_spec
from batchspec.model.target import Target
from batchspec.packing.survey import Survey
from batchspec.records import Ids, Request, SamplingParams
from batchspec.text.tokenizer import Tokenizer

MEDIAN_LOG, SIGMA = 6.685, 0.7
"""Parameters of a long-tailed distribution like that of reasoning outputs: lognormal, median 800 tokens."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The target, its tokenizer (of a real model) and the requests, which are greedy; only with --eos they may stop before their
    limit.
    """

    target: Target
    requests: list[Request]
    tokenizer: Tokenizer | None = None

    def unshared(self) -> list[Request]:
        """The same requests without shared prefixes: the first prompt token of each differs from its siblings'."""
        vocab = self.target.spec.vocab_size
        return [replace(request, prompt_ids=_other_beginning(request, vocab)) for request in self.requests]


def make_workload(args: argparse.Namespace, device: torch.device, group: Group | None = None) -> Workload:
    """group: the processes that compute the target together; the others load once the leader has checked all and tells them.

    Raises ConfigError, CheckpointError.
    """
    made = _real(args, device, group) if args.model else _dummy(args, device, group)
    if args.adapters:
        made.requests[:] = [replace(request, adapter=1 + i % args.adapters) for i, request in enumerate(made.requests)]
    return made


def survey_of(requests: Sequence[Request]) -> Survey:
    """What a job would know of its rows before it starts if these were its requests, each from one input row."""
    survey = Survey()
    survey.add(len(requests), requests)
    return survey


def make_job(folder: Path, *, shape: str, num_requests: int, prompt_len: int, cap: int) -> tuple[int, int]:
    """Write a job of random prompts whose outputs have lognormal lengths; returns their sum and the longest.

    folder/model/config.json  the shape: run it with model.load_format=dummy
    folder/known.parquet      id, prompt_ids and each row's length as max_new_tokens
    folder/hidden.parquet     id, prompt_ids and each row's length as synthetic_len: give decode.max_new_tokens=`cap`
    """
    (folder / "model").mkdir(parents=True, exist_ok=True)
    config = folder / "model" / "config.json"
    config.write_bytes(config_json(shape))
    prompts, lengths = _draw(num_requests, prompt_len, load_spec(folder / "model").vocab_size, lognormal_cap=cap)
    width = pa.array(np.arange(0, prompts.size + 1, prompt_len, dtype=np.int32))
    columns = {
        "id": pa.array([f"p{i:04d}" for i in range(num_requests)]),
        "prompt_ids": pa.ListArray.from_arrays(width, pa.array(prompts.ravel())),
    }
    own = pa.array(lengths, pa.int32())
    pq.write_table(pa.table({**columns, "max_new_tokens": own}), folder / "known.parquet")
    pq.write_table(pa.table({**columns, "synthetic_len": own}), folder / "hidden.parquet")
    return sum(lengths), max(lengths)


def _draw(count: int, prompt_len: int, vocab_size: int, *, lognormal_cap: int = 0) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Prompts int32 [count, prompt_len], and output lengths if a limit is given, from one seeded generator."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, min(30000, vocab_size), (count, prompt_len), generator=generator)
    lengths: list[int] = []
    if lognormal_cap:
        drawn = torch.empty(count).log_normal_(MEDIAN_LOG, SIGMA, generator=generator)
        lengths = drawn.clamp(min(32, lognormal_cap), lognormal_cap).int().tolist()
    return prompts.int().numpy(), lengths


def _dummy(args: argparse.Namespace, device: torch.device, group: Group | None) -> Workload:
    spec = shape_spec(args.shape)
    dtype = resolve_dtype(args.dtype, spec, device)
    spec = with_states(spec.quantised(args.quantize).on(device, dtype), args.states, dtype)
    part = part_of_group(in_one_order(spec, device, dtype) if args.deterministic else spec, group)
    count = args.requests or args.batch
    if count % args.samples:
        raise ConfigError(
            f"--samples {args.samples}: the {count} requests are not a multiple of it; change --batch or --requests"
        )
    cap = args.gen if args.requests and not args.equal else 0
    prompts, lengths = _draw(count // args.samples, args.prompt, spec.vocab_size, lognormal_cap=cap)
    requests = [
        _request(i * args.samples + sample, prompt, lengths[i] if lengths else args.gen, row=i, sample=sample)
        for i, prompt in enumerate(prompts)
        for sample in range(args.samples)
    ]
    target = _load(args, Path(), part, dtype, device, group, dummy=True)
    return Workload(_with_kv(target, args, device, None), requests)


def _real(args: argparse.Namespace, device: torch.device, group: Group | None) -> Workload:
    source = {"path": args.input} | ({"chat": True, "on_overlong": "truncate"} if args.chat else {})
    given = {
        "model": {"path": args.model, "dtype": args.dtype},
        "input": source,
        "cache": {"state_dtype": args.states},
        "decode": {"max_new_tokens": args.gen, "deterministic": args.deterministic},
        "draft": {"name": "none"},  # the variants have drafters of their own
        "device": device.type,
    }
    config = from_dict(given)
    job = open_job(config, group=group)
    kinds = set(filter(None, args.kind.split(",")))
    if kinds and "kind" not in job.source.schema.names:
        raise ConfigError(f"--kind {args.kind}: the input has no column `kind`; leave --kind out")
    found: list[Request] = []
    for shard in job.source.shards(job.layout):
        kind_of = shard.table.column("kind").to_pylist() if kinds else None
        for entry in job.admission.admit(shard):
            fits = isinstance(entry, Request) and entry.sample_index == 0
            if fits and (kind_of is None or kind_of[entry.row_index - shard.first_row] in kinds):
                assert isinstance(entry, Request)
                request = _request(len(found), entry.prompt_ids, args.gen, row=len(found))
                found.append(job.admission.predicted(replace(request, stop_ids=entry.stop_ids)) if args.eos else request)
    if not found:
        raise ConfigError(f"--input {args.input} --kind {args.kind}: no prompt is left; check the kind column")
    target = _load(args, job.folder, job.spec, job.dtype, device, group)
    count = args.requests or len(found)
    repeated = [replace(found[i % len(found)], request_id=str(i), row_index=i, seed=i) for i in range(count)]
    return Workload(_with_kv(target, args, device, job.tokenizer), repeated, job.tokenizer)


def _load(
    args: argparse.Namespace, folder: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device, group: Group | None, *,
    dummy: bool = False,
) -> Target:
    """As `Target.load`, with random adapters if --adapters asks for them.

    The leader of a group tells the others that all checks have passed.
    """
    adapters = DummyAdapters.of(spec, args.adapters, args.adapter_rank) if args.adapters else None
    spec = spec.with_lora(None if adapters is None else adapters.shape)
    if group is not None and group.rank == 0:
        Lead(group.channel).send(load_message(device))
    ranks = None if group is None else group.collectives
    return Target.load(folder, spec, dtype=dtype, device=device, dummy=dummy, ranks=ranks, adapters=adapters)


def _with_kv(target: Target, args: argparse.Namespace, device: torch.device, tokenizer: Tokenizer | None) -> Target:
    """The target with the K/V cache that --kv asks for; ranks calibrate together. Raises ConfigError for a GPU without e4m3."""
    if args.kv == "fp8":
        check_e4m3(device)
        target.spec = target.spec.with_fp8_kv()
        if target.spec.has_kv_scales:
            give_scales(target, None, "calibrate", None, tokenizer)
    return target


def _request(index: int, prompt: Ids, cap: int, *, row: int, sample: int = 0) -> Request:
    return Request(
        request_id=str(index), row_index=row, sample_index=sample, shard=0, prompt_ids=prompt, max_new_tokens=cap,
        min_new_tokens=0, sampling=SamplingParams(), stop_ids=(), stop=(), seed=index, predicted_tokens=cap,
    )


def _other_beginning(request: Request, vocab_size: int) -> Ids:
    ids = request.prompt_ids.copy()
    ids[0] = (ids[0] + request.sample_index) % vocab_size
    return ids
