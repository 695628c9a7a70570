"""Prints ratios of the shipped pair's decoding speed, each from alternating runs in one process:

a batch of eight prompts against the eight one by one, our loop against transformers' assisted one at one sequence,
passes over packed weights against those over the target's own, and the time that the two loops take themselves, what
target and drafter compute left out.
"""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch

import lilicorr_hf
from lilicorr_hf.measure import encode
from lilicorr_hf.modeling import linears_lilicorr


PROMPTS = [
    "Write a Python function that reverses a string.",
    "Anna has 12 apples, gives away a third and buys 5 more. How many has she?",
    "Name three reasons why the sky looks blue.",
    "Translate 'Good morning' into French and Spanish.",
    "What is a hash table?",
    "Explain photosynthesis in two sentences.",
    "Write a haiku about caches.",
    "How do I boil an egg?",
]


def rate(call: Callable[[], int]) -> float:
    """Tokens a second of a call that returns how many it made."""
    start = time.perf_counter()
    return call() / (time.perf_counter() - start)


class Overhead:
    """Processor seconds of the thread that decodes, those within the models left out."""

    def __init__(self, *methods: tuple[object, str]):
        self.inside = 0.0
        for owner, name in methods:
            setattr(owner, name, self.left_out(getattr(owner, name)))

    def left_out(self, method: Callable) -> Callable:
        @functools.wraps(method)
        def timed(*args, **kwargs):
            start = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.inside += time.thread_time() - start

        return timed

    def of(self, call: Callable[[], int]) -> float:
        """Seconds a token."""
        start, self.inside = time.thread_time(), 0.0
        tokens = call()
        return (time.thread_time() - start - self.inside) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer, assistant = lilicorr_hf.load_pair("smollm2-135m")
    # What transformers' loop verifies, too.
    assistant.config.tree_budget = 0
    # All rows write the same number of tokens.
    options = {"do_sample": False, "max_new_tokens": args.tokens, "eos_token_id": None, "assistant_model": assistant}
    singles = [encode(tokenizer, prompt) for prompt in PROMPTS]
    longest = max(inputs["input_ids"].shape[1] for inputs in singles)
    batch = {
        name: torch.cat([torch.nn.functional.pad(x[name], (longest - x[name].shape[1], 0)) for x in singles])
        for name in ("input_ids", "attention_mask")
    }

    def new_tokens(inputs) -> int:
        return model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :].numel()

    def one_by_one() -> int:
        return sum(new_tokens(inputs) for inputs in singles)

    def stock() -> int:
        with lilicorr_hf.stock_loop():
            return new_tokens(singles[0])

    def unpacked(inputs) -> int:
        os.environ[linears_lilicorr.VARIABLE] = "0"
        tokens = new_tokens(inputs)
        del os.environ[linears_lilicorr.VARIABLE]
        return tokens

    new_tokens(singles[0])
    batched = [(rate(lambda: new_tokens(batch)), rate(one_by_one)) for _ in range(args.rounds)]
    loops = [(rate(lambda: new_tokens(singles[0])), rate(stock)) for _ in range(4 * args.rounds)]
    packed = [
        (rate(functools.partial(new_tokens, inputs)), rate(functools.partial(unpacked, inputs)))
        for inputs in singles
        for _ in range(args.rounds)
    ]
    # Last: a target whose `forward` is replaced is not packed.
    overhead = Overhead((model, "forward"), (assistant, "draft"))
    own = [(overhead.of(stock), overhead.of(lambda: new_tokens(singles[0]))) for _ in range(4 * args.rounds)]
    for name, pairs in (
        ("batch of 8 / eight one by one", batched),
        ("our loop / transformers' loop", loops),
        ("packed weights / the target's own", packed),
        ("our loop / transformers' loop, outside of the models", own),
    ):
        ratios = sorted(ours / theirs for ours, theirs in pairs)
        sys.stdout.write(
            f"{name}: {statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f}, {len(ratios)} rounds)\n"
        )


if __name__ == "__main__":
    main()
