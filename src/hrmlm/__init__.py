"""Train, study, run and deploy hierarchical recurrent language models."""

__version__ = "0.1.0"
