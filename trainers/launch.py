"""Ranks in Ray's workers (`trainer.launcher=ray`): the same run as under torchrun, started by one command.

Ray Train's TorchTrainer places the ranks, on many machines where RAY_ADDRESS names a cluster, and makes their process
group. It neither restarts ranks nor keeps checkpoints here: those are the run's own, in its directory, which all
machines must see.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from trainers.errors import TrainingError
from trainers.interrupts import SignalNotes
from trainers.settings import Settings, SettingsError
from webshop_env.errors import ShopGymError

CPUS_PER_RANK = 0.5
"""Ray's share of a core for a rank without a GPU; less than one leaves room for env.backend=ray on small machines."""
OBJECT_STORE_BYTES = 200_000_000
"""Of a Ray that is started here; ranks speak through their process group, not through it."""


def launch_with_ray(settings: Settings, notes: list[str]) -> None:
    """Runs the training on Ray's workers, to its end; SIGTERM and Ctrl-C here are the ranks' (`interrupts.py`).

    What stops this process ends them too.

    Raises:
        SettingsError: Ray Train is not installed, or the cluster has no place for the ranks.
        ShopGymError: A rank found a mistake in the settings.
        TrainingError: A rank was lost, or the run could not go on.
    """
    if "RANK" in os.environ:
        raise SettingsError("trainer.launcher=ray starts the ranks itself: run it with plain python, not with torchrun")
    try:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError:
        raise SettingsError("trainer.launcher=ray needs Ray Train: pip install 'shopgym[ray]'") from None
    with _cluster(ray), tempfile.TemporaryDirectory(prefix="shopgym-ray-") as scratch:
        num_ranks, use_gpu = ranks_of(settings, ray.cluster_resources())
        mailbox: Any = ray.remote(num_cpus=0)(Mailbox)
        mailbox = mailbox.remote()
        trainer = TorchTrainer(
            _work,
            train_loop_config={"settings": settings, "notes": notes, "directory": os.getcwd(), "mailbox": mailbox},
            torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=num_ranks,
                use_gpu=use_gpu,
                resources_per_worker={"GPU": 1} if use_gpu else {"CPU": CPUS_PER_RANK},
            ),
            run_config=RunConfig(name="run", storage_path=scratch, failure_config=FailureConfig(max_failures=0)),
        )
        _fit(trainer, lambda: ray.get(mailbox.take.remote()), lambda: ray.get(mailbox.ask_to_end.remote()))


def ranks_of(settings: Settings, resources: dict[str, float]) -> tuple[int, bool]:
    """How many ranks the settings ask for, and whether each gets a GPU.

    Raises:
        SettingsError: The cluster has no place for them: Ray would wait for it without an end.
    """
    trainer, num_gpus = settings.trainer, int(resources.get("GPU", 0))
    use_gpu = num_gpus > 0
    per_node = trainer.n_gpus_per_node or (num_gpus // trainer.nnodes if use_gpu else 1)
    num_ranks = per_node * trainer.nnodes
    room = num_gpus if use_gpu else int(resources.get("CPU", 0) / CPUS_PER_RANK)
    if not 0 < num_ranks <= room:
        raise SettingsError(
            f"trainer.n_gpus_per_node={per_node} and trainer.nnodes={trainer.nnodes} ask for {num_ranks} ranks, the "
            f"{'GPUs' if use_gpu else 'CPUs'} of this Ray cluster have room for {room}"
        )
    return num_ranks, use_gpu


@contextmanager
def _cluster(ray: Any) -> Iterator[None]:
    """The cluster of RAY_ADDRESS, else a small Ray of our own; SIGTERM stops its start as Ctrl-C does."""
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # paths of settings are relative to where the user is
    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # ranks are the work itself: as urgent as under torchrun
    # Without its dashboard Ray Train complains every few seconds; what the first rank says comes by the mailbox.
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if os.environ.get("RAY_ADDRESS"):
            ray.init(**quiet)
        else:
            ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
        yield
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, before)


class Mailbox:
    """An actor between the ranks and the command that started them: what the first one prints, and the wish to end."""

    def __init__(self) -> None:
        self._texts: list[tuple[bool, str]] = []
        self._is_asked_to_end = False

    def put(self, is_error: bool, text: str) -> None:
        """Takes a text for stderr or stdout."""
        self._texts.append((is_error, text))

    def take(self) -> list[tuple[bool, str]]:
        """Hands over what came since the last time, in order."""
        texts, self._texts = self._texts, []
        return texts

    def ask_to_end(self) -> None:
        """Notes the wish."""
        self._is_asked_to_end = True

    def is_asked_to_end(self) -> bool:
        """Whether somebody wants the run to end after the update at hand."""
        return self._is_asked_to_end


class _Voice(io.TextIOBase):
    """Stdout or stderr of the first rank."""

    def __init__(self, mailbox: Any, *, is_error: bool) -> None:
        self._mailbox, self._is_error, self._sent = mailbox, is_error, None

    def write(self, text: str) -> int:
        self._sent = self._mailbox.put.remote(self._is_error, text)
        return len(text)

    def wait(self) -> None:
        """Until all that was written has arrived."""
        if self._sent is not None:
            import ray

            ray.get(self._sent)


def _fit(trainer: Any, take: Callable[[], list[tuple[bool, str]]], ask_to_end: Callable[[], None]) -> None:
    """Waits for the end of the training, in a way that Ctrl-C interrupts: in the main thread Ray would catch it."""
    failures: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=fit, daemon=True)
    with SignalNotes() as signals:
        thread.start()
        has_asked = is_last = False
        while not is_last:
            is_last = not thread.is_alive()
            for is_error, text in take():
                print(text, end="", flush=True, file=sys.stderr if is_error else sys.stdout)
            if signals.is_noted and not has_asked:
                ask_to_end()
                has_asked = True
            thread.join(timeout=0.5)
    if failures:
        raise _cause(failures[0])


def _cause(error: BaseException) -> BaseException:
    """What went wrong on a rank, as it would have been said without Ray; unforeseen errors with Ray's traceback."""
    import ray

    failed: dict[int, BaseException] = dict(sorted(getattr(error, "worker_failures", {}).items()))
    for cause in failed.values():
        if isinstance(cause, ShopGymError | TrainingError | PermissionError):
            return cause
    for rank, cause in failed.items():
        if isinstance(cause, ray.exceptions.RayError) or type(cause).__module__.startswith("ray."):
            why = " ".join(str(cause).split())[:300]
            return TrainingError(f"rank {rank} was lost ({why}); go on with trainer.resume_from=RUN_DIRECTORY")
    return error


def _work(config: dict[str, Any]) -> None:
    """What each worker does, as one rank of the process group that Ray has made."""
    os.chdir(config["directory"])
    import ray

    from trainers.gigpo_fsdp import train_on_ranks

    mailbox = config["mailbox"]
    train = partial(
        train_on_ranks, config["settings"], config["notes"], lambda: ray.get(mailbox.is_asked_to_end.remote())
    )
    if os.environ["RANK"] != "0":
        return train()
    voices = [_Voice(mailbox, is_error=is_error) for is_error in (False, True)]
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = voices
    try:
        train()
    finally:
        sys.stdout, sys.stderr = before
        for voice in voices:
            voice.wait()
