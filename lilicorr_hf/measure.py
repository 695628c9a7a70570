"""Timing and comparing plain and assisted `generate` calls."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import BatchEncoding

from .modeling.cache_lilicorr import CACHE
from .modeling.generation_lilicorr import Recording, record
from .pairs import place_of


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Two tokens whose target logits are closer than this are a tie: a block and single steps round differently.
TIE_GAP = 1e-4


def tie_gap(dtype: torch.dtype) -> float:
    """[`TIE_GAP`], or what half precision leaves of logits around 30: SmolLM2's in bf16 move by up to 0.57."""
    return max(TIE_GAP, 128 * torch.finfo(dtype).eps)


@dataclass
class Pass:
    """One pass of the target: positions its cache held before, and positions it read."""

    cached: int
    read: int


@dataclass
class Run:
    """One `generate` call.

    Args:
        rows (list of `list[int]`): new token ids of each prompt, the end token the last one.
        seconds (`float`): wall clock.
        recording ([`Recording`]): empty unless a block drafter of ours assisted.
        passes (list of [`Pass`]): of the target, the prefill first.
    """

    rows: list[list[int]]
    seconds: float
    recording: Recording
    passes: list[Pass] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """New tokens of the only prompt."""
        [row] = self.rows
        return row

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rows))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def target_passes(self) -> int:
        return len(self.passes)

    def accepted(self, prompt_tokens: int) -> list[int]:
        """Draft tokens each verification kept, bonus token not counted: as recorded, or told from the target's cache.

        Args:
            prompt_tokens (`int`): positions of the prompt; where its own pass verifies a draft, that counts too.
        """
        if self.recording.calls or len(self.rows) > 1 or not self.passes:
            return self.recording.accepted
        before = [prompt_tokens, *(step.cached + 1 for step in self.passes[1:])]
        after = [*before[1:], prompt_tokens + self.tokens]
        gains = [b - a for a, b in zip(before, after, strict=True)]
        drafted_at_once = self.passes[0].read > prompt_tokens
        return [gain - 1 for gain in (gains if drafted_at_once else gains[1:])]


@contextmanager
def watch_passes(model: "PreTrainedModel") -> Iterator[list[Pass]]:
    """Notes every pass of a model while the block runs."""
    passes: list[Pass] = []

    def note(module, args, kwargs):
        cache, ids = kwargs.get(CACHE), kwargs.get("input_ids", args[0] if args else None)
        passes.append(Pass(0 if cache is None else cache.get_seq_length(), 0 if ids is None else ids.shape[1]))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield passes
    finally:
        handle.remove()


def synchronize(model: "PreTrainedModel") -> None:
    """Waits for pending work of an accelerator."""
    if (device := place_of(model)).type != "cpu":
        torch.accelerator.synchronize(device)


def run_generate(
    model: "PreTrainedModel", inputs: BatchEncoding, lattice: bool = False, watch: bool = True, **kwargs: Any
) -> Run:
    """Times one `generate` call.

    Args:
        model (`PreTrainedModel`): the target.
        inputs (`BatchEncoding`): tokenizer output for one prompt, or for several, left-padded.
        lattice (`bool`): record the candidates of every block too.
        watch (`bool`): record blocks and passes; otherwise nothing is known but text and time, which on an accelerator
            is shorter, as nobody waits for a block's parts.
        kwargs: for `generate`, `assistant_model` among them.
    """
    with ExitStack() as watching:
        recording = watching.enter_context(record(lattice=lattice)) if watch else Recording()
        passes = watching.enter_context(watch_passes(model)) if watch else []
        synchronize(model)
        start = time.perf_counter()
        output = model.generate(**inputs, **kwargs)  # type: ignore[operator]
        synchronize(model)
        seconds = time.perf_counter() - start
    new = output[:, inputs["input_ids"].shape[1] :].tolist()
    ends = kwargs.get("eos_token_id", model.generation_config.eos_token_id)  # type: ignore[union-attr]
    stops = set() if ends is None else set(ends if isinstance(ends, list) else [ends])
    return Run([until_end(row, stops) for row in new], seconds, recording, passes)


def until_end(row: list[int], stops: set[int]) -> list[int]:
    """A row of a batch without the padding behind its end token."""
    end = next((i for i, token in enumerate(row) if token in stops), len(row))
    return row[: end + 1]


@dataclass
class Divergence:
    """Where two continuations part: index among new tokens, both tokens, the target's top-2 logit gap there, and the
    gap below which that is a tie."""

    index: int
    plain: int | None
    assisted: int | None
    gap: float
    limit: float = TIE_GAP

    @property
    def is_tie(self) -> bool:
        return self.gap < self.limit


@torch.no_grad()
def first_divergence(
    model: "PreTrainedModel", input_ids: torch.Tensor, plain: list[int], assisted: list[int]
) -> Divergence | None:
    """The first difference of two greedy continuations of one prompt, or `None` if there is none.

    Args:
        model (`PreTrainedModel`): the target, to measure how near its two best tokens were.
        input_ids (`torch.LongTensor` of shape `[1, n]`): the prompt.
        plain, assisted (`list[int]`): new tokens of both runs.
    """
    if plain == assisted:
        return None
    index = next((i for i, (a, b) in enumerate(zip(plain, assisted, strict=False)) if a != b), None)
    if index is None:
        index = min(len(plain), len(assisted))
    prefix = torch.cat([input_ids, input_ids.new_tensor([plain[:index]])], dim=1)
    best = model(input_ids=prefix, logits_to_keep=1).logits[0, -1].float().topk(2).values
    token = [ids[index] if index < len(ids) else None for ids in (plain, assisted)]
    return Divergence(index, token[0], token[1], (best[0] - best[1]).item(), tie_gap(model.dtype))


@torch.no_grad()
def mean_entropy(model: "PreTrainedModel", input_ids: torch.Tensor, answer: list[int]) -> float:
    """Mean entropy, in nats, of the target's distributions that an answer was chosen from.

    Args:
        input_ids (`torch.LongTensor` of shape `[1, n]`): the prompt.
        answer (`list[int]`): new tokens.
    """
    ids = torch.cat([input_ids, input_ids.new_tensor([answer])], dim=1)
    logits = model(input_ids=ids, logits_to_keep=len(answer) + 1).logits[0, :-1].float()
    return torch.distributions.Categorical(logits=logits).entropy().mean().item()


def encode(
    tokenizer: "PreTrainedTokenizerBase", prompt: str | list[dict[str, str]], chat: bool = True, thinking: bool = False
) -> BatchEncoding:
    """Model inputs `[1, n]` of a text, or of the chat messages it stands for, in that reasoning mode where there are.

    Raises:
        `ValueError`: if a chat is asked for and the tokenizer has no chat template.
    """
    if not chat:
        return tokenizer(prompt, return_tensors="pt")
    if tokenizer.chat_template is None:
        raise ValueError("This tokenizer has no chat template; pass `--no-chat` to complete the plain text.")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, enable_thinking=thinking
    )
    return cast(BatchEncoding, inputs)


def encode_batch(tokenizer: "PreTrainedTokenizerBase", chats: list[list[dict[str, str]]]) -> BatchEncoding:
    """Model inputs `[b, n]` of several chats, padded on the left."""
    if len(chats) == 1:
        return encode(tokenizer, chats[0])
    ids = [encode(tokenizer, chat)["input_ids"][0].tolist() for chat in chats]
    return tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
