"""docs/vllm.md is true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.conftest import HAS_GPU, KING_JAMES

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "vllm.md").read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.skipif(HAS_GPU, reason="would take all of a GPU's memory, of which other tests have a part")
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_run(number: int, tmp_path: Path) -> None:
    (tmp_path / "examples" / "king-james").mkdir(parents=True)
    (tmp_path / "examples" / "king-james" / "model").symlink_to(KING_JAMES)
    file = tmp_path / "example.py"
    file.write_text(EXAMPLES[number])
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [sys.executable, str(file)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("print(" in EXAMPLES[number]) == bool([line for line in done.stdout.splitlines() if " of the " in line])
