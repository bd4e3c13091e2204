"""Recorded episodes name their catalogue by its hash; here it is looked for among those that the site may open.

A file says what it was played in, and is not believed: no directory is opened because a file names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from webshop_env.errors import ShopGymError
from webshop_env.shop import Shop
from webshop_env.text_env import WebShopTextEnv

ENV_IDS = ("WebShop-v0", "WebShop-v1")
TAKEN_SETTINGS = frozenset(
    {"goals", "split_by", "preseed", "num_products", "limit_goals", "variant", "show_attrs", "page_size", "max_steps"}
)
"""Settings that make pages what they are; the others decide rewards and forms of observations."""


class Catalogues:
    """The embedded catalogue, and those that the site was started with.

    Args:
        directories: Of the latter.
    """

    def __init__(self, directories: Sequence[str]) -> None:
        self._directories: tuple[str | None, ...] = (None, *directories)

    def environment(self, env_id: str, settings: Mapping[str, Any], catalogue_hash: str) -> WebShopTextEnv:
        """An environment in which an episode goes as it went.

        Raises:
            ShopGymError: It is not one of the shop's, or its catalogue is not here.
        """
        if env_id not in ENV_IDS:
            raise ShopGymError(f"{env_id or 'the environment'} is no shop, so there is no page for people")
        taken = {name: value for name, value in settings.items() if name in TAKEN_SETTINGS}
        for directory in self._directories:
            place = {} if directory is None else {"data_dir": directory}
            try:
                env = WebShopTextEnv(version=env_id.removeprefix("WebShop-"), **taken, **place)
            except TypeError:  # what the file says is no setting's value
                raise ShopGymError("the file's settings are none of the shop's") from None
            if env.shop.catalogue_hash == catalogue_hash:
                return env
        raise ShopGymError(f"the catalogue {catalogue_hash[:12]} is not here: start the site with --data")

    def shop(self, env_id: str, settings: Mapping[str, Any], catalogue_hash: str) -> Shop | None:
        """The shop of an episode, None where it is not here."""
        try:
            return self.environment(env_id, settings, catalogue_hash).shop
        except ShopGymError:
            return None
