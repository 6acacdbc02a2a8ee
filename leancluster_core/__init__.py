"""Lean clustering transformers: the models, losses, samplers and measurements of the paper
"Leaner Transformers Can Easily Learn to Cluster".

The paper stores tokens as the columns of a matrix; this package takes and returns tokens as rows,
points (..., n, d) and centers (..., k, d), as torch does.

Importing the package is cheap: torch is loaded when a name is first used.
"""

from importlib import import_module

_HOMES = {
    "attention": ["distance_attention"],
    "distances": ["nearest_centers", "squared_distances"],
    "embeddings": ["cluster_codes", "embed"],
    "kmeans": ["lloyd", "lloyd_step"],
    "losses": ["kmeans_loss", "min_weights", "smoothed_kmeans_loss", "sparsemax"],
    "models": ["ClusteringTransformer", "lloyd_transformer"],
    "samplers": ["TaskDistribution", "rescale_to_unit_cube"],
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_MODULE_OF)
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
