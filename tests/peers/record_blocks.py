"""Blocks that nvidia-modelopt drafts with an assistant of ours, recorded for `tests/lilicorr_hf/test_smollm2.py`.

    python tests/peers/record_blocks.py RECORDING [--assistant NAME_OR_FOLDER] [--output FILE]

Takes the sequences and anchors of a recording and writes it anew with what the assistant's weights give there: its
states, candidates, scores and walk, all in fp32. modelopt computes them in an environment of its own.
"""

import argparse
import json
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

from safetensors import safe_open
from training_speed import HERE, Comparison, modelopt_python


def read_anchors(recording: Path) -> dict[str, list[int]]:
    """Anchor positions of each prompt.

    Raises:
        `FileNotFoundError`: if there is no such recording.
        `ValueError`: if it has no anchor.
    """
    anchors = defaultdict(list)
    with safe_open(recording, "pt") as file:
        for name in file.keys():
            if name.endswith(".candidate_ids"):
                prompt, anchor, _ = name.split(".")
                anchors[prompt].append(int(anchor.removeprefix("anchor")))
    if not anchors:
        raise ValueError(f"{recording} has no tensor PROMPT.anchorPOSITION.candidate_ids to take an anchor from.")
    return anchors


def record(recording: Path, output: Path, comparison: Comparison, python: Path) -> None:
    """Writes `output`, which may be `recording` itself, when all is computed.

    Args:
        recording (`Path`): `q.sequence_ids [length]`, `q.prompt_length` and the fields `q.anchor{a}.*` of prompts q.
        comparison (`Comparison`): names the pair, its dtype and the threads.
        python (`Path`): interpreter of [`modelopt_python`].
    """
    files = {"recording": str(recording), "output": str(output), "anchors": read_anchors(recording)}
    with tempfile.TemporaryDirectory() as name:
        settings = Path(name) / "settings.json"
        settings.write_text(json.dumps(comparison.modelopt_settings(Path(name)) | files))
        subprocess.run([python, HERE / "record_blocks_modelopt.py", settings], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recording", type=Path, help="safetensors file whose sequences and anchors are taken")
    parser.add_argument("--assistant", default="smollm2-135m", help="shipped assistant or a folder of one")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--output", type=Path, help="by default the recording is replaced")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--environment", type=Path, default=Path(".venv-modelopt"), help="made on first use")
    args = parser.parse_args()
    # Nothing is trained: only the pair's part of the settings is read.
    pair = Comparison(
        rows="", steps=0, target=args.target, assistant=args.assistant, dtype="float32", threads=args.threads
    )
    record(args.recording, args.output or args.recording, pair, modelopt_python(args.environment))


if __name__ == "__main__":
    main()
