"""README.md of an output folder: a dataset card that describes how the rows were made and how to make them again."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from batchspec.config.values import literal
from batchspec.console.text import counted, for_markdown, for_terminal, one_line
from batchspec.data.runstate.manifest import Manifest
from batchspec.job.report.about import input_rows, is_local, last_part, sampling
from batchspec.job.report.columns import meaning
from batchspec.job.report.stats import JobStats
from batchspec.tasks.registry import saved_task

CARD = """---
configs:
- config_name: ok
  default: true
  data_files:
  - split: train
    path: data/*.parquet
  filters: [[status, "==", ok]]
- config_name: all
  data_files:
  - split: train
    path: data/*.parquet
license: {license}
tags:
- batchspec
- synthetic
---

# Completions by {model}

Made by batchspec: one row per completion, in the order of the input.

```python
rows = datasets.load_dataset("FOLDER", split="train")  # this folder: its rows with status ok
rows = datasets.load_dataset("FOLDER", "all", split="train")  # every row; or polars.read_parquet("FOLDER/data")
```

The first line needs datasets 3.2 or newer: older versions ignore the card's `filters`, and give every row. It fails if no row
is ok.

{facts}

## Columns

{columns}
{training}
## Run it again

Save this as `mine/job/again.yaml` and run `{command}`.

{fence}yaml
# @package _global_
{config}
{fence}
"""

TRAINING = """
## Train on it

Give a trainer one format of the rows: TRL takes the list `messages` and the text `completion` of one row for two formats.
"""
MESSAGES = """
```python
rows = datasets.load_dataset("FOLDER", split="train").select_columns(["messages"])
trainer = trl.SFTTrainer(model, train_dataset=rows)
```
"""
EXPORT = """
`batchspec export FOLDER --to prompt_completion train.parquet` writes the ok rows as `prompt` and `completion`, both lists of
turns: TRL then computes the loss on the completion alone.
"""

PATHS = (
    "model.path", "model.adapter", "model.adapters", "model.chat_template", "draft.path", "input.path",
    "input.from_job", "output.dir", "output.openai", "decode.schema", "decode.grammar",
)
TEXTS = ("decode.schema", "decode.grammar")
"""Of those the ones that may also be a map, or a text of one line or more."""
UNLICENSED = "not stated; see the licences of the model and of the prompts"


def dataset_card(manifest: Manifest, stats: JobStats) -> str:
    """The card of a job, in Markdown; its front matter points datasets.load_dataset at data/, by default at its ok rows.

    It may be published: of a path on this machine it has only the last part.
    """
    config, left_out = _without_local_paths(manifest.config)
    lines = "\n".join(_yaml(config))
    again = ["python -m batchspec.run --config-dir mine +job=again", *(f"{key}=..." for key in left_out)]
    model = manifest.config.get("model", {})
    kept = manifest.config.get("output", {}).get("messages", "full")
    task = saved_task(manifest.config)
    columns = ((for_markdown(name), kind, meaning(name, task)) for name, kind in stats.columns.items())
    training = {"full": TRAINING + MESSAGES + EXPORT, "prompt": TRAINING + EXPORT}.get(kept, "")
    card = CARD.format(
        license=json.dumps(_license(manifest) or "unknown"),
        model=for_markdown(last_part(model.get("path"))),
        facts=_table(("", ""), _facts(manifest, stats).items()),
        columns=_table(("column", "type", "meaning"), columns),
        training=training,
        command=" ".join(again),
        fence="`" * max(3, 1 + max(map(len, re.findall("`+", lines)), default=0)),
        config=lines,
    )
    return for_terminal(card)  # in case a part was not escaped: no control character gets into the file


def _facts(manifest: Manifest, stats: JobStats) -> dict[str, str]:
    """Name of each fact -> its value in Markdown."""
    model = manifest.config.get("model", {})
    files = ", ".join(f"{for_markdown(file.name)} ({counted(file.num_rows, 'row')})" for file in manifest.files[:5])
    more = f" and {len(manifest.files) - 5} more" if len(manifest.files) > 5 else ""
    template = model.get("chat_template")
    revision = f" at {for_markdown(model['revision'])}" if model.get("revision") else ""
    facts = {
        "Model": for_markdown(last_part(model.get("path"))) + revision,
        **({"Weights": for_markdown(weights)} if (weights := manifest.recorded.get("weights")) else {}),
        **({"LoRA adapter": adapter} if (adapter := _adapter(manifest)) else {}),
        **({"LoRA adapters of rows": adapters} if (adapters := _adapters(manifest)) else {}),
        "Chat template": for_markdown(last_part(template)) if template else "the checkpoint's own",
        "Sampling": sampling(manifest.config),
        "Source": files + more,
        "Input rows": input_rows(manifest),
        "Licence": for_markdown(_license(manifest)) if _license(manifest) else UNLICENSED,
        "Completions": ", ".join(f"{count:,} {one_line(status)}" for status, count in stats.by_status.items()),
        "Tokens": f"{stats.prompt_tokens:,} in prompts, {stats.completion_tokens:,} in completions",
        "Drafter": _drafter(manifest, stats),
    }
    overall = stats.overall
    if overall.mean_acceptance_length is not None and overall.acceptance_rate is not None:
        facts["Mean acceptance length"] = (
            f"{overall.mean_acceptance_length:.3f} tokens per round, {overall.acceptance_rate:.1%} of {overall.drafted:,} "
            "draft tokens accepted"
        )
        rates = ("-" if position.rate is None else f"{position.rate:.1%}" for position in stats.by_position)
        facts["Acceptance by position"] = ", ".join(rates)
    return facts


def _drafter(manifest: Manifest, stats: JobStats) -> str:
    """The drafters of the rows, and why draft=auto took that of the first run."""
    why = manifest.recorded.get("why_drafter")
    return f"{stats.drafter} ({for_markdown(why)})" if why and manifest.recorded["drafter"] in stats.drafter else stats.drafter


def _adapter(manifest: Manifest) -> str:
    """Name and digest of the adapter; empty without one."""
    path, digest = manifest.config.get("model", {}).get("adapter"), manifest.recorded.get("adapter_sha256")
    return f"{for_markdown(last_part(path))}, of all rows (adapter_model.safetensors: sha256 {digest})" if path else ""


def _adapters(manifest: Manifest) -> str:
    """Name, folder and digest of each of model.adapters; empty without any."""
    paths, digests = manifest.config.get("model", {}).get("adapters") or {}, manifest.recorded.get("adapters_sha256", {})
    return ", ".join(
        f"{for_markdown(name)}: {for_markdown(last_part(path))} (sha256 {digests.get(name)})" for name, path in paths.items()
    )


def _license(manifest: Manifest) -> str | None:
    name = manifest.config.get("output", {}).get("license")
    return None if name is None else str(name)


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table of one-line Markdown cells. `|` is escaped: it ends a cell, even in a code span (GFM, tables)."""
    rule = "|---" * len(header) + "|"
    rows = ("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return "\n".join(["| " + " | ".join(header) + " |", rule, *rows])


def _without_local_paths(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The settings without local paths (of PATHS), and the keys left out."""
    kept, left_out = {key: dict(value) if isinstance(value, Mapping) else value for key, value in config.items()}, []
    kept.pop("cluster", None)  # it does not affect rows, and holds accounts and log paths
    for key in PATHS:
        group, name = key.split(".")
        value = config.get(group, {}).get(name)
        given = key in TEXTS and (not isinstance(value, str) or "\n" in value)  # a map, or text that may begin with a slash
        if is_local(value) and not given:
            del kept[group][name]
            left_out.append(key)
    return kept, left_out


def _yaml(values: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Block YAML of nested mappings. Hydra reads the same values back: `${...}` is escaped, so that it is not interpolated."""
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
    """A value in flow YAML 1.1. Strings are quoted and printable; floats have the decimal point that YAML requires."""
    if isinstance(value, str):
        text = "".join(map(_yaml_character, value))
        return '"' + text.replace("```", "``\\x60") + '"'  # ``` would end the code block
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
