"""Memory that a process frees and takes again."""

import os
import platform
import subprocess
import sys

import pytest


SCRIPT = """
import resource
import torch
from lilicorr_hf.training.memory import keep_freed_memory
{call}
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 25)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
@pytest.mark.parametrize("kept", [False, True])
def test_large_tensors_take_the_memory_of_those_before(kept):
    """128 MiB are 32,768 pages of 4 KiB, or 64 of 2 MiB. Something small may come to lie in what the first tensors
    left, and a second place of that size be taken, once."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    script = SCRIPT.format(call="keep_freed_memory()" if kept else "")
    printed = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert (int(printed.stdout) < 32) == kept
