"""Relative loss (Equation 20) and multi-step rollouts (Appendices E and F)."""

from __future__ import annotations

import torch
from torch import Tensor

from leancluster_core.checks import check_flag, check_integer
from leancluster_core.losses import kmeans_loss
from leancluster_core.models import ClusteringTransformer


def relative_loss(points: Tensor, predicted: Tensor, lloyd_centers: Tensor) -> Tensor:
    """Relative loss (Equation 20): mean over tasks of L(X, predicted) / L(X, lloyd_centers).

    points: (..., tasks, n, d); predicted and lloyd_centers: (..., tasks, k, d), the latter after
    ONE Lloyd iteration from the same initial centers -> (...). Below 1 is better than Lloyd's step.
    A task that Lloyd solves with loss 0 gives inf, or NaN if the prediction does too.

    Raises ValueError for NaN or infinite entries and for shapes that don't match.
    """
    return (kmeans_loss(points, predicted) / kmeans_loss(points, lloyd_centers)).mean(-1)


@torch.no_grad()
def multi_step(
    model: ClusteringTransformer,
    points: Tensor,
    centers: Tensor,
    n_iterations: int,
    *,
    reembed: bool = True,
) -> Tensor:
    """Centers of every step of a rollout: (n_iterations + 1, ..., k, d), the initial ones first.

    points: (..., n, d), centers: (..., k, d) as the model takes them. With ``reembed`` the
    predicted centers start a new task each step (Figures 6 right, 7, 8, 12, 18); without, Equation
    4 is applied to the tokens again and again (Figure 6 left). A rollout that diverges goes on with
    what the arithmetic gives (inf, NaN): that is a result, shown as such.

    Raises ValueError as the model's forward does, TypeError or ValueError for n_iterations < 0.
    """
    n_iterations = check_integer("n_iterations", n_iterations, 0)
    check_flag("reembed", reembed)
    point_tokens, center_tokens = model.tokens(*model._checked(points, centers))
    tokens = point_tokens
    steps = []
    d = model.n_features
    for step in range(n_iterations + 1):
        for _ in range(model.n_layers if step else 0):
            tokens, center_tokens = model.layer(tokens, center_tokens)
        if reembed:
            tokens = point_tokens
            codes = model.codes.mT.expand(*center_tokens.shape[:-2], -1, -1)
            center_tokens = torch.cat([center_tokens[..., :d, :], codes], -2)
        steps.append(center_tokens[..., :d, :].mT)
    rollout = torch.stack(torch.broadcast_tensors(*steps))
    return rollout if model.n_trials is not None else rollout.squeeze(1)
