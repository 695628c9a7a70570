"""Measuring draft methods against plain decoding on files of prompts."""

import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import BatchEncoding

from .measure import Divergence, Run, encode, first_divergence, run_generate


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .modeling.modeling_dflash import DFlashModel


def read_prompts(path: str | Path, limit: int | None = None) -> list[list[dict[str, str]]]:
    """Chats of a JSONL file whose rows hold `messages`, `turns` (the first is taken) or `prompt`.

    Raises:
        `ValueError`: naming the line that holds none of them.
    """
    chats = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines()[:limit], start=1):
        row = json.loads(line)
        if "messages" in row:
            chats.append(row["messages"])
        elif "turns" in row or "prompt" in row:
            content = row["turns"][0] if "turns" in row else row["prompt"]
            chats.append([{"role": "user", "content": content}])
        else:
            raise ValueError(f"{path}, line {number}: expected `messages`, `turns` or `prompt`, got {sorted(row)}.")
    return chats


@dataclass
class PromptResult:
    """One prompt under every system: seconds and new tokens of each, recordings and divergences of the assisted."""

    seconds: dict[str, float]
    tokens: dict[str, int]
    accepted: dict[str, list[int]]
    divergence: dict[str, Divergence | None]

    def speedup(self, system: str) -> float:
        """Assisted over plain tokens per second."""
        rate = {name: self.tokens[name] / self.seconds[name] for name in ("plain", system)}
        return rate[system] / rate["plain"]


@dataclass(eq=False)
class BenchResult:
    """Results of the prompts of one file."""

    name: str
    prompts: list[PromptResult] = field(default_factory=list)

    def tau(self, system: str) -> float:
        """Block-weighted acceptance length over all prompts, bonus token included."""
        accepted = [n for prompt in self.prompts for n in prompt.accepted[system]]
        return 1 + sum(accepted) / len(accepted) if accepted else float("nan")

    def speedups(self, system: str) -> list[float]:
        return sorted(prompt.speedup(system) for prompt in self.prompts)

    def divergences(self, system: str) -> list[Divergence]:
        return [d for prompt in self.prompts if (d := prompt.divergence[system]) is not None]

    def summary(self, system: str) -> dict[str, Any]:
        """The row of a table: tau, median and 10th to 90th percentile of the speed-up, exactness."""
        speedups = self.speedups(system)
        low, high = (speedups[round(q * (len(speedups) - 1))] for q in (0.1, 0.9))
        divergences = self.divergences(system)
        return {
            "prompts": self.name,
            "system": system,
            "count": len(self.prompts),
            "tau": self.tau(system),
            "speedup_median": statistics.median(speedups),
            "speedup_p10": low,
            "speedup_p90": high,
            "identical": len(self.prompts) - len(divergences),
            "ties": sum(d.is_tie for d in divergences),
            "largest_gap": max((d.gap for d in divergences), default=0.0),
        }


def bench(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    systems: "dict[str, DFlashModel]",
    files: Iterable[str | Path],
    limit: int | None = None,
    max_new_tokens: int = 128,
) -> Iterator[BenchResult]:
    """Greedy decoding of every prompt by plain `generate` and by each system, in turn, after a warm-up.

    Args:
        model, tokenizer: the target.
        systems (`dict[str, DFlashModel]`): assistants by name.
        files (iterable of paths): see [`read_prompts`].
        limit (`int`): prompts to take from the start of each file.
        max_new_tokens (`int`): tokens to generate per prompt.

    Yields:
        after each prompt, the result of its file so far.
    """
    warmed_up = False
    for file in files:
        result = BenchResult(Path(file).stem)
        for chat in read_prompts(file, limit):
            inputs = encode(tokenizer, chat).to(model.device)
            if not warmed_up:
                run_systems(model, inputs, systems, max_new_tokens=16)
                warmed_up = True
            result.prompts.append(run_systems(model, inputs, systems, max_new_tokens))
            yield result


def run_systems(
    model: "PreTrainedModel", inputs: BatchEncoding, systems: "dict[str, DFlashModel]", max_new_tokens: int
) -> PromptResult:
    """One prompt by plain decoding and then by each assistant; the neighbours in time are what gets compared."""
    runs: dict[str, Run] = {}
    for name, assistant in ({"plain": None} | systems).items():
        runs[name] = run_generate(
            model, inputs, assistant_model=assistant, max_new_tokens=max_new_tokens, do_sample=False
        )
    plain = runs["plain"].token_ids
    return PromptResult(
        seconds={name: run.seconds for name, run in runs.items()},
        tokens={name: len(run.token_ids) for name, run in runs.items()},
        accepted={name: runs[name].recording.accepted for name in systems},
        divergence={
            name: first_divergence(model, inputs["input_ids"], plain, runs[name].token_ids) for name in systems
        },
    )


def to_json(results: list[BenchResult], systems: Iterable[str], provenance: dict[str, Any]) -> str:
    """Summaries and every prompt's raw numbers, with what they were measured on."""
    return json.dumps(
        {
            "provenance": provenance,
            "summary": [result.summary(system) for result in results for system in systems],
            "files": [asdict(result) for result in results],
        },
        indent=2,
    )
