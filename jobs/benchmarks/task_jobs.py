"""Writes jobs of tasks without decoding for models with dummy weights, and prints the commands that run and plan them.

    python jobs/benchmarks/task_jobs.py DIR --task embed --rows 100000   # Qwen3-Embedding-0.6B's shape, about 128 tokens a row
    python jobs/benchmarks/task_jobs.py DIR --task reward --rows 2000    # Llama-3.1-8B's with a score, about 1,024 tokens
    python jobs/benchmarks/task_jobs.py DIR --task rerank --rows 16384   # Qwen3-Reranker-0.6B's, 256 documents for each query

Lengths are lognormal. DIR gets `model` (config.json, a tokenizer) and `in.parquet`: columns id and prompt_ids, or id, query and
document. For rerank also `peer_model` and `ids.parquet`, the same prompts for `peer_jobs.py`: vLLM scores with a matrix of one
label, batchspec with the logits of two tokens.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from batchspec.tasks.rerank import AFTER, BEFORE, HEAD, INSTRUCTION, MARKS

DOCUMENTS = 256
"""Documents of a query."""
SPECIAL = ("<|endoftext|>", "<|pad|>", *MARKS)
_COMMON: dict[str, Any] = {
    "dtype": "bfloat16", "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "num_key_value_heads": 8,
    "head_dim": 128, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1,
}
_QWEN: dict[str, Any] = _COMMON | {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "vocab_size": 151669, "max_position_embeddings": 32768, "rope_theta": 1e6, "tie_word_embeddings": True,
}
_LLAMA: dict[str, Any] = _COMMON | {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
}
_ONE_LABEL: dict[str, Any] = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
CONFIGS: dict[str, dict[str, Any]] = {
    "embed": _QWEN | {"architectures": ["Qwen3ForCausalLM"]},
    "reward": _LLAMA | _ONE_LABEL | {"architectures": ["LlamaForSequenceClassification"]},
    "rerank": _QWEN | {"architectures": ["Qwen3ForCausalLM"]},
}
PEER_OF_RERANK: dict[str, Any] = _QWEN | _ONE_LABEL | {"architectures": ["Qwen3ForSequenceClassification"]}
TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "dtype": "float32",
}
"""Laid over a shape by --tiny, to try a job on a CPU."""
LENGTHS = {"embed": (128, 0.6, 8, 1500), "reward": (1024, 0.5, 64, 4000), "rerank": (160, 0.4, 20, 600)}
"""Of a row, for rerank of a document: mean, sigma, least, most."""


def tokenizer_of(text: str) -> Tokenizer:
    """A BPE of 12,000 tokens, which it learns from `text`."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learn = trainers.BpeTrainer(
        vocab_size=12_000, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(text.splitlines(keepends=True), learn)
    return made


def write_model(folder: Path, config: dict[str, Any], tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0], "pad_token": SPECIAL[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


class Rows:
    """Draws prompts of random tokens, or pieces of a text, from one seed."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self.text, self.tokenizer, self.random = text, tokenizer, np.random.default_rng(0)
        self.offsets = tokenizer.encode(text, add_special_tokens=False).offsets

    def lengths(self, task: str, count: int) -> list[int]:
        mean, sigma, least, most = LENGTHS[task]
        drawn = self.random.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
        return [int(length) for length in np.clip(drawn, least, most)]

    def piece(self, tokens: int) -> str:
        at = int(self.random.integers(0, len(self.offsets) - tokens))
        return self.text[self.offsets[at][0] : self.offsets[at + tokens - 1][1]]

    def prompt_ids(self, task: str, count: int) -> pa.Table:
        lengths = self.lengths(task, count)
        ids = self.random.integers(len(SPECIAL), 11_000, sum(lengths), dtype=np.int32)
        ends = np.cumsum([0, *lengths]).astype(np.int32)
        return _table(prompt_ids=pa.ListArray.from_arrays(pa.array(ends), pa.array(ids)))

    def pairs(self, count: int) -> pa.Table:
        queries = [self.piece(24) for _ in range(-(-count // DOCUMENTS))]
        documents = [self.piece(n) for n in self.lengths("rerank", count)]
        return _table(query=[queries[i // DOCUMENTS] for i in range(count)], document=documents)

    def ids_of(self, pairs: pa.Table) -> pa.Table:
        """The prompts that `task=rerank` makes of pairs; parts are tokenised by themselves, as it does."""
        before, after = (self._ids(part) for part in (BEFORE, AFTER))
        head = [HEAD.format(INSTRUCTION, query) for query in pairs["query"].to_pylist()]
        documents = pairs["document"].to_pylist()
        ids = [before + self._ids(h + d) + after for h, d in zip(head, documents, strict=True)]
        return _table(prompt_ids=pa.array(ids, pa.list_(pa.int32())))

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


def _table(**columns: Any) -> pa.Table:
    count = len(next(iter(columns.values())))
    return pa.table({"id": [f"row-{i}" for i in range(count)], **columns})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=CONFIGS, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers, for a CPU")
    given = parser.parse_args(arguments)
    folder, small = given.folder, TINY if given.tiny else {}
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:160]
    text = "\n".join(path.read_text(errors="ignore") for path in sources)
    tokenizer = tokenizer_of(text)
    rows = Rows(text, tokenizer)
    write_model(folder / "model", CONFIGS[given.task] | small, tokenizer)
    if given.task == "rerank":
        pairs = rows.pairs(given.rows)
        pq.write_table(pairs, folder / "in.parquet")
        write_model(folder / "peer_model", PEER_OF_RERANK | small, tokenizer)
        pq.write_table(rows.ids_of(pairs), folder / "ids.parquet")
    else:
        pq.write_table(rows.prompt_ids(given.task, given.rows), folder / "in.parquet")
    words = (
        f"model.path={folder}/model model.load_format=dummy model.max_len=4096 input.path={folder}/in.parquet "
        f"task={given.task} output.overwrite=true output.dir={folder}/out"
    )
    print(f"python -m batchspec.run {words}\nbatchspec plan {words}")


if __name__ == "__main__":
    main()
