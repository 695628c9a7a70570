"""Other engines compute on our exports what we compute; `python tests/peers/engines.py` prints what is compared."""

from pathlib import Path

import pytest
from engines import rows


pytestmark = pytest.mark.peer


def test_every_engine_takes_the_same_blocks_from_the_same_lattice():
    found = list(rows(Path(".")))
    engines = ["nvidia-modelopt", "nvidia-modelopt", "sglang", "vllm", "transformers"]
    assert [row.engine.split()[0] for row in found] == engines
    for row in found:
        assert row.blocks >= 12 and row.same == row.blocks, row
        assert row.difference is None or row.difference < 1e-5, row
        assert "unlike" not in row.config and row.config != "misread", row
