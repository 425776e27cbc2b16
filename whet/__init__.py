"""whet: turn language models into reasoning models, in plain PyTorch."""

__version__ = "0.1.0"
