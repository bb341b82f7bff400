"""Flags as keyword arguments: what `megasnn.Engine` takes of a configuration, and what is for whole runs only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields, replace
from difflib import get_close_matches
from typing import Any, TypeVar

from megasnn.config.checks import ConfigError
from megasnn.config.pretrain import PretrainConfig
from megasnn.config.serialise import from_dict

Config = TypeVar("Config", bound=PretrainConfig)


def with_keywords(config: Config, given: Mapping[str, Any]) -> Config:
    """The configuration with these values of its flags, which are named with underscores.

    Raises:
        ConfigError: lists the names that are no flags or that only a whole run takes, and values of a wrong type.
    """
    parts = {part.name: getattr(config, part.name) for part in fields(config)}
    place = {entry.name: (name, entry) for name, part in parts.items() for entry in fields(part)}
    values: dict[str, dict[str, Any]] = {}
    wrong = []
    for name, value in given.items():
        if name not in place:
            near = get_close_matches(name, place, 1)
            wrong.append(f"unknown name {name!r}" + "".join(f"; is it {each!r}?" for each in near))
            continue
        part, entry = place[name]
        if part == "model":
            wrong.append(f"{name} is a dimension of the model: {type(config.model).__name__}({name}=...)")
        elif _is_for_runs(parts[part], entry):
            wrong.append(f"{name} is for whole runs, which megasnn.pretrain starts; an Engine has no use for it")
        else:
            values.setdefault(part, {})[name] = value
    if wrong:
        raise ConfigError(wrong)
    checked = from_dict(type(config), values)
    changed = {
        part: replace(parts[part], **{name: getattr(getattr(checked, part), name) for name in names})
        for part, names in values.items()
    }
    return replace(config, **changed)


def _is_for_runs(part: object, entry: Field[Any]) -> bool:
    """Whether only a whole run takes the flag: as its field says it, otherwise its part of the configuration."""
    return bool(entry.metadata.get("for_runs", getattr(part, "for_runs", False)))
