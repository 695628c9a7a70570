"""Acceptance length of a pair on files of prompts, each decoded as one batch: minutes where `lilicorr bench`, which
also measures speed, takes an hour.

    python tests/support/acceptance.py gsm8k.jsonl humaneval.jsonl --limit 20 --max-new-tokens 128
"""

import argparse
import sys
from pathlib import Path

import torch

import lilicorr_hf
from lilicorr_hf.measure import encode
from lilicorr_hf.modeling.modeling_dflash import DFlashModel
from lilicorr_hf.pairs import load_assistant, load_target
from lilicorr_hf.training.conversations import read_jsonl


def batch_of(tokenizer, path: Path, limit: int) -> dict[str, torch.Tensor]:
    """The first turns of the prompts of a file, left-padded: `input_ids`, `attention_mask` `[b, n]`."""
    rows = [row for _, row in read_jsonl(path)][:limit]
    chats = [row.get("messages") or row.get("prompt") or row["turns"][0] for row in rows]
    ids = [encode(tokenizer, chat)["input_ids"][0].tolist() for chat in chats]
    return tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="JSONL of `messages`, `prompt` or `turns`.")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--assistant", default="smollm2-135m")
    parser.add_argument("--limit", type=int, default=20, help="Prompts of each file.")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args()
    target, tokenizer = load_target(args.target)
    walk = load_assistant(args.assistant, target)
    argmax = load_assistant(args.assistant, target, DFlashModel)
    for path in args.files:
        inputs = batch_of(tokenizer, path, args.limit)
        options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
        plain = target.generate(**inputs, **options)
        for name, assistant in (("walk", walk), ("argmax", argmax)):
            with lilicorr_hf.record() as recording:
                output = target.generate(**inputs, assistant_model=assistant, **options)
            same = sum(ours.equal(theirs) for ours, theirs in zip(output, plain, strict=True))
            result = f"{path.stem} {name}: tau {recording.tau:.3f}, {same} of {len(plain)} texts are the plain one\n"
            sys.stdout.write(result)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
