"""What a model's numbers mean: enough to hand a checkpoint something new, and to read its answer."""

from __future__ import annotations

from typing import Any

import torch

from tailorfl.data.scaling import SCALING, Scaling
from tailorfl.data.source import Source

NAMED = ("classes", "features", "tokenizer", "pad", "vocabulary")
"""What of a source's `info` names numbers."""


def meaning(source: Source) -> dict[str, Any]:
    """Returns how raw samples become inputs, and what the outputs stand for, as JSON can hold it.

    `shape` and `type` are of an input; `task`, `outputs` and `classes` say what comes out. `image`: a byte b of a
    channel becomes (b / 255 - mean) / deviation. `scaling`: a raw number r of a feature becomes (r - mean) / deviation,
    with the constants of the client whose it is or else those above them, and is cut off at ± clip where that is given.
    """
    kinds = {torch.uint8: "image", torch.int64: "tokens"}
    facts: dict[str, Any] = {
        "shape": list(source.input_shape),
        "type": kinds.get(source.x.dtype, "numbers"),
        "task": source.task,
        "outputs": source.outputs,
    }
    for key in NAMED:
        if key in source.info:
            value = source.info[key]
            facts[key] = list(value) if isinstance(value, tuple) else value
    if source.mean is not None and source.std is not None:
        facts["image"] = {"mean": list(source.mean), "deviation": list(source.std)}
    scaling: Scaling | None = source.info.get(SCALING)
    if scaling is not None:
        facts["scaling"] = scaling.facts()
    return facts
