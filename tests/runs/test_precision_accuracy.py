"""Personalized models are as accurate where networks multiply in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest

import tailorfl
from tailorfl.engines.devices import HOST, available


@pytest.mark.slow
@pytest.mark.skipif("bfloat16" not in available(HOST), reason="needs a processor that multiplies bfloat16")
def test_the_demo_is_as_accurate_in_bfloat16(tmp_path: Path) -> None:
    """Means over 20 clients after 20 rounds: some 360 test samples, of which a handful may fall otherwise."""
    means = {
        precision: tailorfl.run(
            "demo",
            rounds=20,
            seeds=1,
            engine={"name": "vectorized", "precision": precision},
            out=tmp_path / precision,
        ).table["mean"]
        for precision in ("float32", "bfloat16")
    }
    gaps = (means["bfloat16"] - means["float32"]).abs()
    assert len(gaps) == 6
    assert gaps.max() < 0.03, gaps
    assert means["bfloat16"].min() > 0.7
