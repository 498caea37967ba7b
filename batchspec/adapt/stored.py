"""The adapted head in the output folder: a later run of the job, or another of its tasks, starts from it.

It is stored in the flat layout, so that any job can use it (`draft.path=OUT/_batchspec/heads/...`). There is one for each head
with which jobs in the folder began. Every task adapts its own copy and replaces the whole checkpoint: the last writer wins.
Output tokens do not depend on which one it is.
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
    tensors = checkpoint_tensors(learner.drafting, spec, learner.draft_vocab_ids, dtype=dtype)
    config = head_config(spec, target.spec, layout="flat", dtype=dtype, verifier="", draft_len=1)
    weights = safetensors.torch.save(tensors, metadata={"format": "pt"})
    files.put(json.dumps(config, indent=2).encode(), weights)


def load(files: HeadFiles, target: Target) -> tuple[HeadNetwork, Numbers] | None:
    """The head that was saved last, and the target ids of its draft vocabulary; None if none was saved.

    Raises CheckpointError if it cannot be read, StorageError.
    """
    with TemporaryDirectory(prefix="batchspec-") as scratch:
        if not files.read_into(Path(scratch)):
            return None
        return published_network(Path(scratch), target, aux_layers="input", mask_id=None, seed=0)
