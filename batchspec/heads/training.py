"""What `batchspec train` does: it reads target and completions, trains a drafter and writes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from batchspec.checkpoint.config_values import read_text
from batchspec.checkpoint.hub import find_model
from batchspec.config.schema import InputConfig
from batchspec.config.train_schema import TrainRun
from batchspec.console import terminal
from batchspec.data.dataset.reader import Source, open_source
from batchspec.heads.block import NewBlockHead
from batchspec.heads.data import Row, course, read_rows, split_rows
from batchspec.heads.draft_network import DraftNetwork
from batchspec.heads.eagle import EagleHead, ParallelHead
from batchspec.heads.folder import HeadFolder
from batchspec.heads.loop import Course
from batchspec.heads.mtp import MtpLayer
from batchspec.heads.save import WEIGHTS
from batchspec.heads.teacher import Teacher
from batchspec.heads.trained_drafter import TrainedDrafter
from batchspec.job.prepare import choose_device
from batchspec.job.runner.identity import weight_parts
from batchspec.model.dtype import resolve_dtype
from batchspec.model.spec import ModelSpec, load_spec
from batchspec.model.target import Target
from batchspec.model.weights import judge_model
from batchspec.process.signals import EndSignals

KINDS: dict[str, type[TrainedDrafter]] = {
    "eagle3": EagleHead, "parallel": ParallelHead, "block": NewBlockHead, "mtp": MtpLayer
}
"""By what `draft=` calls them."""


def train(run: TrainRun) -> Path:
    """Train, or go on training, and write the drafter; its folder. `run` has been checked.

    Raises Interrupted after a signal, with a checkpoint written, and other errors of batchspec for what is wrong.
    """
    assert run.model.path is not None
    assert run.output.dir is not None
    say, sources = terminal.notice, _sources(run)
    model, dummy = find_model(run.model.path, run.model.revision), run.model.load_format == "dummy"
    folder, spec = model.folder, load_spec(model.folder) if dummy else judge_model(model)
    spec.check_output("train")
    drafter = KINDS["parallel" if run.draft.parallel is True else run.draft.name](run, model, spec)
    device = choose_device(run.device)
    dtype = resolve_dtype(run.model.dtype, spec, device)
    drafter.check_dtype(dtype, device)
    spec = spec.quantised(run.model.quantize).on(device, dtype, run.model.activations)
    limits = [run.train.max_len, spec.max_len, *([run.model.max_len] if run.model.max_len else [])]
    rows = [row for source in sources for row in read_rows(source, vocab_size=spec.vocab_size, max_len=min(limits))]
    trained, held_out = split_rows(rows, run.train.held_out, run.train.seed)
    drafter.check(rows)
    if not dummy:
        model.fetch()
    out = HeadFolder(Path(run.output.dir), _facts(run, spec, folder, sources), overwrite=run.output.overwrite)
    use = f"draft={drafter.name} draft.path={out.path} drafts with it"
    if out.complete:
        say(f"{out.path}: already complete; {use}")
        return out.path
    for note in drafter.notes:
        say(note)
    say(f"loading {run.model.path} in {str(dtype).removeprefix('torch.')} on {device.type}")
    target = Target.load(folder, spec, dtype=dtype, device=device, dummy=dummy, summed=not dummy)
    out.check_weights(target.weight_sums)
    network = drafter.network(target, trained)
    out.begin()
    made = _course(run, drafter, network, drafter.teacher(target), trained, held_out, out, say)
    with EndSignals() as signals:
        signals.stop_with(lambda: None)
        made.run(lambda: signals.name)
    drafter.save(out.path, network, _stored_dtype(spec))
    out.finish(made.curves)
    say(f"{out.path}: {(out.path / WEIGHTS).stat().st_size / 1e6:,.1f} MB; {use}")
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


def _course(
    run: TrainRun, drafter: TrainedDrafter, network: DraftNetwork, teacher: Teacher, trained: list[Row], held_out: list[Row],
    out: HeadFolder, say: Callable[[str], None],
) -> Course:
    lengths = torch.tensor([len(row.ids) for row in trained]).numpy()
    batches = course(
        lengths, batch_tokens=run.train.batch_tokens, seed=run.train.seed, epochs=run.train.epochs, steps=run.train.steps
    )
    tokens = sum(len(row.ids) - row.prompt_len for row in trained)
    say(
        f"{len(trained):,} completions of {tokens:,} tokens in {len(batches):,} batches, {len(held_out):,} held out; "
        f"{drafter.about(network, trained)}"
    )
    return Course(
        config=run.train, lr=run.train.lr or drafter.usual_lr, network=network, teacher=teacher, rows=trained, held_out=held_out,
        batches=batches, draft_len=run.draft.draft_len, folder=out, say=say, curves={"loss": [], "acceptance": []},
    )


def _stored_dtype(spec: ModelSpec) -> torch.dtype:
    return torch.bfloat16 if spec.dtype in ("bfloat16", "float16") else torch.float32


def _facts(run: TrainRun, spec: ModelSpec, folder: Path, sources: list[Source]) -> dict[str, Any]:
    """What the result depends on. Where it is trained, and how often it is saved, may change between two runs of one training."""
    unused = {"save_s"} if run.draft.name == "block" else {"save_s", "anchors"}
    keys = {f"train.{key}": value for key, value in asdict(run.train).items() if key not in unused}
    files = [file for source in sources for file in source.files]
    content = json.dumps([file.identity for file in files])
    read = ("name", "path", "aux_layers", "num_speculative_tokens", "parallel")
    draft = {f"draft.{key}": getattr(run.draft, key) for key in read}
    model = {
        "model.dtype": run.model.dtype,
        **({"model.activations": "fp8"} if spec.formats.quantises else {}),
        **({} if run.model.quantize is None else {"model.quantize": run.model.quantize}),
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
