"""A recurrent checkpoint with an MTP layer whose drafts are all right, by construction and not by training.

Every token is the successor of the one LAG tokens before it, whatever the prompt. The model finds that one by the convolution of
its recurrent layer, the MTP layer by attention to two distances. A token t is written as two digits, t mod 5 and t mod 6, and the
layer takes each from another place, so that it needs all of its inputs:

    the first digit   from embed(token[q+1]), LAG - 1 positions back
    the second digit  from h[q], LAG - 2 positions back; before the final norm h[q] also holds a wrong digit,
                      which the norm removes

Its own output holds the digits of what it drafts and none of what it has read, so it cannot replace a hidden state of the
target at later positions. The first K <= LAG - 1 drafts attend to positions whose hidden states the target has computed.

    stream of the model   ID: the token's digits | NEXT: those of the next token | OTHER: a second digit that is not the token's
                          ONE: 1, which the output matrix reads a little of, so that no two tokens are equally likely
    input of the layer    ID: the first digit of the embedding, the second of the hidden state | ONE: 1

A second model's layer takes both digits from the embedding, and true hidden states mislead it: it drafts better with the K/V of
its drafting passes in place of the right ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.engines import VOCAB
from tests.helpers.models import make_checkpoint
from tests.helpers.mtp_checkpoints import SAYS_MTP, Tensors, change_config, mtp_tensors, text_config, write_model

LAG = 10
FIRST, SECOND = 5, 6
DIGITS = FIRST + SECOND
NUM_TOKENS = FIRST * SECOND
"""The last token of the vocabulary has no digits and is never written."""
ID, NEXT, OTHER, ONE = slice(0, DIGITS), slice(DIGITS, 2 * DIGITS), slice(2 * DIGITS, 2 * DIGITS + SECOND), 2 * DIGITS + SECOND
HEAD_DIM, THETA = 16, 200.0
SHARPNESS = 100.0
"""Factor of normed queries: attention falls on one position."""
LOUD = 3.0
"""How much larger OTHER is than the digits."""
SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": HEAD_DIM, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": SECOND, "linear_conv_kernel_dim": LAG,
    "max_position_embeddings": 512, "eos_token_id": None, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 1.0},
}


def successor(token: int) -> int:
    return (token + 1) % NUM_TOKENS


def continued(prompt: list[int], count: int) -> list[int]:
    """What the model writes after a prompt of at least LAG tokens."""
    row = list(prompt)
    for _ in range(count):
        row.append(successor(row[-LAG]))
    return row[len(prompt) :]


def make_exact_model(folder: Path, *, noise: float = 0.0, misled: bool = False) -> Path:
    """The checkpoint in `folder`.

    noise   standard deviation of what is added to the MTP layer's weights, so that drafts err
    misled  True: the second model
    """
    make_checkpoint(folder, "qwen3_5_text", vocab=VOCAB, **SHAPE)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    mtp = {name: torch.zeros_like(tensor) for name, tensor in mtp_tensors(text_config(folder), seed=0).items()}
    _build_model(tensors)
    _build_mtp(mtp, misled=misled)
    rng = torch.Generator().manual_seed(5)
    write_model(folder, tensors, {name: x + noise * torch.randn(x.shape, generator=rng) for name, x in mtp.items()})
    change_config(folder, **SAYS_MTP)
    return folder


def _digits() -> Tensor:
    """[V, DIGITS] two ones for each token."""
    found = torch.zeros(VOCAB, DIGITS)
    for token in range(NUM_TOKENS):
        found[token, [token % FIRST, FIRST + token % SECOND]] = 1
    return found


def _successors() -> Tensor:
    """[DIGITS, DIGITS] the digits of a token to those of its successor."""
    found = torch.zeros(DIGITS, DIGITS)
    for i in range(FIRST):
        found[(i + 1) % FIRST, i] = 1
    for i in range(SECOND):
        found[FIRST + (i + 1) % SECOND, FIRST + i] = 1
    return found


def _build_model(tensors: Tensors) -> None:
    """The attention layer and both MLPs add nothing."""
    embedding, digits = tensors["model.embed_tokens.weight"], _digits()
    embedding[:, ID] = digits
    embedding[:, ONE] = 1
    embedding[:NUM_TOKENS, OTHER] = LOUD * digits[:NUM_TOKENS, FIRST:].roll(-2, 0)
    output = tensors["lm_head.weight"]
    output[:, NEXT] = digits
    output[:, ONE] = torch.arange(VOCAB) * 7 % VOCAB * 0.002
    tensors["model.norm.weight"][OTHER] = -1
    at = "model.layers.0.linear_attn."
    # q, k and z are constant; v are the digits of LAG - 1 tokens before, a head for each.
    qkv, taps = tensors[f"{at}in_proj_qkv.weight"], tensors[f"{at}conv1d.weight"]
    keys, value = 2 * 2 * SHAPE["linear_key_head_dim"], [*range(FIRST), *range(SECOND, 2 * SECOND)]
    qkv[:keys, ONE] = 1
    qkv[[keys + row for row in value], ID] = torch.eye(DIGITS)
    taps[:keys, 0, -1] = 1
    taps[keys:, 0, 0] = 1
    tensors[f"{at}in_proj_z.weight"][:, ONE] = 1
    tensors[f"{at}dt_bias"].fill_(50)  # the state forgets at once
    tensors[f"{at}norm.weight"].fill_(1)
    out = torch.zeros(DIGITS, 2 * SECOND)
    out[:, value] = _successors()
    tensors[f"{at}out_proj.weight"][NEXT] = out


def _build_mtp(tensors: Tensors, *, misled: bool) -> None:
    """Head 0 reads the first digit, head 1 the second one; the MLP adds nothing."""
    hidden, layer, half = SHAPE["hidden_size"], "mtp.layers.0.self_attn.", HEAD_DIM // 2
    tensors["mtp.pre_fc_norm_embedding.weight"][OTHER] = -1
    fc, first, second = tensors["mtp.fc.weight"], slice(0, FIRST), slice(FIRST, DIGITS)
    fc[ONE, ONE] = 1
    fc[first, first] = torch.eye(FIRST)
    if misled:
        fc[second, second] = torch.eye(SECOND)
        fc[second, hidden : hidden + FIRST] = LOUD * torch.eye(SECOND, FIRST)
    else:
        for source in (second, OTHER):
            fc[second, hidden + source.start : hidden + source.stop] = torch.eye(SECOND)
    frequency = THETA ** (-torch.arange(half) / half)
    q, k, v = (tensors[f"{layer}{part}_proj.weight"] for part in "qkv")
    out = tensors[f"{layer}o_proj.weight"]
    for head, (digit, distance) in enumerate(((first, LAG - 1), (second, LAG - 1 if misled else LAG - 2))):
        place = HEAD_DIM * head
        q[2 * place : 2 * place + HEAD_DIM, ONE] = torch.cat(((frequency * distance).cos(), -(frequency * distance).sin()))
        k[place : place + half, ONE] = 1
        size = digit.stop - digit.start
        v[place : place + size, digit] = torch.eye(size)
        out[NEXT, place : place + size] = _successors()[:, digit]
    tensors[f"{layer}q_norm.weight"].fill_(SHARPNESS)
    tensors["mtp.norm.weight"].fill_(-1)[NEXT] = 0
