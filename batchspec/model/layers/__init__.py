"""The kinds of layers: their shapes, and how they are built and computed. A layer is a mixer and an MLP, or one of
them (layer.py).

kind.py              what the rest of batchspec may know of a mixer: what it keeps of a row, what it costs, how it is built
passes.py            a pass: its batch, and what mixers prepare once for several layers
base.py, forward.py  what every block says of itself, and what a block computes with
layer.py             a layer, of one block or more; layer_inputs.py: inputs of layers besides the stream
scaled.py            factors of what products compute

Mixers:
attention/           softmax attention over pages of K and V
gated_delta/         the gated delta rule, which keeps a state of a row
latent/              latent attention, which keeps one vector per token
mamba2/              Mamba2, a state space, which keeps a state of a row
parallel/            attention and Mamba2 in parallel
short_conv/          short convolutions, which keep the newest inputs of a row
MLPs:
mlp/                 dense, and experts; with a gate or, with relu^2, without one
"""
