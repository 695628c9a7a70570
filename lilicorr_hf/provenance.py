"""What a number was made with: versions, commit, hardware, without the names of this machine's folders."""

import hashlib
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

from . import __version__


def without_folders(text: str) -> str:
    """The last name of an absolute path, also behind `--option=`; other text as it is."""
    option, equals, value = text.partition("=")
    if equals and option.startswith("--"):
        return f"{option}={without_folders(value)}"
    return Path(text).name if Path(text).is_absolute() else text


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "lilicorr_hf": __version__,
    }


def commit() -> str | None:
    """Of the clone this code runs from, with `-dirty` behind it if files differ; `None` for an installed package."""
    here = Path(__file__).resolve()
    git = shutil.which("git")
    if git is None:
        return None

    def ask(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run([git, "-C", str(here.parent), *words], capture_output=True, text=True)

    # A package installed below somebody's repository is none of its files.
    if ask("ls-files", "--error-unmatch", here.name).returncode:
        return None
    return ask("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").stdout.strip()


def hardware(device: torch.device, processes: int = 1) -> str:
    """Name of the accelerator or processor; never the machine's."""
    if device.type != "cuda":
        return f"{processor()}, threads: {processes * torch.get_num_threads()}"
    name = torch.cuda.get_device_name(device)
    return f"{processes} x {name}" if processes > 1 else name


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def made_with(device: torch.device) -> dict[str, Any]:
    """`versions`, `commit` and `hardware` of a measurement."""
    return {"versions": versions(), "commit": commit(), "hardware": hardware(device)}


def fingerprint(*paths: Path) -> str:
    """First 12 hexadecimal digits of the SHA-256 of files, one behind another."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
