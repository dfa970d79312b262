"""Text from models: sampling, stop strings, batched and streamed generation."""

from hrmlm.inference.generation import Engine
from hrmlm.inference.generator import Generator, generate, stream
from hrmlm.inference.rows import Completion, GenerationOptions, TokenEvent
from hrmlm.inference.sampling import Sampler, SamplingOptions

__all__ = [
    "Completion",
    "Engine",
    "GenerationOptions",
    "Generator",
    "Sampler",
    "SamplingOptions",
    "TokenEvent",
    "generate",
    "stream",
]
