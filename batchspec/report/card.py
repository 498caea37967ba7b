"""README.md of an output folder: a dataset card that says how the rows were made and how to make them again."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from batchspec.io.manifest import Manifest
from batchspec.report.stats import JobStats
from batchspec.values import literal

CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*.parquet
tags:
- batchspec
- synthetic
---

# Completions by {model}

Made by batchspec: one row per completion, in the order of the input.

```python
datasets.load_dataset("FOLDER")  # this folder; or polars.read_parquet("FOLDER/data")
```

{facts}

## Run it again

Save this as `mine/job/again.yaml` and run `python -m batchspec.run --config-dir mine +job=again`.

```yaml
# @package _global_
{config}
```
"""


def dataset_card(manifest: Manifest, stats: JobStats) -> str:
    """The card of a job, in Markdown; its front matter points datasets.load_dataset at data/."""
    config = manifest.config
    model, decode = config.get("model", {}), config.get("decode", {})
    sampling = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "seed", "n", "max_new_tokens")
    files = ", ".join(f"{file.name} ({file.num_rows:,} rows)" for file in manifest.files[:5])
    more = f" and {len(manifest.files) - 5} more" if len(manifest.files) > 5 else ""
    facts = {
        "Model": f"`{model.get('path')}`" + (f" at {model['revision']}" if model.get("revision") else ""),
        "Chat template": f"`{model['chat_template']}`" if model.get("chat_template") else "the checkpoint's own",
        "Sampling": ", ".join(f"{name} {decode[name]}" for name in sampling if name in decode),
        "Source": files + more,
        "Completions": ", ".join(f"{count:,} {status}" for status, count in stats.by_status.items()),
        "Tokens": f"{stats.prompt_tokens:,} in prompts, {stats.completion_tokens:,} in completions",
        "Drafter": stats.drafter,
    }
    overall = stats.overall
    if overall.mean_acceptance_length is not None and overall.acceptance_rate is not None:
        facts["Mean acceptance length"] = (
            f"{overall.mean_acceptance_length:.3f} tokens a round, {overall.acceptance_rate:.1%} of {overall.drafted:,} "
            "draft tokens accepted"
        )
        rates = ("-" if position.rate is None else f"{position.rate:.1%}" for position in stats.by_position)
        facts["Acceptance by position"] = ", ".join(rates)
    listed = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())])
    return CARD.format(model=model.get("path"), facts=listed, config="\n".join(_yaml(config)))


def _yaml(values: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Block YAML of nested mappings, whose values come back as they are where Hydra reads it: no `${...}` is an interpolation."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{_yaml_key(key)}:"
            yield from _yaml(value, indent + "  ")
        else:
            yield f"{indent}{_yaml_key(key)}: {_yaml_value(literal(value))}"


def _yaml_key(key: str) -> str:
    return key if re.fullmatch("[a-z]+(_[a-z]+)*", key) and key not in _YAML_WORDS else _yaml_value(key)


_YAML_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")


def _yaml_value(value: Any) -> str:
    """Flow YAML 1.1. Strings are quoted and printable, whatever they hold; a float has the point that YAML wants."""
    if isinstance(value, str):
        text = "".join(map(_yaml_character, value))
        return '"' + text.replace("```", "``\\x60") + '"'  # which would end the block of code
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_yaml_value(str(key))}: {_yaml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_yaml_value, value)) + "]"
    if isinstance(value, float):
        if not math.isfinite(value):
            return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
        return re.sub(r"^(-?\d+)e", r"\1.0e", repr(value))
    return json.dumps(value)


def _yaml_character(character: str) -> str:
    if character in '\\"':
        return "\\" + character
    if character.isprintable():
        return character
    return f"\\U{ord(character):08x}"
