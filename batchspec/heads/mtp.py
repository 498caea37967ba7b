"""`batchspec train draft=mtp`: the MTP layer of the target's own checkpoint, tuned on completions."""

from __future__ import annotations

from pathlib import Path

import torch

from batchspec.checkpoint.files import ModelFiles
from batchspec.checkpoint.hub import find_model
from batchspec.config.train_schema import TrainRun
from batchspec.draft.mtp_head import open_mtp
from batchspec.errors import ConfigError
from batchspec.heads.data import Row
from batchspec.heads.draft_network import DraftNetwork
from batchspec.heads.first_norm import norm_of_random_states
from batchspec.heads.mtp_network import MtpNetwork
from batchspec.heads.mtp_weights import draw_weights, plain, read_weights, save_mtp
from batchspec.heads.teacher import Teacher
from batchspec.heads.trained_drafter import TrainedDrafter, dtype_of_inputs
from batchspec.model.mtp import MtpSpec
from batchspec.model.spec import ModelSpec, load_spec
from batchspec.model.target import Target
from batchspec.model.weights import Checkpoint


class MtpLayer(TrainedDrafter):
    """It starts from draft.path, or from the target's checkpoint; from random weights if that has none, or is not read."""

    name = "mtp"

    def __init__(self, run: TrainRun, files: ModelFiles, target: ModelSpec) -> None:
        super().__init__(run, files, target)
        found = load_spec(files.folder).mtp
        if found is None:
            raise ConfigError(
                f"draft=mtp: by its config.json {run.model.path} ({target.family}) has no MTP layer that is supported; use "
                "draft=eagle3 or draft=parallel"
            )
        biases = [vector.name for vector in found.layer.mlp.vectors if vector.role == "bias"]
        if biases:
            raise ConfigError(
                f"draft=mtp: {biases[0]} of the MTP layer of {run.model.path} ({target.family}) chooses experts and has no "
                "gradient, so that layer is not trained; jobs draft with it as it is, and draft=eagle3 or draft=parallel can be "
                "trained"
            )
        self._mtp, self._start = plain(found), self._source(found)
        if self._start is not None:
            self.usual_lr = 1e-4

    def _source(self, mtp: MtpSpec) -> tuple[ModelFiles, MtpSpec] | None:
        """The files of the weights that it starts from, and the layer with their weight formats; None: they are random."""
        path = self._run.draft.path
        if path is None and (self._run.model.load_format == "dummy" or self._target.mtp is None):
            return None
        files = self._files if path is None else find_model(path, key="draft.path")
        return files, open_mtp(files, mtp)

    @property
    def notes(self) -> tuple[str, ...]:
        if self._start is not None:
            return ()
        dummy = self._run.model.load_format == "dummy"
        why = "model.load_format=dummy reads none" if dummy else f"{self._run.model.path} has no tensors of its MTP layer"
        return (f"{why}: the layer starts from random weights",)

    def network(self, target: Target, rows: list[Row]) -> MtpNetwork:
        dtype = torch.promote_types(target.dtype, torch.float32)
        every = torch.arange(target.spec.vocab_size, device=target.device)
        inputs = dtype_of_inputs(target.dtype, target.device)
        matrix = (target.embedding if target.spec.tie else target.output_rows(every)).to(inputs)
        network = MtpNetwork(self._mtp, matrix).to(dtype)
        if self._start is None:
            draw_weights(network, norm_of_random_states(target, matrix), seed=self._run.train.seed)
        else:
            files, spec = self._start
            files.fetch()
            with Checkpoint(files.folder, spec, dtype=dtype, device=torch.device("cpu")) as weights:
                read_weights(network, spec, weights)
                weights.check_unchanged()
        return network.to(target.device)

    def teacher(self, target: Target) -> Teacher:
        return self._teacher(target, (), None)

    def about(self, network: DraftNetwork, rows: list[Row]) -> str:
        own = self._run.draft.path or self._run.model.path
        begins = "random weights" if self._start is None else f"the weights of {own}"
        drafted = f"drafts all {self._target.vocab_size:,} tokens"
        return f"an MTP layer of {network.num_weights:,} weights starts from {begins} and {drafted}"

    def save(self, folder: Path, network: DraftNetwork, dtype: torch.dtype) -> None:
        assert isinstance(network, MtpNetwork)
        assert self._run.model.path is not None
        save_mtp(
            folder, network, self._target, dtype=dtype, target_name=self._run.model.path,
            draft_len=self._run.draft.draft_len,
        )
