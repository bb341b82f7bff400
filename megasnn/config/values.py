"""A configuration as values (dictionaries, flags, JSON) and back.

A checkpoint keeps two parts: the model's identity, and the recipe, which a run that continues may change.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from megasnn.common.files import in_message
from megasnn.config.checks import ConfigError, as_flag, flag
from megasnn.config.data import CHANGES
from megasnn.config.optimizer import DECAY_STYLES
from megasnn.config.run import PretrainConfig
from megasnn.config.training import LENGTHS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Configuration = TypeVar("Configuration", bound="DataclassInstance")
"""A dataclass of parts, or one part."""
Identity = dict[str, dict[str, object]]
"""Dimensions and neuron of a model (`config_identity`)."""
ABOUT = "about"
"""Optional key beside the parts in a file: the model of the values."""
CLASS_NAMES = "class_names"
"""Key beside a checkpoint's tensors: class names by number; empty if unknown."""
TOKENIZER = "tokenizer"
"""Key beside a checkpoint's tensors: identity of the tokenizer of a language model's text; None if unknown."""
SAMPLES_KEY = "samples"
"""Key beside a checkpoint's tensors: values of `samples`."""
_adapter = cache(TypeAdapter)
"""Making one takes milliseconds: it reads the annotations of all fields."""
_RUN_PARTS = ("data", "checkpoint", "logging")
"""Parts that only a whole run reads, except `_ENGINE_FIELDS`."""
_ENGINE_FIELDS = ("mixup_alpha", "cutmix_alpha")
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
"""Fields outside the optimizer that change the update."""


def from_dict(config_class: type[Configuration], values: Mapping[str, Any], texts: bool = False) -> Configuration:
    """Builds a configuration from values by part and name; missing ones take their defaults.

    Args:
        texts: values may be text from a command line, also for numbers.
    Raises:
        ConfigError: lists all unknown names, values of a wrong type and values out of bounds.
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


def build_part(part: type[Configuration], values: Any, name: str, texts: bool = False) -> Configuration:
    """Builds one part. Raises ConfigError as `from_dict`."""
    if not isinstance(values, dict):
        raise ConfigError([f"{name} must be a dictionary, got {reprlib.repr(values)}"])
    names = {entry.name for entry in fields(part)}
    wrong = {}
    known = {}
    for each, value in values.items():
        if each in names:
            known[each] = value
        else:
            wrong[each] = f"unknown name {name}.{in_message(each)}"
    adapter: TypeAdapter[Configuration] = _adapter(part)
    try:
        if not texts:
            # JSON has lists where a field has a tuple; its reader refuses file names that are not UTF-8.
            adapter.validate_json(json.dumps(known, ensure_ascii=False).encode(errors="replace"), strict=True)
        built = adapter.validate_python(known, strict=False)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            field = str(each["loc"][0]) if each["loc"] else ""
            wrong.setdefault(field, _sentence(field, each))
    if wrong:
        raise ConfigError(wrong.values())
    return built


def _sentence(field: str, error: ErrorDetails) -> str:
    """pydantic's error with flag and value; our own checks' messages as they are."""
    text = error["msg"].partition(", unable")[0]
    if error["type"] == "value_error":
        return text.removeprefix("Value error, ")
    given = '""' if error["input"] == "" else in_message(error["input"])
    return f"{flag(field)} {given}: {text}".replace(": Input should", " should")


def with_keywords(config: Configuration, keywords: Mapping[str, Any]) -> Configuration:
    """Replaces values by an Engine's keyword arguments, which are flags with underscores.

    Raises:
        ConfigError: unknown names, model fields, fields for whole runs only, wrong values.
    """
    part_of = {entry: part for part, entry, _ in _entries(config)}
    wrong = [*_keyword_problems(config, part_of, keywords)]
    if wrong:
        raise ConfigError(wrong)
    changed: dict[str, dict[str, Any]] = {}
    for name, value in keywords.items():
        changed.setdefault(part_of[name], {})[name] = value
    # A fresh configuration checks types and bounds of the keywords. The other fields may have any valid values.
    checked = from_dict(type(config), changed)
    replaced = {}
    for part, names in changed.items():
        values = {name: getattr(getattr(checked, part), name) for name in names}
        replaced[part] = replace(getattr(config, part), **values)
    return replace(config, **replaced)


def _keyword_problems(config: Any, part_of: Mapping[str, str], keywords: Mapping[str, Any]) -> Iterator[str]:
    for name, value in keywords.items():
        part = part_of.get(name)
        if part is None:
            near = get_close_matches(name, part_of, 1)
            yield f"unknown name {name!r}" + "".join(f"; is it {each!r}?" for each in near)
        elif part == "model":
            yield f"{name} is the model's: give it to the model, {type(config.model).__name__}({name}={value!r})"
        elif name in _RUN_FIELDS or (part in _RUN_PARTS and name not in _ENGINE_FIELDS):
            yield f"{name} is for whole runs, which megasnn.pretrain starts: leave it out"


def with_model_name(config: Any) -> dict[str, Any]:
    """For config.json: `asdict` and the model's name."""
    return {ABOUT: {"model": config.model.name}, **asdict(config)}


def to_json(config: Any) -> str:
    """config.json's text."""
    return json.dumps(with_model_name(config), indent=2)


def changed_flags(config: Any) -> dict[str, list[str]]:
    """Flags by part with values other than the defaults."""
    return flags_between(type(config)(), config)


def flags_between(before: Any, after: Any) -> dict[str, list[str]]:
    """Flags by part that turn one configuration into another."""
    changed: dict[str, list[str]] = {}
    for (part, name, old), (_, _, value) in zip(_entries(before), _entries(after), strict=True):
        if value != old:
            changed.setdefault(part, []).append(as_flag(name, value))
    return changed


def _entries(config: Any) -> Iterator[tuple[str, str, Any]]:
    """Every flag's part, name and value."""
    for part in fields(config):
        values = getattr(config, part.name)
        for entry in fields(values):
            yield part.name, entry.name, getattr(values, entry.name)


def config_identity(config: PretrainConfig) -> Identity:
    """The model's dimensions and its neuron, without the backend."""
    neuron = asdict(config.neuron)
    # All backends compute the same function: a checkpoint made on a GPU continues on a CPU.
    del neuron["neuron_backend"]
    return {"model": asdict(config.model), "neuron": neuron}


def recipe(config: PretrainConfig) -> dict[str, object]:
    """Values by flag with an effect on the update. A run that continues may change them."""
    return {flag(name): getattr(getattr(config, part), name) for part, name in _recipe_fields(config)}


def _recipe_fields(config: PretrainConfig) -> Iterator[tuple[str, str]]:
    """Part and name by field with an effect on the update."""
    for entry in fields(config.optimizer):
        yield "optimizer", entry.name
    has_own_loss = "loss" in config.model.own_task()
    for part, names in _UPDATE.items():
        for name in names:
            if not (has_own_loss and name in ("loss", "label_smoothing")):
                yield part, name
    if DECAY_STYLES[config.optimizer.lr_decay_style](1.0) < 1.0:
        # The rate depends on the length.
        for name in LENGTHS:
            yield "training", name


def changed_recipe(extra: Mapping[str, object], config: PretrainConfig) -> list[str]:
    """One line about flags with other values than in the run before; empty without a difference.

    Args:
        extra: the checkpoint's entries beside its tensors.
    """
    before = extra.get("recipe")
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
    """Values for turning stored samples into inputs, without augmentation. Checkpoints keep them as `SAMPLES_KEY`."""
    data = config.data
    if data.is_in_python:
        return {"data": data.data_path}
    model = config.model
    # Tokens and arrays are used as they are.
    if "inputs" in model.own_task() and not any(len(each.shape) > 2 for each in model.inputs.values()):
        return {}
    shape = model.input_shape
    if len(shape) != 3:
        return {"split_by": data.split_by or "number"}
    constants = data.normalisation(shape[0], config.training.evaluate_only)
    return {"normalize_images": constants, "center_crop": data.center_crop}


def samples_from(extra: Mapping[str, object], evaluates: bool) -> dict[str, object]:
    """A checkpoint's values of `samples`: all of them to evaluate, the constants with --finetune.

    Args:
        extra: the checkpoint's entries beside its tensors.
    """
    found = extra.get(SAMPLES_KEY)
    if not isinstance(found, Mapping):
        return {}
    # The weights expect values on this scale. Crop and frames are the new task's own.
    taken = ["normalize_images"]
    if evaluates:
        taken += ["center_crop", "split_by"]
    return {name: found[name] for name in taken if name in found}


def changed_samples(extra: Mapping[str, object], config: PretrainConfig) -> list[str]:
    """One line about `samples` that differ from the training's; empty without a difference."""
    before = samples_from(extra, config.training.evaluate_only)
    now = samples(config)
    changed = {}
    for name, value in before.items():
        if name in now and value != now[name]:
            changed[flag(name)] = value, now[name]
    return _line("samples are prepared differently from the samples of the training: ", changed)
