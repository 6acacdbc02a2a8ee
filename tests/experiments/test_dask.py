"""The optional cluster engine: Dask with two worker processes, one of them killed midway."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from leancluster_core import TaskDistribution
from leancluster_core.experiments import Store, TrainingConfig, train_all
from leancluster_core.experiments.sweep import missing

distributed = pytest.importorskip("distributed")

TASK = TaskDistribution(n_points=12, n_features=2, n_clusters=3)
CONFIGS = [
    TrainingConfig(
        TASK, embedding=embedding, n_steps=n_steps, batch_size=2, seeds=(1, 2),
        n_validation_batches=1, evaluate_every=50,
    )
    for embedding in ("onehot", "binary", "none") for n_steps in (200, 150)
]  # fmt: skip

# Workers that save a checkpoint after each block, and that take long enough to be killed.
SLOWLY = """
import time
from leancluster_core.experiments import sweep
from leancluster_core.experiments.training import Trainer
sweep.CHECKPOINT_SECONDS = 0.0
advance = Trainer.advance
def slowly(trainer):
    advance(trainer)
    time.sleep(0.05)
Trainer.advance = slowly
"""


def test_all_runs_arrive_though_a_worker_is_killed(tmp_path):
    store, here = Store(tmp_path / "there"), Store(tmp_path / "here")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50
        ) as cluster,
        distributed.Client(cluster) as client,
        ThreadPoolExecutor(1) as background,
    ):
        client.run(exec, SLOWLY, {})
        result = background.submit(
            train_all, CONFIGS, store=store, executor=client.get_executor(), device="cpu",
            progress=False,
        )  # fmt: skip
        end = time.monotonic() + 60
        # Both workers have begun, neither is done.
        while sum(store.find_checkpoint(config) is not None for config in CONFIGS) < 2:
            assert time.monotonic() < end and not result.done()
            time.sleep(0.01)
        os.kill(cluster.workers[0].pid, signal.SIGKILL)
        unfinished = missing(CONFIGS, store)
        runs = result.result(120)
    assert len(unfinished) > 4  # it was killed midway
    assert [run.config for run in runs] == CONFIGS
    for run, config in zip(runs, CONFIGS, strict=True):
        (alone,) = train_all([config], store=here, device="cpu", progress=False)
        assert all(torch.equal(run.weights[name], alone.weights[name]) for name in alone.weights)
