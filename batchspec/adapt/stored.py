"""The adapted head in the output folder: a later run of the job, or another of its tasks, starts from it.

It is a head in the flat layout (`draft.path=OUT/_batchspec/heads/...` drafts with it in any job), one for each head that jobs in
the folder started from. Every task adapts its own and replaces the whole checkpoint: the last writer wins. Output tokens do not
depend on which one it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import safetensors.torch

from batchspec.adapt.learner import Learner
from batchspec.model.target import Target
from batchspec.runstate.adapted_heads import HeadFiles
from batchspec.train.data import Numbers
from batchspec.train.head import published_network
from batchspec.train.network import HeadNetwork
from batchspec.train.save import checkpoint_tensors, head_config


def save(files: HeadFiles, learner: Learner, target: Target) -> None:
    """Write the head that drafts. Raises StorageError."""
    spec, dtype = learner.network.spec, target.dtype
    tensors = checkpoint_tensors(learner.drafting, spec, learner.hot, dtype=dtype)
    config = head_config(spec, target.spec, layout="flat", dtype=dtype, verifier="", draft_len=1)
    weights = safetensors.torch.save(tensors, metadata={"format": "pt"})
    files.put(json.dumps(config, indent=2).encode(), weights)


def load(files: HeadFiles, target: Target) -> tuple[HeadNetwork, Numbers] | None:
    """The head that was saved last, and the target ids that it drafts; None: none was saved.

    Raises CheckpointError for one that cannot be read, StorageError.
    """
    with TemporaryDirectory(prefix="batchspec-") as scratch:
        if not files.read_into(Path(scratch)):
            return None
        return published_network(Path(scratch), target, aux_layers="input", mask_id=None, seed=0)
