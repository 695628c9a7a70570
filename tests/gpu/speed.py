"""The scoring pass on a GPU: parity of its kernels and modes, then what they and a whole block take; one JSON file.

    python tests/gpu/speed.py --output speed.json --target smollm2-135m --held_out prompts.jsonl

Random weights of the Qwen3 shapes, bf16: LiLiCorr's head in each mode beside those of Domino, DSpark and DFlash2, in
batches of up to 32. With `--held_out`, the shipped SmolLM2 pair on real prompts. No network, and under nine minutes by
design, which has not been put to the test. `--smoke` is the same on a CPU, small.
"""

import argparse
import functools
import json
import platform
import statistics
import sys
import time
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
from lilicorr_hf.modeling import kernels_lilicorr as kernels
from lilicorr_hf.modeling.lattice_lilicorr import candidate_pool, greedy_walk, viterbi_path
from lilicorr_hf.modeling.scoring_lilicorr import MODES
from lilicorr_hf.modeling.target_lilicorr import TargetTables
from lilicorr_hf.pairs import load_target
from lilicorr_hf.profile import profile, random_pair
from lilicorr_hf.provenance import made_with
from lilicorr_hf.stopwatch import read_bandwidth


NOT_MEASURED = "not measured"
SYSTEMS = ("lilicorr", "lilicorr:adaptive_draft=true", "lilicorr-tree:nodes=32", "argmax", "transformers-dflash")


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


def measure_text(name: str, held_out: str, device: torch.device) -> list[dict[str, Any]]:
    """Real prompts with the shipped pair, decoded by every system in turn."""
    model, tokenizer = load_target(name, dtype="bfloat16" if device.type == "cuda" else "float32")
    model.to(device)
    options = Options(systems=SYSTEMS, max_new_tokens=128)
    runner = Runner(model, tokenizer, parse_systems(list(SYSTEMS)), Setting(model, "smollm2-135m"), options)
    items = plan([Path(held_out)], options, 16)
    return summarise([row for item in items for row in runner.measure(item)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--target", default="smollm2-135m", help="A name `lilicorr fetch-target` knows, or a folder.")
    parser.add_argument("--held_out", help="JSONL of prompts; without it no text is measured.")
    parser.add_argument("--smoke", action="store_true", help="Small, on a CPU.")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        parser.error("there is no GPU; `--smoke` runs on a CPU")
    device = torch.device("cpu" if args.smoke else "cuda")
    rounds, repeats, vocab = (2, 2, 5000) if args.smoke else (50, 100, 151936)
    batch_sizes, modes = ((1, 2), MODES[:1]) if args.smoke else ((1, 2, 4, 8, 16, 32), MODES)
    report: dict[str, Any] = {
        "hardware": platform.machine() if args.smoke else torch.cuda.get_device_name(),
        "provenance": made_with(device),
    }
    steps: dict[str, Callable[[], Any]] = {"kernels": lambda: check_kernels(device, repeats, vocab)}
    for shape in ("tiny",) if args.smoke else ("qwen3-8b", "qwen3-4b", "smollm2-135m"):
        steps[shape] = functools.partial(measure_shape, shape, device, rounds, batch_sizes, modes)
    if args.held_out:
        steps["text"] = lambda: measure_text(args.target, args.held_out, device)
    start = time.monotonic()
    for name, step in steps.items():
        report[name] = step()
        report["seconds"] = time.monotonic() - start
        # A run that is cut off leaves what it has measured.
        args.output.write_text(json.dumps(report, indent=2) + "\n")
        sys.stderr.write(f"{name} done after {report['seconds']:.0f} s\n")


if __name__ == "__main__":
    main()
