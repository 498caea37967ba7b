"""The only module that calls Hydra: overrides in, a checked RunConfig out; each error of Hydra's becomes one line."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError  # type: ignore[import-untyped]

from batchspec.config.checks import check
from batchspec.config.key import Key
from batchspec.config.overrides import FLOATS, INPUT, LISTS, MAPS, TEXTS, for_hydra
from batchspec.config.schema import KEYS, RunConfig
from batchspec.config.typed import from_hydra, keys, meant, register, suggest, type_error, typed, unknown_key
from batchspec.config.values import written
from batchspec.console import terminal
from batchspec.console.arguments import ArgumentParser
from batchspec.errors import BatchspecError, ConfigError, Interrupted
from batchspec.process.local_files import fault_of, told
from batchspec.process.refusals import is_panic, refusal

Schema = TypeVar("Schema")
Report = Callable[[BatchspecError], int]
CONF = "batchspec.conf"
GROUPS = ("model", "draft", "decode", "packing", "input", "output", "cluster", "resume", "ablation")
PATH_KEYS = {"model": "model.path", "draft": "draft.path", "input": "input.path", "output": "output.dir"}
"""Group -> its key for a path: the key that was meant if the group itself is given a path."""
CONFIG_DIR = "--config-dir"
NO_PACKAGE = "the keys of a recipe are those of a whole job; begin the file with the line `# @package _global_`"
SWEEP_DIR = "hydra.sweep.dir="
SUBMITIT = (f"{SWEEP_DIR}.submitit", "hydra.launcher.submitit_folder=.submitit/%j")
"""Submitit passes its jobs through a folder, and temporary folders of this machine are not visible on the nodes of a cluster."""


def compose(overrides: Sequence[str], *, require: Iterable[str] = (), checked: bool = True) -> RunConfig:
    """The checked configuration that the command line `overrides` would give; leaves Hydra's global state unchanged.

    overrides   Hydra override strings, e.g. ("+job=demo", "decode.n=2")
    require     keys that must be set, see `checks.check`
    checked     False: values are not compared with each other, because others will be added
    Raises ConfigError in one line for any mistake, StorageError if the disk fails.
    """
    register()
    config = from_hydra(_composed("run", overrides, RunConfig()))
    if checked:
        check(config, require=require)
    return config


def composed(name: str, overrides: Sequence[str], *, schema: type[Schema]) -> Schema:
    """The `schema` that conf/NAME.yaml gives with these overrides; its defaults list begins with NAME_schema.

    Raises ConfigError in one line for unknown keys and wrong types. The caller checks the values.
    """
    flags = [word for word in overrides if word.startswith("-")]
    if flags:
        raise ConfigError(
            f"{flags[0]} is not an option of {name}; keys are written without dashes, `batchspec {name} --help` lists them"
        )
    register(f"{name}_schema", schema)
    return typed(_composed(name, overrides, schema()), schema)


def _composed(name: str, overrides: Sequence[str], known: Any) -> DictConfig:
    """conf/NAME.yaml with these overrides; leaves Hydra's global state unchanged. `known`: an instance of the schema."""
    _check_working_folder()
    state = GlobalHydra.instance().hydra
    try:
        GlobalHydra.instance().clear()
        with hydra.initialize_config_module(CONF, version_base="1.3"):
            return hydra.compose(name, for_hydra(overrides))
    except (HydraException, OmegaConfBaseException, YAMLError, OSError) as error:
        raise fault_of(error, "the configuration", ConfigError(one_line(error, known))) from error
    finally:
        GlobalHydra.instance().hydra = state


def launch(
    task: Callable[[RunConfig], int | None], overrides: Sequence[str], *, require: Iterable[str], report: Report | None = None
) -> int:
    """Compose the configuration through Hydra's own command line (`--cfg`, `-m`, `--config-dir`), check it and call `task`.

    require  keys that must be set, see `checks.check`
    report   tells of an error and returns its exit code; None: one line on stderr
    Returns the exit code: that of `task`, or 0 if it returns None.

    An error of batchspec or Hydra is one line on stderr; any other exception is a crash and keeps its traceback. In a sweep
    (`-m`) a failed job does not end the others, and the exit code is 0; a signal ends the sweep.
    """
    codes, report = [0], report or report_line

    def body(cfg: DictConfig) -> None:
        code = reported(lambda: task(_checked(cfg, require)), report)
        if HydraConfig.get().mode == RunMode.RUN:
            codes.append(code)
        elif code == Interrupted.exit_code:
            sys.exit(code)

    try:
        _check_working_folder()
        options, words = _check_options(overrides), for_hydra(overrides)
    except ConfigError as error:
        return report(error)
    before, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    if full != "1" and not any(word.startswith("-") or "hydra" in word for word in overrides):
        return reported(lambda: task(compose(overrides, require=require)), report)  # `hydra.main` takes 0.1 s more
    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra then raises instead of printing its own report
    try:
        with _sweep_folder(overrides, sweep=options.multirun) as more:
            sys.argv = ["batchspec", *words, *more]
            hydra.main(version_base="1.3", config_path=f"pkg://{CONF}", config_name="run")(body)()
    except (HydraException, OmegaConfBaseException, YAMLError, OSError) as error:
        if full == "1":
            raise
        return report(fault_of(error, "the configuration", ConfigError(one_line(error))))
    finally:
        sys.argv = before
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
    return codes[-1]


def _check_working_folder() -> None:
    """Raises ConfigError if it was deleted: Hydra and relative paths need it."""
    try:
        os.getcwd()
    except OSError as error:
        refusal = ConfigError(f"the working folder cannot be found ({told(error)}); change to another one")
        raise fault_of(error, "the working folder", refusal) from error


def _check_options(words: Sequence[str]) -> Namespace:
    """The options of Hydra's command line. Raises ConfigError for an unknown option or a value that it does not accept."""
    parser = ArgumentParser(prog="batchspec run", parents=[get_args_parser()], add_help=False)
    options, unknown = parser.parse_known_args(list(words))
    flags = [word for word in unknown if word.startswith("-")]
    if flags:
        name = flags[0].strip("-").partition("=")[0].replace("-", "_")
        advice = meant(name, keys()) or "`--help` lists options and keys"
        raise ConfigError(f"{flags[0]} is not an option; keys are written without dashes; {advice}")
    return options


def _checked(cfg: DictConfig, require: Iterable[str]) -> RunConfig:
    config = from_hydra(cfg)
    check(config, require=require)
    return config


def reported(task: Callable[[], int | None], report: Report | None = None) -> int:
    """The exit code of a task: its own, or that of the error that it raised, which is printed on stderr, or told by `report`."""
    try:
        return task() or 0
    except BatchspecError as error:
        return (report or report_line)(error)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if (refused := refusal(error)) is not None:
            return (report or report_line)(refused)
        terminal.print_traceback(traceback.format_exc())
        return 1


def report_line(error: BatchspecError) -> int:
    """Print the error as one line on stderr; returns its exit code."""
    terminal.fail(error)
    return error.exit_code


@contextmanager
def _sweep_folder(overrides: Sequence[str], *, sweep: bool) -> Iterator[list[str]]:
    """Overrides that tell Hydra where to store the files of a sweep, unless the user does: a new folder with an unguessable
    name, writable only by the user. It is deleted when the sweep ends."""
    if any(item.startswith(SWEEP_DIR) for item in overrides):
        yield []
    elif "hydra/launcher=submitit_slurm" in overrides:
        keys = {item.partition("=")[0] for item in overrides}
        yield [item for item in SUBMITIT if item.partition("=")[0] not in keys]
    elif sweep or any(item.startswith("hydra.mode=") for item in overrides):
        with TemporaryDirectory(prefix="batchspec-sweep-", ignore_cleanup_errors=True) as folder:
            yield [SWEEP_DIR + QuotedString(folder, Quote.single).with_quotes()]
    else:
        yield []


def one_line(error: Exception, known: Any = None) -> str:
    """What is wrong and what to do, from an exception of Hydra, omegaconf or the YAML parser.

    known  an instance of the configuration that has all its keys, None: a RunConfig
    """
    text = str(error)
    if isinstance(error, MissingConfigException) and error.options is not None and error.missing_cfg_file:
        return _missing_option(error.missing_cfg_file, list(error.options))
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # Hydra looks for a file of a group's name
        return f"an override names an option that cannot be a file's name ({error.strerror}): {error.filename}; write key=value"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; correct the path or its permissions"
    if isinstance(error, OverrideParseException):
        key = error.override.partition("=")[0].lstrip("+~")
        form = written(key) if key in (*LISTS, *MAPS) else "key=value"
        return f"cannot read the override '{error.override}'; write {form}, and quote what holds spaces or brackets"
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name} line {mark.line + 1} is not YAML: {error.problem}"
    if nowhere := re.search(r"Additional config directory '(.+)' not found", text):
        return f"{CONFIG_DIR}: {nowhere[1]} is not a folder; correct the path"
    if problem := _grammar(text):
        return problem
    if inside := re.search(r"In '((\w+)/[^']+)': Could not override '[^']+@\2\.", text):
        return f"{inside[1]}: {NO_PACKAGE}"
    override = re.search(r"Could not override '([^']+)'", text)
    if override and "No match in the defaults list" in text:
        group = override[1]
        hint = suggest(group, GROUPS)
        return f"{group} is not a group that has a default choice; {hint if hint else f'write +{group}=...'}"
    if deleted := re.search(r"Could not delete from config\. '([^']+)' does not exist", text):
        return str(unknown_key(deleted[1], known))
    said = f"{text}\n{error.__cause__}"  # hydra gives a key's full name in its own text or in its cause's
    full_key = override or re.search(r"full_key: (\S+)", said)
    recipe = re.search(r"^In '([^']+)': \w+ raised while composing config:\n(.*)", text)
    where = f"{recipe[1]}: " if recipe else ""
    if recipe and full_key and full_key[1] == recipe[1].partition("/")[0]:
        return f"{where}{NO_PACKAGE}"
    if full_key and full_key[1] in ("job", "global"):  # a recipe that chooses options of groups, or writes the line wrongly
        return NO_PACKAGE
    if full_key and re.search(r"Key '[^']+' (is )?not in", said):
        return f"{where}{unknown_key(full_key[1], known)}"
    if isinstance(error, OmegaConfBaseException):
        return type_error(error)
    if isinstance(error.__cause__, OmegaConfBaseException) and not recipe:
        return type_error(error.__cause__)
    if recipe and full_key:
        return f"{where}{full_key[1]}: {recipe[2]}"
    return "; ".join(line.strip() for line in text.splitlines()[:2] if line.strip())


def _grammar(text: str) -> str | None:
    """An error of Hydra's about the form of an override, as one line; None for any other text."""
    if found := re.search(r"Ambiguous value for argument '([^=']+)=([^']*)'", text):
        key, value = found.groups()
        advice = f"; a list is '{key}=[{value}]'" if KEYS.get(key, Key()).example else ""
        if key in FLOATS and re.fullmatch(r"\d*,\d+", value):
            advice = f"; a number has a point, {key}={value.replace(',', '.')}"
        if key in (*TEXTS, INPUT):
            advice += f"""; one value with a comma is "{key}='{value}'\""""
        return f"{key}={value} gives several values; `-m` runs one job for each{advice}"
    if found := re.search(r"An item is already at '([^']+)'", text):
        return f"{found[1]} is a key of the configuration; write {found[1]}=... without the +"
    if found := re.search(r"(\S+)(?: appears more than once in the final defaults list|\. To override a value use)", text):
        return f"{found[1]} is given twice; write {found[1]}=... without the +"
    return None


def _missing_option(missing: str, options: list[str]) -> str:
    """`missing`: the path of an option that no folder of conf has, such as model/Qwen/Qwen3-8B."""
    group, _, name = missing.rpartition("/") if missing.startswith("hydra/") else missing.partition("/")
    hint = suggest(name, options)
    if group in PATH_KEYS and re.search(r"[/.]", name):
        hint = f"a path is {PATH_KEYS[group]}={name};"
    choices = f"{hint + ' ' if hint else ''}choices: {', '.join(sorted(options))}"
    if group == "job":
        choices += f"; a recipe of your own is FOLDER/job/{name}.yaml with {CONFIG_DIR} FOLDER"
    return f"{group}={name} is not a choice of the group {group}; {choices}"
