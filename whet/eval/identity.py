"""Which weights were evaluated: where they came from, and their hash."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from whet.generate.policy import Policy, PolicyConfig
from whet.model.transformer import LanguageModel
from whet.telemetry.provenance import describe_model


def describe_weights(config: PolicyConfig, policy: Policy) -> dict[str, Any]:
    """Say which weights are evaluated.

    Args:
        config: Where the user said that they are.
        policy: What was loaded.

    Returns:
        init; folder and sha256 of the base's files (`sha256_of_all` of `whet.telemetry.provenance.describe_model`), of
        all parameters where there are no files; adapter, the hash of a LoRA adapter on it, or None.
    """
    adapter = policy.adapter
    base = adapter.base if adapter is not None and not config.adapter else config.init
    files = describe_model(base) if base else {}
    return {
        "init": config.init,
        "folder": files.get("folder"),
        "sha256": files.get("sha256_of_all") or _digest(policy.model),
        "adapter": None if adapter is None else adapter.sha256,
    }


def _digest(model: LanguageModel) -> str:
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {list(parameter.shape)}\n".encode())
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
