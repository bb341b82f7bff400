"""How the flags of a configuration are grouped and explained by --help: what is rarely used comes last."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import field, fields, is_dataclass, make_dataclass
from functools import cache
from typing import Annotated, Any, get_type_hints

import tyro

from megasnn.config.names import summaries, table_of

# Parts as they are shown, and after them all those flags of any part that few runs need.
ORDER = ("model", "data", "training", "optimizer", "parallel", "checkpoint", "logging", "neuron")
RARELY_USED = {
    "data": (
        *("crop_scale", "crop_ratio", "rand_augment_ops", "random_erasing_mode", "normalize_images", "center_crop"),
        *("mixup_off_epoch",),
        *("last_batch", "split_by", "frame_duration", "normalize_frames"),
        *("skip_broken_samples", "max_sample_mb", "max_unpacked_gb", "fetch_ahead", "fetch_timeout"),
    ),
    "training": (
        *("evaluate_only", "exit_interval", "exit_duration_in_mins", "max_skipped_steps"),
        *("bptt_steps", "tet_lambda", "tet_mean"),
    ),
    "optimizer": (
        *("lr_warmup_epochs", "lr_warmup_init", "lr_cooldown_epochs", "lr_interval", "lr_decay_from"),
        *("freeze", "lr_scale_of", "weight_decay_of", "ema_decay"),
        *("adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum", "sgd_nesterov"),
    ),
    "parallel": (
        *("pipeline_gradient_dtype", "backend", "device", "distributed_timeout_minutes"),
        *("check_replicas_interval", "context_parallel_cut"),
    ),
    "checkpoint": ("keep_every", "keep_best", "ckpt_step", "reset_head", "no_load_optim", "exit_on_missing_checkpoint"),
    "logging": (
        *("log_throughput", "log_pictures_interval", "model_summary"),
        *("profile_steps", "profile_ranks"),
    ),
    "neuron": ("decay_input", "detach_reset", "surrogate_alpha", "neuron_backend"),
}


def flag_groups(defaults: Any, recipes: Iterable[str] = ()) -> type:
    """A dataclass with a field for each group of flags, made for `tyro.cli`.

    Args:
        defaults: a configuration, whose parts are dataclasses; the flags take its values when they are not given.
        recipes: names that `--config` takes.
    """
    start = _group("configuration", [_config_flag(recipes)], "Values from a file; flags win over them.")
    often, rarely = [_entry("configuration", start)], []
    for name in sorted((part.name for part in fields(defaults)), key=ORDER.index):
        part = getattr(defaults, name)
        flags = _flags(part)
        # A model's fields say which of its flags few runs need.
        rare = RARELY_USED.get(name) or tuple(e.name for e in fields(part) if e.metadata.get("listed_last"))
        group = _group(name, [flag for flag in flags if flag[0] not in rare], type(part).__doc__)
        often.append(_entry(name, group))
        rarely += [flag for flag in flags if flag[0] in rare]
    last = _group("rarely_used", rarely, "Flags that few runs need.")
    whole = make_dataclass("Flags", [*often, _entry("rarely_used", last)])
    whole.__doc__ = type(defaults).__doc__
    return whole


def _config_flag(recipes: Iterable[str]) -> tuple[str, Any, Any]:
    text = "File to take values from: config.json of a run, or some of what stands in one"
    if names := ", ".join(recipes):
        text += f"; or the name of a recipe: {names}"
    return "config", Annotated[str | None, tyro.conf.arg(help=f"{text}.")], None


def _entry(name: str, group: type) -> tuple[str, Any, Any]:
    """A field for a group. Where no help is given tyro looks for the source of the class, and there is none."""
    return name, Annotated[group, tyro.conf.arg(help=group.__doc__ or "")], field(default_factory=group)


def _group(name: str, flags: list[tuple[str, Any, Any]], text: str | None) -> type:
    group = make_dataclass(name, flags)
    group.__doc__ = text
    return group


def _flags(part: Any) -> list[tuple[str, Any, Any]]:
    """Name, type with help, and default of each field."""
    kind: type = type(part)
    texts, hints = help_texts(kind), get_type_hints(kind, include_extras=True)
    flags = []
    for entry in fields(part):
        hint, table = hints[entry.name], table_of(hints[entry.name])
        if getattr(part, entry.name) is True:  # set by a file: only a negative form of the flag takes it back
            hint = bool
        text = " ".join(filter(None, (texts.get(entry.name), summaries(table) if table is not None else "")))
        flags.append((entry.name, Annotated[hint, tyro.conf.arg(help=text)], getattr(part, entry.name)))
    return flags


@cache
def help_texts(part: type) -> dict[str, str]:
    """The text below each field of a dataclass, on one line; those that it inherits included."""
    texts: dict[str, str] = {}
    for each in reversed(part.__mro__):
        if not is_dataclass(each):
            continue
        try:
            source = inspect.getsource(each)
        except OSError:  # a program that was typed in, or read from a pipe
            continue
        (body,) = ast.parse(textwrap.dedent(source)).body
        assert isinstance(body, ast.ClassDef)
        for entry, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and isinstance(below, ast.Expr):
                texts[entry.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return texts
