"""What `batchspec bench` runs: dummy weights of a known shape on random prompts, or a real model on real prompts."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from batchspec.config import from_hydra
from batchspec.errors import ConfigError
from batchspec.model.spec import ModelSpec, load_spec
from batchspec.model.target import Target, resolve_dtype
from batchspec.prepare import open_job
from batchspec.records import Request, SamplingParams

SHAPES: dict[str, dict[str, Any]] = {
    "llama8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "rope_theta": 500000.0,
    },
    "llama1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    "smol135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "rope_theta": 100000.0, "tie_word_embeddings": True,
    },
}  # fmt: skip


def make_workload(args: argparse.Namespace, device: torch.device) -> tuple[Target, Path, list[Request]]:
    """The target, its folder and the requests, greedy, without any stop."""
    return _real(args, device) if args.model else _dummy(args, device)


def _dummy(args: argparse.Namespace, device: torch.device) -> tuple[Target, Path, list[Request]]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        spec = _shape(args.shape, folder)
        target = Target.load(folder, spec, dtype=resolve_dtype(args.dtype, spec, device), device=device, dummy=True)
    count = args.requests or args.batch
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, min(30000, spec.vocab_size), (count, args.prompt), generator=generator, dtype=torch.int32).numpy()
    caps = [args.gen] * count
    if args.requests:  # the long tail that reasoning output has: median 800, sigma 0.7
        caps = torch.empty(count).log_normal_(6.685, 0.7, generator=generator).clamp(32, args.gen).int().tolist()
    requests = [_request(i, prompt, cap) for i, (prompt, cap) in enumerate(zip(prompts, caps, strict=True))]
    return target, Path(), sorted(requests, key=lambda request: -request.max_new_tokens)


def _shape(name: str, folder: Path) -> ModelSpec:
    if name in SHAPES:
        base = {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "torch_dtype": "bfloat16", "tie_word_embeddings": False, "eos_token_id": 2,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps({**base, **SHAPES[name]}))
    elif Path(name).is_file():
        (folder / "config.json").write_bytes(Path(name).read_bytes())
    else:
        raise ConfigError(f"--shape {name} is neither one of {', '.join(SHAPES)} nor a file; give a config.json")
    return load_spec(folder)


def _real(args: argparse.Namespace, device: torch.device) -> tuple[Target, Path, list[Request]]:
    config = from_hydra(OmegaConf.create({"model": {"path": args.model}, "input": {"path": args.input}, "device": device.type}))
    job = open_job(config)
    kinds = set(filter(None, args.kind.split(",")))
    if kinds and "kind" not in job.source.schema.names:
        raise ConfigError(f"--kind {args.kind}: the input has no column `kind`; leave --kind out")
    found: list[Request] = []
    for shard in job.source.shards(job.shard_rows):
        kind_of = shard.table.column("kind").to_pylist() if kinds else None
        for entry in job.admission.admit(shard):
            fits = isinstance(entry, Request) and entry.sample_index == 0
            if fits and (kind_of is None or kind_of[entry.row_index - shard.first_row] in kinds):
                assert isinstance(entry, Request)
                found.append(_request(len(found), entry.prompt_ids, args.gen))
    if not found:
        raise ConfigError(f"--input {args.input} --kind {args.kind}: no prompt is left; check the kind column")
    dtype = resolve_dtype(args.dtype, job.spec, device)
    target = Target.load(job.folder, job.spec, dtype=dtype, device=device)
    count = args.requests or len(found)
    repeated = [replace(found[i % len(found)], request_id=str(i), row_index=i, seed=i) for i in range(count)]
    return target, job.folder, repeated


def _request(index: int, prompt: np.ndarray[Any, np.dtype[np.int32]], cap: int) -> Request:
    return Request(
        request_id=str(index), row_index=index, sample_index=0, shard=0, prompt_ids=prompt, max_new_tokens=cap, min_new_tokens=0,
        sampling=SamplingParams(), stop_ids=(), stop=(), seed=index, predicted_tokens=cap,
    )  # fmt: skip
