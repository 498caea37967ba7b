"""What `batchspec train` does: it reads target and completions, trains a head and writes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from batchspec.config.schema import InputConfig
from batchspec.config.train_schema import TrainRun
from batchspec.console import terminal
from batchspec.dataset.reader import Source, open_source
from batchspec.draft.formats import HeadSpec
from batchspec.draft.head_tensors import head_bytes
from batchspec.draft.weights import open_head
from batchspec.errors import ConfigError
from batchspec.heads.data import Numbers, Row, course, frequent_ids, read_rows, split_rows, unused_id
from batchspec.heads.folder import HeadFolder
from batchspec.heads.head import new_network, new_spec, published_network
from batchspec.heads.loop import Course
from batchspec.heads.network import HeadNetwork
from batchspec.heads.save import save_head
from batchspec.heads.teacher import Teacher
from batchspec.model.config_values import read_text
from batchspec.model.dtype import resolve_dtype
from batchspec.model.hub import find_model, resolve_model
from batchspec.model.spec import ModelSpec, load_spec
from batchspec.model.target import Target
from batchspec.model.weights import judge_model
from batchspec.prepare import choose_device
from batchspec.runner.identity import weight_parts
from batchspec.supervise.signals import EndSignals


def train(run: TrainRun) -> Path:
    """Train, or go on training, and write the head; its folder. `run` has been checked.

    Raises Interrupted after a signal, with a checkpoint written, and other errors of batchspec for what is wrong.
    """
    assert run.model.path is not None
    assert run.output.dir is not None
    say, kind = terminal.notice, "parallel" if run.draft.parallel is True else "eagle3"
    sources = _sources(run)
    model, dummy = find_model(run.model.path, run.model.revision), run.model.load_format == "dummy"
    folder, spec = model.folder, load_spec(model.folder) if dummy else judge_model(model)
    if spec.is_recurrent:
        raise ConfigError(
            f"model.path={run.model.path}: {spec.family} has recurrent layers; heads for such models cannot be trained here"
        )
    if run.draft.path is not None:
        head = open_head(find_model(run.draft.path, key="draft.path"), spec, aux_layers=run.draft.aux_layers)
        if (limit := run.train.draft_vocab) < head.draft_vocab_size and limit != TrainRun().train.draft_vocab:
            raise ConfigError(
                f"train.draft_vocab={limit}: the head {run.draft.path} can draft {head.draft_vocab_size} different tokens, and "
                "training cannot remove any; leave the key out"
            )
    device = choose_device(run.device)
    dtype = resolve_dtype(run.model.dtype, spec, device)
    spec = spec.on(device, dtype, run.model.activations)
    limits = [run.train.max_len, spec.max_len, *([run.model.max_len] if run.model.max_len else [])]
    rows = [row for source in sources for row in read_rows(source, vocab_size=spec.vocab_size, max_len=min(limits))]
    trained, held_out = split_rows(rows, run.train.held_out, run.train.seed)
    if run.draft.path is None:
        _new_spec(run, spec, rows)  # refused before the target is loaded
    if not dummy:
        model.fetch()
    out = HeadFolder(Path(run.output.dir), _facts(run, spec, folder, sources), overwrite=run.output.overwrite)
    if out.complete:
        say(f"{out.path}: already complete; draft={kind} draft.path={out.path} drafts with it")
        return out.path
    say(f"loading {run.model.path} in {str(dtype).removeprefix('torch.')} on {device.type}")
    target = Target.load(folder, spec, dtype=dtype, device=device, dummy=dummy, summed=not dummy)
    out.check_weights(target.weight_sums, run.model.path)
    network, ids = _network(run, target, trained)
    out.begin()
    made = _course(run, target, network, ids, trained, held_out, out, say)
    with EndSignals() as signals:
        signals.stop_with(lambda: None)
        made.run(lambda: signals.name)
    stored = _stored_dtype(spec)
    save_head(
        out.path, network, torch.from_numpy(ids), spec, layout=run.output.layout, dtype=stored, verifier=run.model.path,
        draft_len=run.draft.num_speculative_tokens,
    )
    out.finish(made.curves)
    say(f"{out.path}: {head_bytes(network.spec, stored) / 1e6:,.1f} MB; draft={kind} draft.path={out.path} drafts with it")
    return out.path


def _sources(run: TrainRun) -> list[Source]:
    """Each entry of input.path for itself: jobs over different inputs have different columns."""
    entries = list(run.input.path) if isinstance(run.input.path, list | tuple) else [run.input.path]
    sources: list[Source] = []
    left = run.input.limit
    for entry in entries or [None]:
        if left is None or left > 0:
            sources.append(open_source(InputConfig(path=entry, limit=left)))
            left = None if left is None else left - sources[-1].num_rows
    return sources


def _network(run: TrainRun, target: Target, rows: list[Row]) -> tuple[HeadNetwork, Numbers]:
    """The head to train, and the target ids int64 [V'] that it drafts."""
    if run.draft.path is not None:
        folder = resolve_model(run.draft.path, key="draft.path")
        mask_id = _mask_id(run, target.spec, rows)
        network, ids = published_network(
            folder, target, aux_layers=run.draft.aux_layers, mask_id=mask_id, seed=run.train.seed, layers=run.train.layers
        )
        if run.draft.parallel is False and network.spec.mask_token_id is not None:
            raise ConfigError(f"draft.parallel=false, but the head {run.draft.path} drafts in parallel; use draft.parallel=auto")
        return network, ids
    made = _new_spec(run, target.spec, rows)
    ids = frequent_ids(rows, vocab_size=target.spec.vocab_size, count=run.train.draft_vocab, keep=target.spec.eos_ids)
    return new_network(made, target, torch.from_numpy(ids), seed=run.train.seed), ids


def _new_spec(run: TrainRun, target: ModelSpec, rows: list[Row]) -> HeadSpec:
    return new_spec(
        target,
        draft_vocab=run.train.draft_vocab,
        aux_layer_ids=run.train.aux_layer_ids,
        layers=run.train.layers or 1,
        inner=run.train.inner,
        mask_id=_mask_id(run, target, rows),
    )


def _mask_id(run: TrainRun, target: ModelSpec, rows: list[Row]) -> int | None:
    """The mask token of a parallel head; None for a chain."""
    if run.draft.parallel is not True:
        return None
    given = run.train.mask_token
    if given is not None and given >= target.vocab_size:
        raise ConfigError(f"train.mask_token={given} is outside the target's vocabulary of {target.vocab_size}; null chooses one")
    return unused_id(rows, target.vocab_size) if given is None else given


def _course(
    run: TrainRun, target: Target, network: HeadNetwork, ids: Numbers, trained: list[Row], held_out: list[Row], out: HeadFolder,
    say: Callable[[str], None],
) -> Course:
    lengths = torch.tensor([len(row.ids) for row in trained]).numpy()
    batches = course(
        lengths, batch_tokens=run.train.batch_tokens, seed=run.train.seed, epochs=run.train.epochs, steps=run.train.steps
    )
    inside = torch.zeros(target.spec.vocab_size, dtype=torch.bool).index_fill_(0, torch.from_numpy(ids), True).numpy()
    known = sum(int(inside[row.ids[row.prompt_len :]].sum()) for row in trained)
    tokens = sum(len(row.ids) - row.prompt_len for row in trained)
    mask = network.spec.mask_token_id
    parameters = sum(tensor.numel() for tensor in network.parameters())
    say(
        f"{len(trained):,} completions of {tokens:,} tokens in {len(batches):,} batches, {len(held_out):,} held out; a head of "
        f"{parameters:,} weights reads layers {', '.join(map(str, network.spec.aux_layer_ids))} and drafts {len(ids):,} tokens, "
        f"{known / tokens:.1%} of those completions" + ("" if mask is None else f"; its mask is token {mask}")
    )
    # On a GPU a bf16 target's head learns by bf16 products (loop.py), which read features as the target puts them out.
    narrow = target.device.type == "cuda" and target.dtype is torch.bfloat16
    dtype = target.dtype if narrow else torch.promote_types(target.dtype, torch.float32)
    teacher = Teacher(
        target,
        network.spec.aux_layer_ids,
        torch.from_numpy(ids),
        dtype,
        prompts=run.train.prompts,
        temperature=run.train.temperature,
    )
    return Course(
        config=run.train, network=network, teacher=teacher, rows=trained, held_out=held_out, batches=batches,
        draft_len=run.draft.num_speculative_tokens, folder=out, say=say, curves={"loss": [], "acceptance": []},
    )


def _stored_dtype(spec: ModelSpec) -> torch.dtype:
    return torch.bfloat16 if spec.dtype in ("bfloat16", "float16") else torch.float32


def _facts(run: TrainRun, spec: ModelSpec, folder: Path, sources: list[Source]) -> dict[str, Any]:
    """What the head depends on. Where it is trained, and how often it is saved, may change between two runs of one training."""
    keys = {f"train.{key}": value for key, value in asdict(run.train).items() if key != "save_s"}
    files = [file for source in sources for file in source.files]
    content = json.dumps([file.identity for file in files])
    draft = {f"draft.{key}": getattr(run.draft, key) for key in ("path", "aux_layers", "num_speculative_tokens", "parallel")}
    model = {
        "model.dtype": run.model.dtype,
        **({"model.activations": "fp8"} if spec.formats.quantises else {}),
        "model": f"{spec.family} of {spec.num_layers} layers, {spec.hidden_size} wide",
        "model.config": sha256(read_text(folder / "config.json").encode()).hexdigest(),
        **weight_parts(folder, dummy=run.model.load_format == "dummy"),
    }
    data = {
        "input.files": len(files),
        "input.rows": sum(file.num_rows for file in files),
        "input.digest": sha256(content.encode()).hexdigest(),
        "input.limit": run.input.limit,
    }
    return {**model, **data, "output.layout": run.output.layout, **draft, **keys}
