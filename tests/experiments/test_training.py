"""Algorithm 1: the batched trainer against a plain loop, trials against each other, blow-ups."""

import dataclasses
import math

import pytest
import torch

from leancluster_core import (
    ClusteringTransformer,
    TaskDistribution,
    lloyd_step,
    smoothed_kmeans_loss,
)
from leancluster_core.experiments import Store, TrainingConfig, relative_loss, train, training
from leancluster_core.experiments.streams import PURPOSES, random_stream
from leancluster_core.experiments.sweep import dump_state, load_state
from leancluster_core.experiments.training import TASK_BLOCK, Trainer, batch_key

CONFIG = TrainingConfig(
    TaskDistribution(n_points=24, n_features=3, n_clusters=4),
    penalty=0.3,
    n_steps=36,
    batch_size=4,
    seeds=(11, 12, 13),
    n_validation_batches=2,
    evaluate_every=4,
    plateau_patience=1,
)


def trained(configs):
    trainer = Trainer(configs, "cpu")
    while not trainer.done:
        trainer.advance()
    return trainer.runs()


def plain_loop(config, seed):
    """One trial with torch's own optimiser and scheduler, the literal model, task by task."""
    model = ClusteringTransformer(
        config.task.n_features, config.task.n_clusters, embedding=config.embedding,
        bias=config.bias, backend="materialised",
        inverse_temperature=config.inverse_temperature,
        generator=random_stream(seed, "initialisation"),
    )  # fmt: skip
    optimiser = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimiser, factor=config.plateau_factor, patience=config.plateau_patience
    )
    validation = [
        config.task.sample((config.batch_size,), generator=random_stream(seed, "validation", i))
        for i in range(config.n_validation_batches)
    ]
    rows, losses = [], []
    for step in range(config.n_steps):
        block, index = divmod(step, TASK_BLOCK)
        points, centers = config.task.sample(
            (TASK_BLOCK, config.batch_size), generator=random_stream(seed, "training", block)
        )
        loss = torch.stack([
            smoothed_kmeans_loss(
                x, model(x, c), penalty=config.penalty, regularizer=config.regularizer
            )
            for x, c in zip(points[index], centers[index], strict=True)
        ]).mean()  # fmt: skip
        optimiser.zero_grad()
        loss.backward()
        if config.gradient_clipping is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.gradient_clipping)
        optimiser.step()
        losses.append(loss.item())
        if (step + 1) % config.evaluate_every == 0 or step + 1 == config.n_steps:
            with torch.no_grad():
                relative = torch.stack([
                    relative_loss(x, model(x, c), lloyd_step(x, c)) for x, c in validation
                ]).mean()  # fmt: skip
            rate = optimiser.param_groups[0]["lr"]
            rows.append((step + 1, sum(losses) / len(losses), relative.item(), rate))
            losses = []
            scheduler.step(relative)
    return model, rows


@pytest.mark.parametrize("change", [
    {}, {"regularizer": "entropy", "embedding": "onehot"}, {"embedding": "none", "bias": True},
    {"gradient_clipping": 0.05}, {"learning_rate": 0.03, "plateau_factor": 0.1, "n_steps": 30},
], ids=str)  # fmt: skip
def test_trainer_agrees_with_a_plain_loop(change):
    """In some of the settings the rate falls, in one the last evaluation is off the beat."""
    config = dataclasses.replace(CONFIG, **change)
    (run,) = trained([config])
    for trial, seed in enumerate(config.seeds[:2]):
        model, rows = plain_loop(config, seed)
        history = run.history[run.history.trial == trial]
        steps, training, relative, rates = zip(*rows, strict=True)
        assert history.step.tolist() == list(steps)
        torch.testing.assert_close(history.learning_rate.tolist(), list(rates))
        tolerance = {"rtol": 2e-3, "atol": 0}
        torch.testing.assert_close(history.training_loss.tolist(), list(training), **tolerance)
        torch.testing.assert_close(history.relative_loss.tolist(), list(relative), **tolerance)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(run.weights[name][trial], parameter, atol=3e-3, rtol=0)


def test_the_settings_of_the_comparison_make_the_rate_fall():
    """Or the comparison above would not have seen the plateau rule."""
    rates = trained([CONFIG])[0].history.learning_rate
    assert rates.nunique() >= 2


def test_a_trials_numbers_depend_on_its_seed_alone():
    """Together with other trials, and with other configs, or on its own."""
    others = [
        CONFIG,
        dataclasses.replace(CONFIG, regularizer="entropy"),
        dataclasses.replace(CONFIG, penalty=1.0, learning_rate=0.003),
    ]
    runs = trained(others)
    assert [run.config for run in runs] == others
    for run in runs:
        for trial, seed in enumerate(run.config.seeds):
            (alone,) = trained([dataclasses.replace(run.config, seeds=(seed,))])
            columns = ["step", "training_loss", "relative_loss", "learning_rate"]
            torch.testing.assert_close(
                torch.tensor(run.history[run.history.trial == trial][columns].to_numpy()),
                torch.tensor(alone.history[columns].to_numpy()), rtol=1e-4, atol=1e-6,
            )  # fmt: skip
            for name, weight in alone.weights.items():
                torch.testing.assert_close(run.weights[name][trial], weight[0], atol=1e-4, rtol=0)


def test_models_are_computed_in_groups_of_any_size(monkeypatch):
    """On a CPU they fit its cache; a group may straddle two configs."""
    configs = [CONFIG, dataclasses.replace(CONFIG, regularizer="entropy", penalty=1.0)]
    whole = trained(configs)
    width = 5
    for size, n_groups in ((1, 6), (2, 3), (4, 2)):
        entries = size * CONFIG.batch_size * CONFIG.task.n_points * width
        monkeypatch.setattr("leancluster_core.experiments.training.GROUP_ENTRIES", entries)
        assert len(Trainer(configs, "cpu")._groups) == n_groups
        for run, expected in zip(trained(configs), whole, strict=True):
            for name, weight in expected.weights.items():
                torch.testing.assert_close(run.weights[name], weight, atol=1e-4, rtol=0)


def test_training_twice_gives_the_same_bits():
    first, second = trained([CONFIG])[0], trained([CONFIG])[0]
    same = ["trial", "step", "training_loss", "relative_loss", "learning_rate"]
    assert first.history[same].equals(second.history[same])
    assert all(torch.equal(first.weights[n], second.weights[n]) for n in first.weights)


def test_training_lowers_the_relative_loss():
    config = dataclasses.replace(
        CONFIG, n_steps=150, evaluate_every=10, learning_rate=0.03, plateau_factor=1.0
    )
    relative = trained([config])[0].history.groupby("step").relative_loss.median()
    assert relative.iloc[-1] < 0.8 * relative.iloc[0]


@pytest.mark.parametrize("embedding", ["onehot", "binary", "none"])
def test_all_curves_of_a_trial_see_the_same_tasks(monkeypatch, embedding):
    seen = []
    original = TaskDistribution._sample

    def sample(task, shape, generator):
        result = original(task, shape, generator)
        seen.append(result)
        return result

    monkeypatch.setattr(TaskDistribution, "_sample", sample)
    trained([dataclasses.replace(CONFIG, n_steps=4)])
    ours = [seen.copy(), seen.clear()][0]
    trained([dataclasses.replace(CONFIG, n_steps=4, embedding=embedding, regularizer="entropy")])
    assert len(ours) == len(seen)
    for (points, centers), (same_points, same_centers) in zip(ours, seen, strict=True):
        assert torch.equal(points, same_points) and torch.equal(centers, same_centers)


def test_streams_differ_by_seed_purpose_and_index():
    streams = {
        tuple(torch.rand(2, generator=random_stream(seed, purpose, index)).tolist())
        for seed in (1, 2)
        for purpose in PURPOSES
        for index in range(3)
    }
    assert len(streams) == 2 * len(PURPOSES) * 3
    again = [torch.rand(2, generator=random_stream(1, "training", 2)) for _ in range(2)]
    assert torch.equal(*again)


def test_nothing_is_drawn_from_the_global_generator():
    before = torch.get_rng_state()
    (run,) = trained([dataclasses.replace(CONFIG, n_steps=4)])
    run.model(), run.model(0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_trial_that_blows_up_leaves_the_others_alone_and_is_stored_as_such():
    """The bits of the others do not change; its own loss is a NaN in the history."""
    clean, spoilt = Trainer([CONFIG], "cpu"), Trainer([CONFIG], "cpu")
    with torch.no_grad():
        spoilt.state.tensors["value"][1] = 1e30
    for trainer in (clean, spoilt):
        while not trainer.done:
            trainer.advance()
    (run,), (expected,) = spoilt.runs(), clean.runs()
    for trial in (0, 2):
        same = ["step", "training_loss", "relative_loss", "learning_rate"]
        assert (
            run.history[run.history.trial == trial][same]
            .equals(expected.history[expected.history.trial == trial][same])
        )  # fmt: skip
        for name, weight in expected.weights.items():
            assert torch.equal(run.weights[name][trial], weight[trial])
    lost = run.history[run.history.trial == 1]
    assert len(lost) == 9 and not torch.tensor(lost.training_loss.to_numpy()).isfinite().any()


def test_clipping_bounds_the_norm_of_each_model():
    trainer = Trainer([dataclasses.replace(CONFIG, gradient_clipping=0.5)], "cpu")
    gradients = {n: torch.ones_like(trainer.state.tensors[n]) for n in ("query", "key", "value")}
    gradients["query"][0] *= 1e-6
    gradients["key"][0] *= 1e-6
    gradients["value"][0] *= 1e-6
    expected = {n: g.clone() for n, g in gradients.items()}
    norm = torch.stack([g[1].square().sum() for g in gradients.values()]).sum().sqrt()
    trainer._adam(gradients)
    for name, gradient in expected.items():
        mean = trainer.state.tensors[f"{name}.mean"] / 0.1
        torch.testing.assert_close(mean[0], gradient[0], rtol=1e-5, atol=0)
        torch.testing.assert_close(mean[1], gradient[1] * 0.5 / norm, rtol=1e-4, atol=0)


def test_configs_of_one_batch_may_differ_in_the_loss_and_the_rate_only():
    for change in ({"penalty": 1.0}, {"regularizer": "entropy"}, {"learning_rate": 0.1}):
        assert batch_key(dataclasses.replace(CONFIG, **change)) == batch_key(CONFIG)
    for change in ({"embedding": "none"}, {"seeds": (1,)}, {"n_steps": 5}):
        other = dataclasses.replace(CONFIG, **change)
        with pytest.raises(ValueError, match="may differ only in regularizer, penalty, learning"):
            Trainer([CONFIG, other], "cpu")


def test_train_returns_a_run_that_says_how_it_was_made(capsys):
    run = train(dataclasses.replace(CONFIG, n_steps=4), device="cpu", progress=False)
    assert capsys.readouterr() == ("", "")
    assert run.history.elapsed.is_monotonic_increasing and (run.history.elapsed > 0).all()
    assert {"python", "torch", "numpy", "device", "threads", "commit"} <= set(run.provenance)
    assert run.history.trial.unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize("clipping", [None, 1.0])
def test_a_step_asks_the_device_for_no_value(monkeypatch, clipping):
    """A GPU would have to finish first. The meta device has no values, so asking is an error."""
    monkeypatch.setattr(training, "resolve_device", torch.device)
    config = dataclasses.replace(CONFIG, gradient_clipping=clipping)
    configs = [config, dataclasses.replace(config, regularizer="entropy")]
    trainer = Trainer(configs, "meta")
    trainer._step(torch.rand(3, 4, 3, 24, device="meta"), torch.rand(3, 4, 3, 4, device="meta"))
    with pytest.raises(RuntimeError, match="meta"):
        float(trainer.state.tensors["summed_loss"][0])


def test_a_state_from_the_disk_goes_to_the_device_with_its_history(tmp_path, monkeypatch):
    """Or the next rows of history, made on the device, could not be stacked on it."""
    monkeypatch.setattr(training, "resolve_device", torch.device)
    trainer, store = Trainer([CONFIG], "cpu"), Store(tmp_path)
    trainer.advance()
    store.save_checkpoint([CONFIG], *dump_state(trainer.state))
    state = load_state(store.checkpoint([CONFIG]), [CONFIG])
    assert len(state.history) == 2 and not any(rows.is_meta for rows in state.history)
    resumed = Trainer([CONFIG], "meta", state).state
    assert all(tensor.is_meta for tensor in [*resumed.tensors.values(), *resumed.history])


def test_elapsed_is_that_of_the_steps_on_a_device_that_works_behind(monkeypatch):
    """A GPU that needs 1 s a step, 100 s to draw a block, 1000 s to evaluate, all in the queue."""
    now = queued = 0

    def takes(seconds):
        def work(*arguments):
            nonlocal queued
            queued += seconds
            return torch.zeros(3, TASK_BLOCK), torch.zeros(3, TASK_BLOCK)

        return work

    def synchronise(device):
        nonlocal now, queued
        now, queued = now + queued, 0

    monkeypatch.setattr(training, "_draw", takes(100))
    monkeypatch.setattr(Trainer, "_step", takes(1))
    monkeypatch.setattr(Trainer, "_evaluate", takes(1000))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronise)
    monkeypatch.setattr(training.time, "perf_counter", lambda: now)
    trainer = Trainer([CONFIG], "cpu")
    trainer.device = torch.device("cuda")
    trainer.advance()
    assert trainer.state.elapsed == TASK_BLOCK
    trainer.advance()
    assert trainer.state.elapsed == 2 * TASK_BLOCK
    assert now > 2 * 100 + 4 * 1000


def test_unknown_devices_are_refused_by_name():
    for device in ("gpu", "meta"):
        with pytest.raises(ValueError, match="must be 'auto', 'cpu', 'cuda' or 'cuda:N', got"):
            train(CONFIG, device=device)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device must be 'auto' or 'cpu' on this machine"):
            train(CONFIG, device="cuda")


def test_a_trained_model_gives_the_relative_loss_of_the_history():
    run = train(CONFIG, device="cpu", progress=False)
    for trial, seed in enumerate(CONFIG.seeds):
        model = run.model(trial)
        ratios = []
        for index in range(CONFIG.n_validation_batches):
            stream = random_stream(seed, "validation", index)
            points, centers = CONFIG.task.sample((CONFIG.batch_size,), generator=stream)
            predicted = model(points, centers)
            ratios.append(relative_loss(points, predicted, lloyd_step(points, centers)))
        last = run.history[run.history.trial == trial].relative_loss.iloc[-1]
        assert math.isclose(torch.stack(ratios).mean(), last, rel_tol=1e-5)
