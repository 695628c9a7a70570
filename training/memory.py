# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""What the C library does with memory that is freed."""

import ctypes
import sys


# Of glibc's `malloc.h`: above which size memory comes from the system and goes back, and how much may lie free.
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1
LARGEST = 2**31 - 1


def keep_freed_memory() -> None:
    """Has this process keep the memory of freed tensors for the next ones, however large they are.

    On a CPU every step makes the same large tensors anew, and pages that come fresh from the system cost time. Nothing
    happens where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST)
        mallopt(M_TRIM_THRESHOLD, LARGEST)
