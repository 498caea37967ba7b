"""The help of the commands that take keys, and `python -m batchspec.commands.reference`, which writes conf/README.md.

Neither torch nor Hydra is imported: `batchspec run --help` answers at once.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from batchspec.config import train_schema as settings
from batchspec.config.reference import (
    DescribedKey,
    default_options,
    defaults_of,
    described_keys,
    groups_of,
    option_comment,
    options,
)
from batchspec.config.schema import KEYS, RunConfig
from batchspec.console import terminal

PAGE = Path(__file__).parents[2] / "conf" / "README.md"
"""Where the page lies in a clone."""
INDENT, NARROWEST, WIDEST = 40, 100, 150
"""Columns of the help: where descriptions begin, and the widths between which it follows the terminal."""

RUN_HELP = """\
Run a job: Parquet in, completions and acceptance statistics out.

  batchspec run +job=demo
  batchspec run +job=reasoning_8k model.path=Qwen/Qwen3-8B input.path=prompts.parquet
  batchspec run model.path=./model input.path='data/*.parquet' output.dir=out/a decode=sampled decode.n=4
  batchspec run --config-dir mine +job=mine decode.max_new_tokens=512
  batchspec run -m +job=demo draft=none,lookup output.dir='out/${draft.name}'

`python -m batchspec.run` is the same command. The same command again resumes a job. `--cfg job` prints the configuration
without running it, `-m` runs several jobs, `--config-dir` reads recipes and groups of your own, `--hydra-help` lists the other
options. `batchspec plan` with the same arguments predicts what a run would do."""
PLAN_HELP = """\
Predict what a run would do, without running it: rows, bad rows, lengths, shape, memory, seconds.
Takes the arguments of `batchspec run`.

  --full        read every row, not a sample of 10,000
  --card NAME   plan for this card, as A100-80GB or L40S, on a machine without it: computed, not measured
  --json        print one JSON object; its names are those of `status --json` where they mean the same

The exit code is that of the run, as far as it can be known before: 0, 2 (refused), 3 (too many error rows), 74 (storage)."""
SUBMIT_HELP = """\
Submit a job as a Slurm array. Takes the arguments of `batchspec run`; the keys of `cluster` describe the array.

  --go      run sbatch; without it the command is only printed
  --to kubernetes|skypilot  print the file of jobs/manifests for that system, filled in; --image IMAGE is that of the containers
  --unseen  check the configuration alone, for paths that only the nodes of the cluster see"""
TRAIN_HELP = """\
Train an EAGLE-3 draft head, or tune the MTP layer of a model's own checkpoint, on the completions of jobs. The same command
again goes on with a training that was stopped.

  batchspec train draft=eagle3 model.path=MODEL input.path=OUT output.dir=HEAD
  batchspec train draft=parallel draft.path=HEAD model.path=MODEL input.path='[OUT1,OUT2]' output.dir=HEAD2 train.layers=4
  batchspec train draft=mtp model.path=MODEL input.path=OUT output.dir=LAYER"""

HELP = {"run": RUN_HELP, "plan": PLAN_HELP, "submit": SUBMIT_HELP, "train": TRAIN_HELP}
"""Command -> the beginning of its help; the keys follow."""
RECIPES = "job"
ADVANCED = "advanced"
ABOUT_ADVANCED = """\
Keys that few jobs set. Those of `ablation` switch optimisations off one by one, to measure what each is worth: no output token
depends on them.""".replace("\n", " ")


def help_text(command: str, *, width: int | None = None) -> str:
    """The help of a command that takes keys. width: columns of a line; None: those of the terminal."""
    columns = width or min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)
    about = _about(settings.TrainRun if command == "train" else RunConfig)
    lines = [HELP[command], "", *(_group_lines(columns) if command != "train" else []), "Keys (key=default):"]
    for group, keys in _by_group(keys_for(command)).items():
        lines += ["", f"{group}: {about[group]}" if group else "others"]
        lines += [_folded(f"  {key.name}={key.default_text}", _summary(key), INDENT, columns) for key in keys]
    lines += ["", "Types, ranges and longer descriptions of the keys are in conf/README.md of the source."]
    return "\n".join(lines)


def keys_for(command: str) -> list[DescribedKey]:
    """The keys that a command reads."""
    if command != "train":
        return described_keys(RunConfig, KEYS, defaults=defaults_of("run"))
    training = described_keys(
        settings.TrainRun, settings.KEYS, defaults=defaults_of("train"), descriptions=settings.DESCRIPTIONS
    )
    return [replace(key, drafters=()) for key in training]


def page() -> str:
    """The text of conf/README.md."""
    run, train = keys_for("run"), keys_for("train")
    known = {key.name: key for key in run}
    new = [key for key in train if key.name not in known or key.summary != known[key.name].summary]
    job = [JOB_HEAD, *_tables(run, _about(RunConfig))]
    training = [TRAIN_HEAD, *_tables(new, _about(settings.TrainRun))]
    return "\n".join([PAGE_HEAD, *_option_table(), "", *job, "", *training, ""])


PAGE_HEAD = """\
# Configuration

`python -m batchspec.commands.reference` makes this page from `batchspec/config/schema.py` and `batchspec/config/train_schema.py`.

A key is written as `key=value` on the command line, or in YAML in a recipe. A map is `'key={name: value}'` or JSON text,
`'key={"name": "value"}'`. A group is a folder of this directory: `draft=eagle3` takes the values of `draft/eagle3.yaml`. A
recipe is a file of `job/`, taken by `+job=NAME`. The command line has precedence over a recipe, a recipe over groups, groups
over the defaults below. `--config-dir mine` adds a folder of your own with the same structure: `mine/job/NAME.yaml`,
`mine/model/NAME.yaml` and so on. A recipe looks like this:

```yaml
# @package _global_
defaults:
  - override /draft: eagle3
  - override /decode: sampled
model: {path: Qwen/Qwen3-8B}
draft: {path: ./head}
input: {path: 'prompts/*.parquet'}
output: {dir: out/answers}
```

`batchspec run --help` lists every key, and `batchspec run --cfg job ...` prints the configuration that a command line gives.
An unknown key, a wrong type and a value out of range are refused in one line, before any work.

## Groups
"""
JOB_HEAD = """\
## Keys of a job

These are the keys of `run`, `plan`, `submit`, `batchspec.generate` and `batchspec.Engine`. The defaults are those of a job that
chooses no other option of a group. Lengths are in tokens unless the name ends in another unit (`_s` seconds, `_h` hours, `_gb`
1e9 bytes).
Drafters in brackets are those that read the key; with draft=auto the one that it takes must read it. Per-row columns of the input
obey the ranges of the keys of their name."""
TRAIN_HEAD = """\
## Keys of `batchspec train`

The keys of `model` and `device` are those of a job, but `model.adapter`, `model.adapters`, `model.chat_template` and
`model.think_tokens` are not read. The other keys are:"""


def _option_table() -> list[str]:
    defaults = default_options("run")
    lines = ["| option | meaning |", "|---|---|"]
    for group, names in options().items():
        for name in names:
            word = f"+{group}={name}" if group == RECIPES else f"{group}={name}"
            usual = " (default)" if defaults.get(group) == name else ""
            lines.append(f"| `{word}`{usual} | {_cell(option_comment(group, name))} |")
    return lines


def _group_lines(width: int) -> list[str]:
    defaults = default_options("run")
    lines = ["Groups (group=option; +job=recipe):", ""]
    for group, names in options().items():
        listed = ", ".join(f"{name} (default)" if name == defaults.get(group) else name for name in names)
        lines.append(_folded(f"  {group}", listed, 12, width))
    return [*lines, ""]


def _summary(key: DescribedKey) -> str:
    named = all(choice in key.summary for choice in key.choices)
    choices = "" if named else f" ({', '.join(key.choices)})"
    return f"{key.summary.removesuffix('.')}{choices}.{_of(key)}"


def _tables(keys: Sequence[DescribedKey], about: Mapping[str, str]) -> list[str]:
    lines = []
    for group, listed in _by_group(keys).items():
        lines += ["", f"### {group or 'Others'}", ""]
        lines += [about[group], ""] if about.get(group) else []
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key in listed:
            meaning = f"{key.summary} {key.details}".strip() + _of(key)
            lines.append(f"| `{key.name}` | {_cell(key.type)} | `{_cell(key.default_text)}` | {_cell(meaning)} |")
    return lines


def _about(schema: type) -> dict[str, str]:
    """Group -> its description."""
    return groups_of(schema) | {ADVANCED: ABOUT_ADVANCED}


def _by_group(keys: Iterable[DescribedKey]) -> dict[str, list[DescribedKey]]:
    """Group -> its keys; those that few jobs set are a last group of their own."""
    found: dict[str, list[DescribedKey]] = {}
    for key in sorted(keys, key=lambda key: key.advanced):
        group = key.name.split(".")[0] if "." in key.name else ""
        found.setdefault(ADVANCED if key.advanced else group, []).append(key)
    return found


def _of(key: DescribedKey) -> str:
    return f" [{', '.join(key.drafters)}]" if key.drafters else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _folded(label: str, text: str, indent: int, width: int) -> str:
    """A label and, right of it, a text folded to the width; below the label where that is too long."""
    lines = textwrap.wrap(text, width - indent, break_on_hyphens=False)
    first = f"{label:<{indent}}" if len(label) < indent else f"{label}\n{' ' * indent}"
    return first + f"\n{' ' * indent}".join(lines)


def main() -> int:
    """Write the page; returns the exit code."""
    PAGE.write_text(page(), encoding="utf-8")
    terminal.show_line(PAGE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
