"""An interpreter that has every package of the running one except lilicorr_hf, as a stranger's machine has."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


def bare_python(folder: Path) -> Path:
    """Interpreter of a virtual environment in `folder` whose packages are links to those of the running one.

    Files that tell of an editable installation are left out, so neither the package nor the clone is found. Skips the
    test where there can be no links.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for place in map(Path, sys.path):
        if place.name not in ("site-packages", "dist-packages"):
            continue
        for entry in place.iterdir():
            link = packages / entry.name
            if "lilicorr" in entry.name or entry.suffix == ".pth" or link.exists():
                continue
            try:
                link.symlink_to(entry)
            except OSError as error:
                pytest.skip(f"needs symbolic links for an environment without the package: {error}")
    return python


def run_bare(python: Path, script: str, *arguments: object, home: Path, **settings: str) -> str:
    """Standard output of a script run there, offline, with an empty cache in `home`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING_FACE", "PYTHON"))}
    own = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | settings
    command = [python, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=kept | own, cwd=home, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
