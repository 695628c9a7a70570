"""Prints the seconds that `import lilicorr_hf` adds to importing transformers' generation, in fresh processes.

Twice: over `GenerationMixin` alone, and over that with the auto classes, which nearly every script imports to load a
model it can generate with.
"""

import statistics
import subprocess
import sys


CODE = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
BASELINES = {
    "generation": "torch; from transformers import GenerationMixin",
    "generation and auto classes": "torch; from transformers import AutoConfig, AutoModel, GenerationMixin",
}


def seconds(modules: str) -> float:
    return float(subprocess.check_output([sys.executable, "-c", CODE.format(modules)], text=True))


def main() -> None:
    for name, baseline in BASELINES.items():
        pairs = [(seconds(baseline), seconds(f"{baseline}; import lilicorr_hf")) for _ in range(8)][1:]
        base = statistics.median(pair[0] for pair in pairs)
        added = statistics.median(ours - theirs for theirs, ours in pairs)
        sys.stdout.write(f"transformers {name}: {base:.2f} s, lilicorr_hf adds {added:.2f} s\n")


if __name__ == "__main__":
    main()
