"""The model: three backends agree, the construction is Lloyd's algorithm, bad input is refused."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.utils.parametrize import register_parametrization

from leancluster_core import ClusteringTransformer, TaskDistribution, embed, lloyd_transformer
from leancluster_core.embeddings import EMBEDDINGS
from leancluster_core.experiments import multi_step
from leancluster_core.models import BACKENDS


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def task(n=40, d=3, k=5, batch=(2,), seed=0):
    distribution = TaskDistribution(n_points=n, n_features=d, n_clusters=k)
    return distribution.sample(batch, generator=generator(seed))


def literal(model, points, centers):
    """Equation 4 written out token by token in float64, for one trial and one layer."""
    points_tokens, center_tokens = embed(points.double(), centers.double(), model.embedding)
    scale = model.inverse_temperature / math.sqrt(model.embedding_dim)

    def attend(index, queries, keys):
        def project(name, tokens):
            result = tokens @ getattr(model, name)[index].double().T
            bias = getattr(model, f"{name}_bias")
            return result if bias is None else result + bias[index].double()

        q, k, v = project("query", queries), project("key", keys), project("value", keys)
        distances = (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)
        return torch.softmax(-scale * distances, -1) @ v

    for _ in range(model.n_layers):
        updated = points_tokens + attend(0, points_tokens, center_tokens)
        updated = updated + attend(1, points_tokens, points_tokens)
        center_tokens = (
            center_tokens
            + attend(2, center_tokens, updated)
            + attend(3, center_tokens, center_tokens)
        )
        points_tokens = updated
    return center_tokens[..., : model.n_features]


@pytest.mark.parametrize("embedding", EMBEDDINGS)
@pytest.mark.parametrize("backend", ["absorbed", "fused", "materialised"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n_layers", [1, 3])
def test_backends_compute_equation_4(embedding, backend, bias, n_layers):
    points, centers = task()
    model = ClusteringTransformer(
        3, 5, embedding=embedding, bias=bias, n_layers=n_layers, backend=backend,
        generator=generator(1),
    )  # fmt: skip
    expected = literal(model, points, centers)
    torch.testing.assert_close(model(points, centers).double(), expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(model.double()(points, centers), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("backend", ["absorbed", "fused"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0, 20.0])
def test_gradients_equal_the_literal_ones(backend, bias, gamma):
    points, centers = (t.double() for t in task())
    model = ClusteringTransformer(
        3, 5, bias=bias, inverse_temperature=gamma, backend=backend, n_layers=2,
        generator=generator(1),
    ).double()  # fmt: skip
    points.requires_grad_()
    centers.requires_grad_()
    inputs = [points, centers, *model.parameters()]
    weights = torch.randn(2, 5, 3, generator=generator(2)).double()
    found = torch.autograd.grad((model(points, centers) * weights).sum(), inputs)
    expected = torch.autograd.grad((literal(model, points, centers) * weights).sum(), inputs)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("kept", [0, 2**24])
@pytest.mark.parametrize("n_features", [4, 40])
def test_blocks_do_not_change_the_result(monkeypatch, n_features, kept):
    points, centers = task(n=37, d=n_features, batch=(3,))
    model = ClusteringTransformer(n_features, 5, generator=generator(1))

    def gradient():
        (result,) = torch.autograd.grad(model(points, centers).square().sum(), model.query)
        return result

    whole = gradient()
    monkeypatch.setattr("leancluster_core.attention.KEPT_ENTRIES", kept)
    for entries in (1, 37, 37 * 5, 37 * 37 * 2):
        monkeypatch.setattr("leancluster_core.attention.BLOCK_ENTRIES", entries)
        torch.testing.assert_close(gradient(), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shapes", [((3, 3), (3,)), ((3,), (3, 3)), ((1,), (3, 5)), ((), (3,))])
def test_trials_must_lead_both_points_and_centers(shapes):
    """Else broadcasting would pair one tensor's trials with the other's tasks."""
    model = ClusteringTransformer(3, 5, n_trials=3)
    points, centers = torch.rand(*shapes[0], 20, 3), torch.rand(*shapes[1], 5, 3)
    with pytest.raises(ValueError, match="n_trials"):
        model(points, centers)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n_trials", [None, 2])
def test_no_tasks_give_no_centers(backend, n_trials):
    batch = (0,) if n_trials is None else (n_trials, 0)
    model = ClusteringTransformer(3, 5, n_trials=n_trials, backend=backend)
    assert model(torch.rand(*batch, 20, 3), torch.rand(*batch, 5, 3)).shape == (*batch, 5, 3)


def test_float64_inside_is_no_business_of_other_threads_or_hooks():
    points, centers = (t + 10 for t in task(n=200))
    model = ClusteringTransformer(3, 5, generator=generator(1))
    expected = model(points, centers)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: model(points, centers), range(40)):
            assert found.dtype == torch.float32 and torch.equal(found, expected)
    assert len(calls) == 40


class WithFeedForward(ClusteringTransformer):
    """A fork with a submodule."""

    def __init__(self, *sizes):
        super().__init__(*sizes, generator=generator(1))
        self.feed_forward = torch.nn.Linear(self.embedding_dim, self.embedding_dim)
        torch.nn.init.eye_(self.feed_forward.weight)
        torch.nn.init.zeros_(self.feed_forward.bias)

    def layer(self, points, centers, *, overwrite=False):
        points, centers = super().layer(points, centers, overwrite=overwrite)
        return points, self.feed_forward(centers.mT).mT


def test_forks_compute_in_float64_too():
    points, centers = (10 * t for t in task())
    model = ClusteringTransformer(3, 5, generator=generator(1))
    expected = model(points, centers)
    torch.testing.assert_close(WithFeedForward(3, 5)(points, centers), expected)
    register_parametrization(model, "query", torch.nn.Identity())
    torch.testing.assert_close(model(points, centers), expected)


def test_autocast_has_no_effect():
    points, centers = task()
    model = ClusteringTransformer(3, 5, generator=generator(1))
    with torch.autocast("cpu", torch.bfloat16):
        found = model(points, centers), multi_step(model, points, centers, 2)
    assert torch.equal(found[0], model(points, centers))
    assert torch.equal(found[1], multi_step(model, points, centers, 2))


def test_trials_are_independent_models():
    points, centers = task(batch=(4, 2))
    models = [ClusteringTransformer(3, 5, generator=generator(s)) for s in range(4)]
    together = ClusteringTransformer(3, 5, n_trials=4)
    stacked = {
        name: torch.stack([model.get_parameter(name) for model in models])
        for name, _ in models[0].named_parameters()
    }
    together.load_state_dict(stacked)
    expected = torch.stack([m(p, c) for m, p, c in zip(models, points, centers, strict=True)])
    torch.testing.assert_close(together(points, centers), expected)
    shared = together(points[:1], centers[:1])
    torch.testing.assert_close(shared[2], models[2](points[0], centers[0]))
    assert together.n_parameters == models[0].n_parameters


def test_one_blown_up_trial_leaves_the_others_alone():
    points, centers = task(batch=(2, 3))
    model = ClusteringTransformer(3, 5, n_trials=2, generator=generator(1))
    clean = model(points, centers)[1]
    with torch.no_grad():
        model.query[0] = math.nan
    result = model(points, centers)
    assert result[0].isnan().all()
    torch.testing.assert_close(result[1], clean)


@pytest.mark.parametrize("backend", ["absorbed", "fused", "materialised"])
def test_batch_dimensions_broadcast(backend):
    points, centers = task(batch=(2, 3))
    model = ClusteringTransformer(3, 5, n_layers=2, backend=backend, generator=generator(1))
    points, centers = points[:, :1], centers[:1]
    found = model(points, centers)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(found[i, j], model(points[i, 0], centers[0, j]))


@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_order_of_points_does_not_matter_and_of_centers_only_through_codes(embedding):
    points, centers = task(batch=())
    model = ClusteringTransformer(3, 5, embedding=embedding, generator=generator(1)).double()
    result = model(points, centers)
    shuffled = model(points[torch.randperm(40, generator=generator(3))], centers)
    torch.testing.assert_close(shuffled, result, atol=1e-12, rtol=1e-12)
    order = torch.tensor([2, 0, 1, 4, 3])
    permuted = model(points, centers[order])
    same = torch.allclose(permuted, result[order], atol=1e-12)
    assert same == (embedding == "none")


@pytest.mark.parametrize("n_features,n_clusters,embedding,width", [
    (4, 6, "binary", 7), (4, 6, "onehot", 10), (4, 6, "none", 4), (2, 1, "binary", 2),
    (2, 2, "binary", 3), (1, 5, "binary", 4), (8, 64, "binary", 14),
])  # fmt: skip
def test_parameter_count(n_features, n_clusters, embedding, width):
    model = ClusteringTransformer(n_features, n_clusters, embedding=embedding)
    assert model.embedding_dim == width
    assert model.n_parameters == 12 * width**2
    bound = 1 / math.sqrt(width)
    assert all(p.abs().max() <= bound for p in model.parameters())


def test_attention_maps_are_the_weights_that_were_used():
    points, centers = task(batch=(2,))
    for gamma in (1.0, math.inf):
        model = ClusteringTransformer(3, 5, inverse_temperature=gamma, generator=generator(1))
        model.requires_grad_(False)
        result, (maps,) = model(points, centers, return_attention=True)
        assert [tuple(m.shape) for m in maps] == [(2, 40, 5), (2, 40, 40), (2, 5, 40), (2, 5, 5)]
        for weights in maps:
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
        x, c = embed(points, centers, "binary")
        updated = x + maps[0] @ c @ model.value[0].T + maps[1] @ x @ model.value[1].T
        moved = c + maps[2] @ updated @ model.value[2].T + maps[3] @ c @ model.value[3].T
        torch.testing.assert_close(result, moved[..., :3], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("arguments,message", [
    ({"embedding": "one-hot"}, "embedding must be one of 'onehot', 'binary', 'none'"),
    ({"inverse_temperature": -1.0}, r"inverse_temperature must be in \[0, inf\], got -1"),
    ({"inverse_temperature": math.nan}, "inverse_temperature must be in"),
    ({"n_layers": 0}, r"n_layers must be in \[1, inf\), got 0"),
    ({"n_trials": 0}, "n_trials must be in"),
    ({"backend": "sdpa"}, "backend must be one of"),
])  # fmt: skip
def test_bad_settings_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        ClusteringTransformer(3, 5, **arguments)


def test_bad_input_is_refused_by_name():
    model = ClusteringTransformer(3, 5, generator=generator())
    points, centers = task(batch=())
    bad = points.clone()
    bad[7, 1] = math.nan
    with pytest.raises(ValueError, match=r"points must be finite, got nan at index \(7, 1\)"):
        model(bad, centers)
    with pytest.raises(ValueError, match="n_features must be 3, got 2"):
        model(points[:, :2], centers[:, :2])
    with pytest.raises(ValueError, match="n_clusters must be 5, got 4"):
        model(points, centers[:4])
    with pytest.raises(ValueError, match=r"n_clusters must be in \[1, n_points=4\], got 5"):
        model(points[:4], centers)
    with pytest.raises(ValueError, match="batch dimensions"):
        model(points.expand(2, -1, -1), centers.expand(3, -1, -1))
    with pytest.raises(ValueError, match="n_trials=2"):
        ClusteringTransformer(3, 5, n_trials=2)(points.expand(3, -1, -1), centers)
    with pytest.raises(TypeError, match=r"points must be a torch.Tensor, got numpy.ndarray"):
        model(points.numpy(), centers)


def test_any_real_dtype_and_layout_gives_the_same_answer():
    """S1.6: float64, integers and strided views against float32 parameters."""
    points, centers = task(batch=())
    model = ClusteringTransformer(3, 5, generator=generator())
    expected = model(points, centers)
    assert torch.equal(model(points.double(), centers.double()), expected)
    strided = torch.stack([points, points], 1)[:, 0].t().contiguous().t()
    assert torch.equal(model(strided, centers), expected)
    whole = (points * 10).long()
    assert torch.equal(model(whole, whole[:5]), model(whole.float(), whole[:5].float()))


def test_construction_refuses_no_codes():
    with pytest.raises(ValueError, match="embedding must be 'onehot' or 'binary'"):
        lloyd_transformer(3, 5, embedding="none")


def test_no_mode_changes_the_result():
    """S2.6: nothing is random at evaluation, by whatever route the parameters come in."""
    points, centers = task(batch=(3,))
    model = ClusteringTransformer(3, 5, generator=generator(1)).eval()
    expected = model(points, centers)
    assert torch.equal(model(points, centers), expected)
    assert torch.equal(model.train()(points, centers), expected)
    assert model.training
    parameters = dict(model.named_parameters())
    functional = torch.func.functional_call(model, parameters, (points, centers))
    assert torch.equal(functional, expected)
    # A grid of parameters (a loss surface) is a trial axis.
    grid = ClusteringTransformer(3, 5, n_trials=4)
    grid.load_state_dict({n: torch.stack([p, -p, 2 * p, p]) for n, p in parameters.items()})
    surface = grid(points[None], centers[None])
    torch.testing.assert_close(surface[0], expected)
    assert torch.equal(surface[0], surface[3])
