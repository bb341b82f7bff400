"""A configuration as values (dictionaries, flags, JSON) and back.

A checkpoint keeps two parts of it: the identity of the model, and flags that a later run may change.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from megasnn.common.files import in_message
from megasnn.config.checks import ConfigError, as_flag, flag
from megasnn.config.data import CHANGES
from megasnn.config.optimizer import DECAY_STYLES
from megasnn.config.run import PretrainConfig
from megasnn.config.training import LENGTHS

_Config = TypeVar("_Config")
ABOUT = "about"
"""Beside the parts in a file: of which model the values are. A file need not say it."""
CLASS_NAMES = "class_names"
"""Entry beside a checkpoint's tensors: names of the classes by number; empty where they are not known."""
SAMPLES_KEY = "samples"
"""Under which a checkpoint keeps how samples were made."""
Identity = dict[str, dict[str, object]]
"""Dimensions and neuron of a model, as `config_identity` gives them."""
_RUN_PARTS = ("data", "checkpoint", "logging")
_RUN_FIELDS = (
    *("train_epochs", "lr_warmup_epochs", "lr_cooldown_epochs", "lr_interval"),  # an Engine knows no epochs
    *("evaluate_only", "exit_interval", "exit_duration_in_mins", "max_skipped_steps", "check_replicas_interval"),
)
"""Fields of the other parts that only a whole run reads."""
_UPDATE = {
    "training": (
        *("micro_batch_size", "global_batch_size", "bptt_steps", "seed", "precision", "loss", "label_smoothing"),
    ),
    "data": ("augment", *CHANGES, "shuffle", "last_batch"),
}


def from_dict(config_class: type[_Config], values: Mapping[str, Any], texts: bool = False) -> _Config:
    """Builds a configuration from values by part and name; missing ones take their defaults.

    Args:
        texts: values may be texts of a command line, which become numbers.
    Raises:
        ConfigError: unknown names, values of a wrong type or out of bounds, all of them.
    """
    types = get_type_hints(config_class)
    wrong = [f"unknown name {in_message(name)}" for name in values if name not in types]
    parts = {}
    for name in types.keys() & values.keys():
        try:
            parts[name] = build_part(types[name], values[name], name, texts)
        except ConfigError as error:
            wrong += error.problems
    if wrong:
        raise ConfigError(sorted(wrong))
    return config_class(**parts)


def build_part(part: type[_Config], values: Any, name: str, texts: bool = False) -> _Config:
    """Builds one part of a configuration. Raises ConfigError as `from_dict`."""
    if not isinstance(values, dict):
        raise ConfigError([f"{name} must be a dictionary, got {reprlib.repr(values)}"])
    known = {entry.name for entry in fields(part)}  # type: ignore[arg-type]  # a dataclass
    wrong = {each: f"unknown name {name}.{in_message(each)}" for each in values if each not in known}
    values = {each: value for each, value in values.items() if each in known}
    try:
        adapter = _adapter(part)  # type: ignore[arg-type]  # hashable
        if not texts:  # JSON has lists where a field has a tuple; its reader refuses file names that are not UTF-8
            adapter.validate_json(json.dumps(values, ensure_ascii=False).encode(errors="replace"), strict=True)
        built: _Config = adapter.validate_python(values, strict=False)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            field, text = str(each["loc"][0]) if each["loc"] else "", each["msg"].partition(", unable")[0]
            given = in_message(each["input"]) if each["input"] != "" else '""'
            sentence = f"{flag(field)} {given}: {text}".replace(": Input should", " should")
            own = text.removeprefix("Value error, ")
            wrong.setdefault(field, own if each["type"] == "value_error" else sentence)
    if wrong:
        raise ConfigError(wrong.values())
    return built


@cache
def _adapter(part: Any) -> TypeAdapter[Any]:
    return TypeAdapter(part)


def with_keywords(config: _Config, keywords: Mapping[str, Any]) -> _Config:
    """Replaces values of a configuration by keyword arguments of an Engine, which are flags with underscores.

    Raises:
        ConfigError: names that are no flags or that only a whole run takes, values of a wrong type or out of bounds.
    """
    part_of = {entry: part for part, entry, _ in _entries(config)}
    changed: dict[str, dict[str, Any]] = {}
    wrong = []
    for name, value in keywords.items():
        part = part_of.get(name)
        if part is None:
            near = get_close_matches(name, part_of, 1)
            wrong.append(f"unknown name {name!r}" + "".join(f"; is it {each!r}?" for each in near))
        elif part == "model":
            kind = type(getattr(config, part)).__name__
            wrong.append(f"{name} is the model's: give it to the model, {kind}({name}={value!r})")
        elif name in _RUN_FIELDS or (part in _RUN_PARTS and name not in ("mixup_alpha", "cutmix_alpha")):
            wrong.append(f"{name} is for whole runs, which megasnn.pretrain starts: leave it out")
        else:
            changed.setdefault(part, {})[name] = value
    if wrong:
        raise ConfigError(wrong)
    checked = from_dict(type(config), changed)
    replaced = {
        part: replace(getattr(config, part), **{name: getattr(getattr(checked, part), name) for name in names})
        for part, names in changed.items()
    }
    return replace(config, **replaced)  # type: ignore[type-var]  # a dataclass


def to_dict(config: Any) -> dict[str, Any]:
    """Nested dictionaries of numbers, strings, booleans and None."""
    return asdict(config)


def with_model_name(config: Any) -> dict[str, Any]:
    """Content of config.json: `to_dict` of a whole run, and the name of its model."""
    return {ABOUT: {"model": config.model.name}, **to_dict(config)}


def to_json(config: Any) -> str:
    """Text of config.json."""
    return json.dumps(with_model_name(config), indent=2)


def changed_flags(config: Any) -> dict[str, list[str]]:
    """Flags by part that differ from their defaults."""
    return flags_between(type(config)(), config)


def flags_between(before: Any, after: Any) -> dict[str, list[str]]:
    """Flags by part that make one configuration of another of the same class, as a command line gives them."""
    changed: dict[str, list[str]] = {}
    for (part, name, old), (_, _, value) in zip(_entries(before), _entries(after), strict=True):
        if value != old:
            changed.setdefault(part, []).append(as_flag(name, value))
    return changed


def _entries(config: Any) -> Iterator[tuple[str, str, Any]]:
    """Part, name and value of every flag."""
    for part in fields(config):
        for entry in fields(getattr(config, part.name)):
            yield part.name, entry.name, getattr(getattr(config, part.name), entry.name)


def config_identity(config: PretrainConfig) -> Identity:
    """Dimensions, and neuron, whatever its backend."""
    model, neuron = to_dict(config.model), to_dict(config.neuron)
    del neuron["neuron_backend"]
    return {"model": model, "neuron": neuron}


def recipe(config: PretrainConfig) -> dict[str, object]:
    """Flags that change the update, and that a run may change on its way."""
    return {flag(name): getattr(getattr(config, part), name) for part, name in _recipe_fields(config)}


def _recipe_fields(config: PretrainConfig) -> Iterator[tuple[str, str]]:
    """Part and name of each field that changes the update."""
    names = {"optimizer": tuple(each.name for each in fields(config.optimizer)), **_UPDATE}
    if DECAY_STYLES[config.optimizer.lr_decay_style](1.0) < 1.0:  # the rate follows from the length
        names["training"] += LENGTHS
    left_out = ("loss", "label_smoothing") if "loss" in config.model.own_task() else ()
    for part, of_part in names.items():
        for name in of_part:
            if name not in left_out:
                yield part, name


def changed_recipe(saved: Mapping[str, object], config: PretrainConfig) -> list[str]:
    """One line for a user about flags that differ from those of the run that saved, which is allowed.

    Args:
        saved: entries beside the tensors of the checkpoint.
    """
    before = saved.get("recipe")
    if not isinstance(before, Mapping):  # weights from elsewhere
        return []
    changed = {}
    for part, name in _recipe_fields(config):
        values = getattr(config, part)
        # A checkpoint older than a flag was trained with the flag's default.
        earlier = before.get(flag(name), getattr(type(values), name))
        now = getattr(values, name)
        if earlier != now:
            changed[flag(name)] = earlier, now
    return _line("changed since the checkpoint was saved: ", changed)


def _line(title: str, changed: Mapping[str, tuple[object, object]]) -> list[str]:
    texts = [f"{name} from {in_message(before)} to {now}" for name, (before, now) in changed.items()]
    return [title + ", ".join(texts)] if texts else []


def samples(config: PretrainConfig) -> dict[str, object]:
    """Values by which samples are made where nothing is drawn; a checkpoint keeps them as `SAMPLES_KEY`."""
    data, shape = config.data, config.model.input_shape
    if len(shape) != 3:
        return {"split_by": data.split_by or "number"}
    constants = data.normalisation(shape[0], config.training.evaluate_only)
    return {"normalize_images": constants, "center_crop": data.center_crop}


def samples_from(saved: Mapping[str, object], evaluates: bool) -> dict[str, object]:
    """Those of a checkpoint's values of `samples` that count in an evaluation, or with --finetune, the constants alone.

    Args:
        saved: kept by the run beside its tensors.
    """
    found, counts = saved.get(SAMPLES_KEY), ("normalize_images", *("center_crop", "split_by") * evaluates)
    return {name: found[name] for name in counts if name in found} if isinstance(found, Mapping) else {}


def changed_samples(saved: Mapping[str, object], config: PretrainConfig) -> list[str]:
    """One line for a user where an evaluation or --finetune makes samples otherwise than the training that saved."""
    before, now = samples_from(saved, config.training.evaluate_only), samples(config)
    changed = {flag(name): (value, now[name]) for name, value in before.items() if name in now and value != now[name]}
    return _line("samples are made otherwise than those that the checkpoint was trained on: ", changed)
