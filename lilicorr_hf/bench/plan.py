"""Which prompts are decoded under which conditions, in an order that may stop at any time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from .prompts import Prompt, read_prompts


@dataclass(frozen=True)
class Options:
    """
    What decides the numbers; a run goes on only where these are the same.

    Args:
        systems (tuple of `str`): specs, plain decoding left out.
        max_new_tokens (`int`): tokens to generate per prompt.
        temperatures (tuple of `float`): 0 decodes greedily, once; others once for each seed.
        seeds (tuple of `int`): for sampling.
        batch_sizes (tuple of `int`): sequences decoded together.
        lengths (tuple of `int`): input tokens to lengthen prompts to; empty for prompts as they are.
        full_length (`bool`): go on after the end token, so that everyone writes equally many tokens.
    """

    systems: tuple[str, ...] = ("lilicorr-tree", "lilicorr", "argmax", "transformers-dflash", "prompt-lookup")
    max_new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0,)
    seeds: tuple[int, ...] = (42, 43, 44)
    batch_sizes: tuple[int, ...] = (1,)
    lengths: tuple[int, ...] = ()
    full_length: bool = False


@dataclass(frozen=True)
class Condition:
    """Everything but the prompt."""

    temperature: float = 0.0
    seed: int | None = None
    batch: int = 1
    length: int | None = None


@dataclass(frozen=True)
class Item:
    """Prompts of one file, decoded together by every system in turn.

    Args:
        prompts (list of [`Prompt`]): all of the file.
        indices (tuple of `int`): of those to decode.
        condition ([`Condition`]): how.
    """

    prompts: list[Prompt] = field(repr=False)
    indices: tuple[int, ...]
    condition: Condition

    @property
    def chosen(self) -> list[Prompt]:
        return [self.prompts[i] for i in self.indices]

    @property
    def key(self) -> str:
        """Names it in the file of results."""
        how = self.condition
        ids = ",".join(prompt.id for prompt in self.chosen)
        return f"{self.chosen[0].dataset}/{ids} T={how.temperature:g} seed={how.seed} b={how.batch} n={how.length}"


def conditions(options: Options) -> list[Condition]:
    sizes = product(options.lengths or (None,), options.batch_sizes)
    return [
        Condition(temperature, seed, batch, length)
        for (length, batch), temperature in product(sizes, options.temperatures)
        for seed in (options.seeds if temperature else (None,))
    ]


def plan(
    files: list[Path],
    options: Options,
    limit: int | None = None,
    fits: Callable[[Prompt], bool] = lambda prompt: True,
) -> list[Item]:
    """All items: the first of every file and condition, then the second of each, and so on.

    Args:
        files (list of `Path`): see [`read_prompts`]; each its own dataset.
        options ([`Options`]): the conditions.
        limit (`int`): prompts to take of each file.
        fits (`Callable`): whether to take a prompt at all.

    Raises:
        `ValueError`: for two files of one name, and where a file has fewer prompts than a batch.
    """
    names = [file.stem for file in files]
    if len(set(names)) < len(names):
        raise ValueError(f"Results are told apart by the names of files, and two are called alike: {sorted(names)}.")
    queues = []
    for file in files:
        prompts = list(filter(fits, read_prompts(file)))[:limit]
        if len(prompts) < (largest := max(options.batch_sizes)):
            raise ValueError(f"{file}: a batch of {largest} needs as many prompts, got {len(prompts)}.")
        queues += [list(items(prompts, condition)) for condition in conditions(options)]
    longest = max(map(len, queues))
    return [queue[i] for i in range(longest) for queue in queues if i < len(queue)]


def items(prompts: list[Prompt], condition: Condition) -> Iterator[Item]:
    """Whole batches, in the order of the prompts."""
    for start in range(0, len(prompts) - condition.batch + 1, condition.batch):
        yield Item(prompts, tuple(range(start, start + condition.batch)), condition)
