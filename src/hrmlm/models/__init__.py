"""Language models: one file per family, found by the registry; blocks, cache and the common interface beside them."""

from hrmlm.models.base import LanguageModel, ModelOutput, PartialLoss
from hrmlm.models.registry import build_model, families, model_config
from hrmlm.models.settings import ModelConfig

__all__ = ["LanguageModel", "ModelConfig", "ModelOutput", "PartialLoss", "build_model", "families", "model_config"]
