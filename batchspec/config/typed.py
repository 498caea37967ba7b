"""Converts Hydra's configuration to the dataclasses of `schema.py`: unknown keys and wrong types are refused here."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, field, fields, is_dataclass, make_dataclass
from functools import cache
from typing import Any, TypeVar, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from batchspec.config.key import declared_keys
from batchspec.config.overrides import list_keys
from batchspec.config.schema import RunConfig
from batchspec.config.values import SHIPPED, expand_home, literal, shipped, written
from batchspec.config.vllm_names import remark
from batchspec.errors import ConfigError
from batchspec.tasks.registry import task_of

Schema = TypeVar("Schema")
_STRUCTURED: dict[type, DictConfig] = {}
"""Schemas as Hydra's configurations, with their defaults; `OmegaConf.merge` copies them."""
_REGISTERED: dict[str, type] = {}
"""Name -> schema, as registered with Hydra."""


def keys(config: Any = None) -> list[str]:
    """Every key of the configuration, dotted, groups left out. config: an instance, by default a RunConfig."""
    return [*declared_keys(RunConfig if config is None else type(config))]


def suggest(name: str, known: Iterable[str]) -> str:
    """'did you mean ...?' for a mistyped dotted name, or an empty string. A correct last part in a wrong group also matches."""
    known = list(known)
    leaves = {item.rsplit(".", 1)[-1]: item for item in reversed(known)}
    close = difflib.get_close_matches(name, known, 1, 0.75)
    close = close or [leaves[leaf] for leaf in difflib.get_close_matches(name.rsplit(".", 1)[-1], leaves, 1, 0.7)]
    return f"did you mean {close[0]}?" if close else ""


def unknown_key(key: str, config: Any = None) -> ConfigError:
    """The error for a key that the configuration does not have. `config`: an instance that has them all, by default RunConfig."""
    node = RunConfig() if config is None else config
    known = [*keys(node), *(item.name for item in fields(node))]
    if key in known:
        first, *levels = key.split(".")
        nested = "".join(f"{{{level}: " for level in levels) + "VALUE" + "}" * len(levels)
        return ConfigError(f"{key}: a file of YAML has it as {first}: {nested}")
    first, dot, _ = key.partition(".")
    if dot and first not in known:  # {"guided_json": {"type": "object"}}: the names in the map are no keys
        key = first
    return ConfigError(f"{key} is not a key of the configuration; {meant(key, known) or '`--help` lists them'}")


def meant(name: str, known: Iterable[str]) -> str:
    """Which of the `known` keys and groups is meant by a name that is none of them; empty for a name that is like none."""
    known = list(known)
    return remark(name.rsplit(".", 1)[-1], known) or suggest(name, known)


def from_hydra(cfg: DictConfig) -> RunConfig:
    """The composed configuration as plain dataclasses; `pkg://demo` becomes the path of the packaged prompts.

    Raises ConfigError in one line for unknown keys, wrong types and values that are missing or cannot be resolved.
    """
    config = typed(cfg, RunConfig)
    config.input.path = shipped_prompts(config.input.path)
    task_of(config).set_defaults(config)
    return config


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """The configuration with these values instead of its defaults, group by group. Raises ConfigError as `from_hydra`.

    The values come from a manifest or another process: `${...}` in them is text.
    """
    return from_hydra(OmegaConf.create(literal(values)))


def typed(cfg: DictConfig, schema: type[Schema]) -> Schema:
    """A composed configuration as dataclasses of type `schema`, `~` in paths replaced. Raises ConfigError as `from_hydra`."""
    known = schema()
    _refuse_unknown(cfg, known, "", known)
    try:
        if schema not in _STRUCTURED:
            _STRUCTURED[schema] = OmegaConf.structured(schema)
        config = OmegaConf.to_object(OmegaConf.merge(_STRUCTURED[schema], _with_lists(cfg, known)))
    except OmegaConfBaseException as error:
        raise ConfigError(type_error(error)) from error
    assert isinstance(config, schema)
    expand_home(config)
    return config


def _with_lists(cfg: DictConfig, known: Any) -> DictConfig:
    """The same configuration, in which one value for a list becomes a list of it, as on the command line. Raises ConfigError for
    maps, and for true, 1e3 and the like where text is expected.
    """
    values: Any = OmegaConf.to_container(cfg)  # interpolations are text here
    of_text = list_keys(known, kind="list[str]")
    for key in list_keys(known):
        *groups, name = key.split(".")
        group = values
        for each in groups:
            group = group.get(each) if isinstance(group, dict) else None
        if isinstance(group, dict) and name in group:
            group[name] = _listed(key, group[name], is_text=key in of_text)
    made: DictConfig = OmegaConf.create(values)
    return made


def _listed(key: str, value: Any, *, is_text: bool) -> Any:
    """The value of a key that takes a list. Text that stands for another value, such as `${...}`, and null are unchanged."""
    if value is None or str(value).startswith(("${", "???")):
        return value
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, dict | list | None) for item in items):
        raise ConfigError(f"{key}={value} must be a list of plain values; write {written(key)}")
    for item in items if is_text else ():
        if isinstance(item, bool | float):
            raise ConfigError(f"{key}: {item} must be text, and its original spelling is lost; quote it, \"{key}=['TEXT']\"")
    return items


def to_json(config: RunConfig) -> str:
    """A checked configuration in one line, for another process."""
    return json.dumps(asdict(config))


def from_json(text: str) -> RunConfig:
    """The inverse of `to_json`."""
    return from_dict(json.loads(text))


def type_error(error: OmegaConfBaseException) -> str:
    """omegaconf's error about a wrong value in one line, the key first."""
    said = (error.msg or str(error)).splitlines()[0]
    if wrong := re.fullmatch(r"Value '(.*)' of type '\w+' could not be converted to (Integer|Float)", said):
        return f"{error.full_key}={wrong[1]} must be {_number(error, is_whole=wrong[2] == 'Integer')}"
    if wrong := re.match(r"Value '(.*)' is not a valid bool", said):
        return f"{error.full_key}={wrong[1]} must be true or false; write {error.full_key}=true"
    if wrong := re.match(r"Cannot convert '\w+' to string: '(.*)'$", said):
        return f"{error.full_key}={wrong[1]} must be text; write {error.full_key}=TEXT"
    if unknown := re.match(r"Interpolation key '(.+)' not found", said):
        said = f"${{{unknown[1]}}} names no key; a variable of the environment is ${{oc.env:{unknown[1]}}}"
    if "is not Optional" in said:
        return f"{error.full_key}=null: it must have a value; give one, or leave the key out"
    if said.startswith(("Cannot assign", "Cannot merge DictConfig")):
        given = "" if error.value is None else f"={error.value}"
        return f"{error.full_key}{given} must be a map; write {written(str(error.full_key))}"
    if "is not a ListConfig" in said:
        said = f"it must be a list; write {written(str(error.full_key))}"
    elif "does not support deletion" in said:
        said = f"it cannot be removed; write {error.full_key}=..."
    elif "is not a subclass of" in said:
        said = f"it is a group of keys; write {error.full_key}.KEY=..."
    return f"{error.full_key}: {said}" if error.full_key else said


def _number(error: OmegaConfBaseException, *, is_whole: bool) -> str:
    """What the value must be, and how to write it."""
    key, value = str(error.full_key), error.value
    kind = "a whole number, without point, exponent or unit" if is_whole else "a number, without a unit"
    if "[" in key:
        return f"{kind}; write {written(key.partition('[')[0])}"
    meant = int(value) if isinstance(value, float) and value.is_integer() else "NUMBER"
    return f"{kind}; write {key}={meant}"


def _refuse_unknown(cfg: DictConfig, schema: Any, prefix: str, root: Any) -> None:
    known = {item.name: getattr(schema, item.name) for item in fields(schema)}
    for name in map(str, cfg):
        if name not in known:
            raise unknown_key(f"{prefix}{name}", root)
        if isinstance(known[name], dict) and OmegaConf.is_list(cfg._get_node(name)):
            raise ConfigError(f"{prefix}{name} must be a map, not a list; write {written(prefix + name)}")
        if is_dataclass(known[name]) and isinstance(cfg[name], DictConfig):
            _refuse_unknown(cfg[name], known[name], f"{prefix}{name}.", root)


def shipped_prompts(path: Any) -> Any:
    """The path of packaged prompts for `pkg://NAME`, any other path as it is. Raises ConfigError for an unknown name."""
    if not (isinstance(path, str) and path.startswith(SHIPPED)):
        return path
    name, found = path.removeprefix(SHIPPED), shipped("prompts", ".parquet")
    if name not in found:
        raise ConfigError(f"input.path={path} is not shipped with batchspec; shipped: {', '.join(found)}")
    return str(found[name])


def register(name: str = "run_schema", schema: type = RunConfig) -> None:
    """Register a schema with Hydra under the name that the defaults list of a file of conf begins with."""
    if _REGISTERED.get(name) is not schema:
        ConfigStore.instance().store(name=name, node=_lists_as_any(schema))
        _REGISTERED[name] = schema


@cache
def _lists_as_any(schema: Any) -> Any:
    """The dataclass with its list fields typed Any: otherwise Hydra would refuse a single value, which `typed` turns into a
    list."""
    hints, made = get_type_hints(schema), []
    for item in fields(schema):
        hint: Any = hints[item.name]
        if is_dataclass(hint):
            group: Any = hint
            hint = _lists_as_any(group)
            made.append((item.name, hint, field(default_factory=hint)))
            continue
        hint = Any if str(hint).startswith("list[") else hint
        has_factory = item.default_factory is not MISSING
        made.append(
            (item.name, hint, field(default_factory=item.default_factory) if has_factory else field(default=item.default))
        )
    return make_dataclass(schema.__name__, made)
