"""Timing and comparing plain and assisted `generate` calls."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import BatchEncoding

from .modeling.generation_lilicorr import Recording, record


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Two tokens whose target logits are closer than this are a tie: a block and single steps round differently.
TIE_GAP = 1e-4


@dataclass
class Run:
    """One `generate` call: new token ids, wall seconds, and its statistics if it was assisted."""

    token_ids: list[int]
    seconds: float
    recording: Recording

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds

    @property
    def target_passes(self) -> int:
        return self.recording.target_passes or len(self.token_ids)


def run_generate(model: "PreTrainedModel", inputs: BatchEncoding, **kwargs: Any) -> Run:
    """Times one `generate` call on a single prompt.

    Args:
        model (`PreTrainedModel`): the target.
        inputs (`BatchEncoding`): tokenizer output for one prompt.
        kwargs: for `generate`, `assistant_model` among them.
    """
    with record() as recording:
        start = time.perf_counter()
        output = model.generate(**inputs, **kwargs)  # type: ignore[operator]
        if model.device.type != "cpu":
            torch.accelerator.synchronize(model.device)
        seconds = time.perf_counter() - start
    return Run(output[0, inputs["input_ids"].shape[1] :].tolist(), seconds, recording)


@dataclass
class Divergence:
    """Where two continuations part: index among new tokens, both tokens, and the target's top-2 logit gap there."""

    index: int
    plain: int | None
    assisted: int | None
    gap: float

    @property
    def is_tie(self) -> bool:
        return self.gap < TIE_GAP


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
    return Divergence(index, token[0], token[1], (best[0] - best[1]).item())


def encode(
    tokenizer: "PreTrainedTokenizerBase", prompt: str | list[dict[str, str]], chat: bool = True
) -> BatchEncoding:
    """Model inputs `[1, n]` of a text, or of the chat messages it stands for.

    Raises:
        `ValueError`: if a chat is asked for and the tokenizer has no chat template.
    """
    if not chat:
        return tokenizer(prompt, return_tensors="pt")
    if tokenizer.chat_template is None:
        raise ValueError("This tokenizer has no chat template; pass `--no-chat` to complete the plain text.")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, enable_thinking=False
    )
    return cast(BatchEncoding, inputs)
