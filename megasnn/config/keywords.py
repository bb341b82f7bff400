"""Flags as keyword arguments: what `megasnn.Engine` takes of a configuration, and what is for whole runs only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, TypeVar

from megasnn.config.checks import ConfigError
from megasnn.config.pretrain import PretrainConfig
from megasnn.config.serialise import from_dict

Config = TypeVar("Config", bound=PretrainConfig)

# What only a loop over data does, and what is reckoned in epochs.
_OF_RUNS = {
    "training": {"train_epochs", "evaluate_only", "exit_interval", "exit_duration_in_mins"},
    "parallel": {"check_replicas_interval", "replica_mismatch"},
    "optimizer": {"lr_warmup_epochs", "lr_cooldown_epochs", "lr_interval"},
}
_MIXING = {"mixup_alpha", "cutmix_alpha"}


def with_keywords(config: Config, given: Mapping[str, Any]) -> Config:
    """The configuration with these values of its flags, which are named with underscores.

    Raises:
        ConfigError: lists the names that are no flags or that only a whole run takes, and values of a wrong type.
    """
    part_of = {entry.name: part.name for part in fields(config) for entry in fields(getattr(config, part.name))}
    values: dict[str, dict[str, Any]] = {}
    wrong = []
    for name, value in given.items():
        part = part_of.get(name)
        if part is None:
            near = get_close_matches(name, part_of, 1)
            wrong.append(f"unknown name {name!r}" + "".join(f"; is it {each!r}?" for each in near))
        elif part == "model":
            wrong.append(f"{name} is a dimension of the model: {type(config.model).__name__}({name}=...)")
        elif _is_for_runs(part, name):
            wrong.append(f"{name} is for whole runs, which megasnn.pretrain starts; an Engine has no use for it")
        else:
            values.setdefault(part, {})[name] = value
    if wrong:
        raise ConfigError(wrong)
    checked = from_dict(type(config), values)
    parts = {
        part: replace(getattr(config, part), **{name: getattr(getattr(checked, part), name) for name in names})
        for part, names in values.items()
    }
    return replace(config, **parts)


def _is_for_runs(part: str, name: str) -> bool:
    if part == "data":
        return name not in _MIXING
    return part in ("checkpoint", "logging") or name in _OF_RUNS.get(part, ())
