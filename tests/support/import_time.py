"""Prints the seconds that `import lilicorr_hf` adds to `import transformers.generation` in a fresh process."""

import statistics
import subprocess
import sys


CODE = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
# Lazy modules load on attribute access, so the baseline touches what generation needs.
BASELINE = "torch; from transformers import AutoModelForCausalLM, GenerationMixin"


def seconds(module: str) -> float:
    return float(subprocess.check_output([sys.executable, "-c", CODE.format(module)], text=True))


def main() -> None:
    pairs = [(seconds(BASELINE), seconds(f"{BASELINE}; import lilicorr_hf")) for _ in range(8)][1:]
    base = statistics.median(pair[0] for pair in pairs)
    added = statistics.median(ours - theirs for theirs, ours in pairs)
    sys.stdout.write(f"transformers generation {base:.2f} s, lilicorr_hf adds {added:.2f} s\n")


if __name__ == "__main__":
    main()
