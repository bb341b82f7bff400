"""What to say when torch and its companions are installed in builds that do not load together."""

from __future__ import annotations

import re
from importlib import metadata

# In pip's one pass they fit (pyproject.toml). A later `pip install` of one of them, or torch from PyTorch's index for
# CPUs beside a torchvision from PyPI, leaves builds that do not.
_COMPANIONS = ("torch", "torchvision", "torchaudio")
_SIGNS = re.compile(r"torchvision|torchaudio|libtorch|libc10|libcudart|undefined symbol")


def misfit(error: BaseException) -> str | None:
    """A sentence for an error of an import that comes of builds that do not fit; None for any other error."""
    if not isinstance(error, ImportError | OSError | RuntimeError) or not _SIGNS.search(str(error)):
        return None
    cause = str(error).splitlines()[0]
    installed = ", ".join(f"{name} {_version(name)}" for name in _COMPANIONS)
    return (
        f"the installed {installed} do not load together ({cause}). Install them again in one command and from one "
        f"index, in versions of one row of the README's table: pip install --force-reinstall torch==... "
        f"torchvision==... torchaudio==...; or remove the other two, which megasnn itself does not need: "
        f"pip uninstall torchvision torchaudio"
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(none)"
