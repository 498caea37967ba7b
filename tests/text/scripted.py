"""Tiny models that say a fixed text, whatever the prompt: each of their tokens is a text of its own and leads to the next one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import torch

BEGIN, END = "<s>", "</s>"
"""The prompt that makes the model speak, and its EOS: special tokens."""


def make_scripted(folder: Path, says: Sequence[str], *, special: Sequence[str] = (), chat_template: str | None = None) -> Path:
    """A model that says these texts, a token each and all different, and then EOS. special: those that are special tokens.

    Its tokenizer knows every printable ASCII character too. A chat template ends a prompt with <s>.
    """
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    from batchspec.model.spec import load_spec
    from batchspec.model.weights import expected_shapes

    chain = [BEGIN, *says, END]
    assert len(set(chain)) == len(chain), "a token leads to one other token"
    ids = {text: token for token, text in enumerate(dict.fromkeys([*chain, "\n", *map(chr, range(32, 127))]))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=BEGIN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in (BEGIN, END, *special)])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END, "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    size = len(ids)
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": size, "hidden_size": size,
        "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu", "bos_token_id": ids[BEGIN],
        "eos_token_id": ids[END], "tie_word_embeddings": False, "dtype": "float64",
    }))
    tensors = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in expected_shapes(load_spec(folder)).items()}
    tensors["model.embed_tokens.weight"] = torch.eye(size, dtype=torch.float64)
    tensors["model.norm.weight"] += 1
    for before, after in itertools.pairwise(chain):
        tensors["lm_head.weight"][ids[after], ids[before]] = 20.0
    save_file(tensors, folder / "model.safetensors")
    return folder
