"""Where the project's files are, from wherever a notebook or a command is started."""

from pathlib import Path

import leancluster_core


def project_root() -> Path:
    """The checkout that this package is part of; the current folder if it is installed alone."""
    root = Path(leancluster_core.__file__).resolve().parents[1]
    return root if (root / "pyproject.toml").is_file() else Path.cwd()


def results_root() -> Path:
    """Folder of the run store that the project tracks: ``results/<scale>/<key>/``."""
    return project_root() / "results"
