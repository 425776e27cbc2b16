"""A tiny model of chess, of random weights: it names no legal move."""

from whet.generate.policy import PolicyConfig
from whet.model.config import ModelConfig

SHAPE = ModelConfig(
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    max_positions=256,
)
TINY = PolicyConfig(model=SHAPE, tokenizer="boards", schema="none", template="plain")
