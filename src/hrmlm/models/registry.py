"""Finds the families: every module of this package that registers one. Adding a family means adding a file."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hrmlm.config import nearest
from hrmlm.errors import UserError
from hrmlm.models.base import LanguageModel
from hrmlm.models.settings import ModelConfig

_FAMILIES: dict[str, tuple[type[ModelConfig], type[LanguageModel]]] = {}


def register(config_class: type[ModelConfig]) -> Callable[[type[LanguageModel]], type[LanguageModel]]:
    """Class decorator: makes a family known under the default of its configuration's `family` field."""

    def add(model_class: type[LanguageModel]) -> type[LanguageModel]:
        _FAMILIES[config_class.model_fields["family"].default] = (config_class, model_class)
        return model_class

    return add


@cache
def families() -> dict[str, tuple[type[ModelConfig], type[LanguageModel]]]:
    """All families by name: (configuration class, model class)."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"hrmlm.models.{module.name}")
    return dict(sorted(_FAMILIES.items()))


def model_config(settings: Mapping[str, Any] | ModelConfig, where: str = "model") -> ModelConfig:
    """The validated configuration of the family that `settings["family"]` names. Raises: UserError."""
    if isinstance(settings, ModelConfig):
        return settings
    if not isinstance(settings, Mapping):
        raise UserError(f"{where}: expected a mapping of keys to values, got {settings!r}")
    name = settings.get("family")
    if not isinstance(name, str) or name not in families():
        raise UserError(f"{where}.family: unknown family {name!r}, {nearest(str(name), families())}")
    return families()[name][0].parse(settings, where)


def build_model(settings: Mapping[str, Any] | ModelConfig) -> LanguageModel:
    """A new model with fresh weights (drawn from torch's global generator). Raises: UserError."""
    config = model_config(settings)
    model = families()[config.family][1](config)
    if not model.embedding.weight.is_meta:  # weights of which there are only shapes have nothing to draw
        model.init_weights()
    return model
