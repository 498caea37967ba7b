"""The MTP layer of a checkpoint as trainable network; see `batchspec.model.mtp` for its formula.

B rows, L positions (padded at the end), H hidden, V vocabulary. Draft step 0 reads the target's hidden states after its final
norm, step k what step k-1 left after the norm that follows the layer, as in a job. Norms have the weights that they multiply by:
files hold these less `NormForm.offset`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchspec.heads.layer import Layer, Norm, place
from batchspec.heads.step_network import StepNetwork
from batchspec.model.layers.base import projections
from batchspec.model.mtp import MtpSpec


class MtpNetwork(StepNetwork):
    """Parameters are named as in a checkpoint, without the prefix `mtp.`. The output matrix is the target's, and not trained."""

    def __init__(self, spec: MtpSpec, output_matrix: Tensor) -> None:
        """output_matrix [V, H]: of the target. It keeps its device and its dtype when the network is moved."""
        super().__init__(spec.layer.attention.rotation, spec.layer.attention.head_dim, 1)
        self.spec = spec
        for vector in spec.join.vectors:
            place(self, vector.name.removesuffix(".weight"), Norm(vector.shape[0], spec.join.eps, wide=vector.wide))
        (fc,) = spec.join.product.parts
        place(self, fc.name, nn.Linear(fc.k, fc.rows, bias=fc.bias))
        self._layer_name = spec.layer_prefix.removeprefix(spec.prefix).removesuffix(".")
        place(self, self._layer_name, Layer(spec.layer))
        self._output_matrix = output_matrix

    @property
    def output_matrix(self) -> Tensor:
        return self._output_matrix

    def matrices(self) -> dict[str, Tensor]:
        """fc and the projections of the layer. Routers and experts are left out: many experts get no token of a batch."""
        names = [part.name for part in projections(self.spec.join)]
        names += [f"{self._layer_name}.{part.name}" for block in self.spec.layer.blocks for part in projections(block)]
        return {f"{name}.weight": self.get_parameter(f"{name}.weight") for name in names}

    def forward(self, embedded: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """features [B, L, H]: the target's hidden states after its final norm."""
        join = self.spec.join
        fc, layer = self.get_submodule(join.fc), self.get_submodule(self._layer_name)
        of_embedding, of_hidden, out_norm = (
            self.get_submodule(name) for name in (join.embedding_norm, join.hidden_norm, join.out_norm)
        )
        state = features
        all_steps, (keys,) = self._begin(embedded, steps)
        for step in all_steps:
            joined = fc(torch.cat((of_embedding(embedded), of_hidden(state)), -1))
            state = out_norm(layer(joined, step, keys))
            yield state
            embedded = F.pad(embedded[:, 1:], (0, 0, 0, 1))
