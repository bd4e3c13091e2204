"""What is refused before Ray has to wait for it; the runs themselves are in tests/extras."""

from __future__ import annotations

import pytest

from trainers.launch import launch_with_ray, ranks_of
from trainers.settings import SettingsError, resolve


def settings_of(*words: str):
    return resolve(list(words))[0]


@pytest.mark.parametrize(
    ("words", "resources", "expected"),
    [
        ((), {"CPU": 2.0}, (1, False)),
        (("trainer.n_gpus_per_node=2", "trainer.nnodes=2"), {"CPU": 2.0}, (4, False)),
        (("trainer.nnodes=2",), {"CPU": 64.0, "GPU": 16.0}, (16, True)),
        (("trainer.n_gpus_per_node=2",), {"CPU": 64.0, "GPU": 8.0}, (2, True)),
    ],
)
def test_ranks_are_those_asked_for_else_one_for_each_gpu(words, resources, expected):
    assert ranks_of(settings_of(*words), resources) == expected


@pytest.mark.parametrize(
    ("words", "resources", "complaint"),
    [
        (("trainer.n_gpus_per_node=5",), {"CPU": 2.0}, "5 ranks, the CPUs of this Ray cluster have room for 4"),
        (("trainer.n_gpus_per_node=8", "trainer.nnodes=2"), {"CPU": 64.0, "GPU": 8.0}, "16 ranks, the GPUs .* for 8"),
        (("trainer.nnodes=16",), {"CPU": 64.0, "GPU": 8.0}, "0 ranks"),
    ],
)
def test_ranks_that_the_cluster_has_no_place_for_are_refused(words, resources, complaint):
    with pytest.raises(SettingsError, match=complaint):
        ranks_of(settings_of(*words), resources)


def test_torchrun_and_ray_are_not_started_together(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SettingsError, match="plain python"):
        launch_with_ray(settings_of("trainer.launcher=ray"), [])
