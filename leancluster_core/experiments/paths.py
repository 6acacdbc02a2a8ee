"""Where the project's files are, from wherever a notebook or a command is started."""

import os
from pathlib import Path

import leancluster_core


def project_root() -> Path:
    """The checkout that this package is part of; the current folder if it is installed alone."""
    root = Path(leancluster_core.__file__).resolve().parents[1]
    return root if (root / "pyproject.toml").is_file() else Path.cwd()


def results_root() -> Path:
    """Folder of runs, ``<scale>/<key>/`` in it: the project's ``results``, which is tracked.

    The environment variable LEANCLUSTER_RESULTS names another one: a larger disk, a trial.
    """
    elsewhere = os.environ.get("LEANCLUSTER_RESULTS")
    return Path(elsewhere).expanduser() if elsewhere else project_root() / "results"
