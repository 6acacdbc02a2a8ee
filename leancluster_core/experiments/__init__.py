"""What the notebooks drive: configurations, training, the run store, evaluation and figures."""

from importlib import import_module

_HOMES = {
    "config": ["PAPER_SEEDS", "SCALES", "TrainingConfig"],
    "evaluation": ["multi_step", "relative_loss"],
    "store": ["Run", "Store"],
    "sweep": ["train_all"],
    "training": ["train"],
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
