"""What a configuration holds where no flag says it: the defaults of its classes, and over them the values of files."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from megasnn.config.checks import ConfigError, flag
from megasnn.config.data import PATHS
from megasnn.config.serialise import ABOUT, as_flag, from_dict, to_dict
from megasnn.files.described import DescriptionError, FreeForm, described, in_message, open_regular, read_bounded

Config = TypeVar("Config")
Values = Mapping[str, Mapping[str, Any]]
"""Values of fields by part and name, as `to_dict` gives them; not all of them need to be there."""

LARGEST = 1 << 20
_ADVICE = "correct the file, or give one that a run of this model wrote"
_NOT_GIVEN = "(not given)"
_OF_TRAINING: dict[str, tuple[str, ...]] = {
    "checkpoint": (
        *("save", "save_interval", "async_save", "keep_last", "keep_every", "keep_best"),
        *("finetune", "reset_head", "no_load_optim", "exit_on_missing_checkpoint"),
    ),
    "logging": ("profile_steps", "profile_ranks"),
}
"""What a file says of a training and an evaluation has no use for."""
_STARTS = ("load", "load_spikingjelly", "ckpt_step")
_FLAGS = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)")


def defaults_of(config_class: type[Config], argv: Sequence[str], recipes: Mapping[str, Path], saved: Values) -> Config:
    """The configuration without flags: the values of all that gives some, see `sources_of`. Raises as that."""
    values: dict[str, dict[str, Any]] = {}
    for given in sources_of(config_class, argv, recipes, saved).values():
        values = {part: {**values.get(part, {}), **given.get(part, {})} for part in {**values, **given}}
    return from_dict(config_class, values)


def sources_of(
    config_class: type[Any], argv: Sequence[str], recipes: Mapping[str, Path], saved: Values
) -> dict[str, Values]:
    """What gives values beside the flags, and which ones; a later source replaces the values of those before it.

    They are the file that `--config` names, and the variant that `--variant` names, whose dimensions replace those of
    the file. With `--evaluate-only` the file says nothing of what only a training does, as saving.

    Args:
        recipes: files that `--config` takes by a name.
        saved: values of the checkpoint of `--load`, which come first.
    Raises:
        ConfigError: the file of `--config` cannot be read, or holds what is no configuration of this class.
    """
    flags = _early_flags(argv)
    plain = config_class()
    sources = {"--load": saved}
    if flags.config is not None:
        given = _read(config_class, flags.config, recipes)
        _refuse_commands(given, flags)
        if "variant" in given.get("model", {}):
            given["model"] = {**_dimensions(plain, given["model"]["variant"]), **given["model"]}
        if flags.evaluate_only:
            given = _for_evaluation(given, starts=flags.load is None and flags.load_spikingjelly is None)
        if "data" in given:  # what a run was not told of samples, its checkpoint may tell
            told = saved.get("data", {})
            given["data"] = {name: v for name, v in given["data"].items() if v is not None or name not in told}
        sources[f"--config {in_message(flags.config)}"] = given
    if flags.variant != _NOT_GIVEN:
        variant = None if _is_none(flags.variant) else flags.variant
        sources[f"--variant {in_message(flags.variant or '')}"] = {"model": _dimensions(plain, variant)}
    return sources


def with_sources(problems: Iterable[str], config: Any, sources: Mapping[str, Values]) -> list[str]:
    """Problems of a configuration, each with what has given the values that it is about, where that is no flag, and
    which flag takes them back, where there is one."""
    values = {name: value for part in to_dict(config).values() for name, value in part.items()}
    plain = {
        name: value for part, each in to_dict(type(config)()).items() if part != "model" for name, value in each.items()
    }
    optional = {name for name, value in plain.items() if value is None}
    given: dict[str, tuple[str, Any]] = {}
    for source, parts in sources.items():
        given |= {name: (source, value) for part in parts.values() for name, value in part.items()}
    return [problem + _told_sources(problem, values, given, optional) for problem in problems]


def _told_sources(
    problem: str, values: dict[str, Any], given: dict[str, tuple[str, Any]], optional: Collection[str]
) -> str:
    taken_back = []
    told: dict[str, list[str]] = {}
    for name in dict.fromkeys(each.replace("-", "_") for each in _FLAGS.findall(problem)):
        source, value = given.get(name, ("", None))
        if value is not None and value == values.get(name):
            # A path may hold a password.
            shown = flag(name) if name in PATHS else in_message(as_flag(name, value))
            told.setdefault(source, []).append(shown)
            taken_back += [f"{flag(name)} none"] * (name in optional)
    texts = [f"{source} gives {' '.join(flags)}" for source, flags in told.items()]
    if taken_back:
        texts.append(f"{' or '.join(taken_back)} takes it back")
    return f" ({'; '.join(texts)})" if texts else ""


def config_named(argv: Sequence[str]) -> str | None:
    """What `--config` names in a command line; None without it."""
    name: str | None = _early_flags(argv).config
    return name


def _early_flags(argv: Sequence[str]) -> argparse.Namespace:
    """The flags that change the defaults of all others, before those are read."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", nargs="?")
    early.add_argument("--variant", nargs="?", default=_NOT_GIVEN)
    for name in (*PATHS, "load", "load_spikingjelly"):
        early.add_argument(flag(name), f"--{name}", nargs="?")
    early.add_argument("--evaluate-only", "--evaluate_only", action=argparse.BooleanOptionalAction)
    flags = early.parse_known_args(list(argv))[0]
    flags.config = None if _is_none(flags.config) else flags.config
    return flags


def _for_evaluation(given: dict[str, Any], starts: bool) -> dict[str, Any]:
    """The values of a file without what only a training does.

    Args:
        starts: whether what the file loads is evaluated, rather than what a flag gives.
    """
    left_out = {part: {*names} for part, names in _OF_TRAINING.items()}
    begun, saved = (given.get("checkpoint", {}).get(name) for name in ("load", "save"))
    if starts and begun and saved and begun != saved:
        text = f"the file of --config begins with {in_message(begun)} and saves in {in_message(saved)}"
        raise ConfigError([f"--evaluate-only: {text}: give one of them to --load"])
    if not starts:
        left_out["checkpoint"] |= {*_STARTS}
    if given.get("logging", {}).get("eval_iters") == 0:
        left_out["logging"] |= {"eval_iters"}
    return {
        part: {name: value for name, value in values.items() if name not in left_out.get(part, ())}
        for part, values in given.items()
    }


def _is_none(text: str | None) -> bool:
    return text is None or text.lower() == "none"


def _read(config_class: type[Any], name: str, recipes: Mapping[str, Path]) -> dict[str, Any]:
    """The values in a file, all of which are fields of this configuration, and of this model where it names one."""
    path = recipes.get(name, Path(name))
    shown = in_message(str(path))
    try:
        with open_regular(path) as stream:
            content = read_bounded(stream, shown, LARGEST)
        values = described(dict[str, FreeForm], content, shown, advice=_ADVICE)
        mine = config_class().model.name
        if (named := values.pop(ABOUT, {}).get("model", mine)) != mine:
            raise ConfigError([f"{ABOUT}.model is {in_message(named)}, and this is {mine}"])
        from_dict(config_class, values)
    except FileNotFoundError:
        known = ", ".join(recipes) or "none"
        raise ConfigError(
            [f"--config {in_message(name)} is neither a file nor the name of a recipe of this model; recipes: {known}"]
        ) from None
    except DescriptionError as error:
        raise ConfigError([f"--config {error}"]) from None
    except ConfigError as error:
        raise ConfigError(f"--config {shown}: {problem}; {_ADVICE}" for problem in error.problems) from None
    except (OSError, ValueError) as error:  # ValueError: a name with a zero in it
        raise ConfigError([f"--config {shown} cannot be read: {error}"]) from None
    return values


def _refuse_commands(values: dict[str, Any], flags: argparse.Namespace) -> None:
    """Raises ConfigError where a file names a command to be run, unless a flag replaces it: files are strangers'."""
    for name in PATHS:
        paths = values.get("data", {}).get(name) or ""
        if getattr(flags, name) is None and any(part.startswith("pipe:") for part in paths.split("::")):
            raise ConfigError(
                [
                    f"--config {in_message(flags.config)}: data.{name} is {in_message(paths)}, a command that would be "
                    f"run; only the command line may give one: {flag(name)}"
                ]
            )


def _dimensions(plain: Any, variant: str | None) -> dict[str, Any]:
    """A variant and its dimensions; none where the model has no such variant, which the reader of all flags then
    reports."""
    model = type(plain.model)
    try:
        made = model(variant=variant)
    except (TypeError, ValueError):
        return {}
    given_by_variant = [
        entry.name for entry in fields(model) if entry.default is None and getattr(plain.model, entry.name) is not None
    ]
    return {"variant": variant, **{name: getattr(made, name) for name in given_by_variant}}
