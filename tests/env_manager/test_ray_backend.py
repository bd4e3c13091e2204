"""What the Ray backend does where there is no Ray; with one, see tests/extras/test_ray.py."""

from __future__ import annotations

import sys

import pytest

from env_manager.ray_backend import RayVectorEnv
from webshop_env.errors import ShopGymError


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as the import system marks what cannot be imported
    with pytest.raises(ShopGymError, match=r"^env\.backend=ray needs Ray: pip install 'shopgym\[ray\]'$"):
        RayVectorEnv("webshop_env:WebShop-v1", 2)
