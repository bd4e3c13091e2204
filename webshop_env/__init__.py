"""WebShop as registered Gymnasium environments: `gymnasium.make("webshop_env:WebShop-v1")`."""

from __future__ import annotations

import gymnasium

from webshop_env.errors import CatalogError, ShopGymError
from webshop_env.shop import Shop, open_shop
from webshop_env.text_env import WebShopTextEnv
from webshop_env.types import Goal, Product, Session
from webshop_env.vector_env import WebShopVectorEnv

__all__ = [
    "CatalogError",
    "Goal",
    "Product",
    "Session",
    "Shop",
    "ShopGymError",
    "WebShopTextEnv",
    "WebShopVectorEnv",
    "open_shop",
]

__version__ = "0.1.0"

for _version in ("v0", "v1"):
    gymnasium.register(
        id=f"WebShop-{_version}",
        entry_point="webshop_env.text_env:WebShopTextEnv",
        vector_entry_point="webshop_env.vector_env:WebShopVectorEnv",
        kwargs={"version": _version},
    )
gymnasium.register(id="WebShopSite-v0", entry_point="webshop_env.site.browser_env:WebShopSiteEnv")
