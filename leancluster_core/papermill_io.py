"""Teaches the ``papermill`` command to read jupytext ``.py`` notebooks, however the path is typed.

papermill picks a reader by the start of a path, never by its ending, and its own reader of local
files always wins. So this wraps that reader when papermill loads the entry point of pyproject.toml.
papermill.iorw is half imported then: only what it defines before that moment may be used here. This
is imported at every start of papermill: keep it light.
"""

import warnings

handler = None  # papermill wants an object under the entry point's name; no path ever asks for it

from papermill import iorw  # noqa: E402 - may load this very module, which needs its handler then

_read_local = iorw.LocalHandler.read


def _read(self: iorw.LocalHandler, path: str) -> str:
    if not str(path).endswith(".py"):
        return _read_local(self, path)
    import jupytext

    with iorw.chdir(self._cwd):
        return jupytext.writes(jupytext.read(path), fmt="ipynb")


iorw.LocalHandler.read = _read
warnings.filterwarnings("ignore", message=r"The specified file \(.*\.py\) does not end in one of")
