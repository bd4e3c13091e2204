"""The pages of a recorded episode as people see them: played again, and compared with what was recorded."""

from __future__ import annotations

from dataclasses import dataclass

from webshop_env.errors import ShopGymError
from webshop_env.pages import SEP, Page
from webshop_env.shop import Shop
from webshop_env.site.catalogues import Catalogues
from webshop_env.site.recorded import ShownEpisode

GOAL_OPTIONS = ("goal_index", "goal_id", "session")


@dataclass(frozen=True, slots=True)
class Replay:
    """What playing again gave."""

    pages: tuple[Page, ...]
    """One more than steps; empty where it could not be played."""
    shop: Shop | None
    instruction: str
    problem: str
    """Why there are no pages, or that they are not those of the record."""


def replay(episode: ShownEpisode, catalogues: Catalogues) -> Replay:
    """Plays an episode's actions in the shop that it names, if that is here."""
    world = episode.world
    try:
        env = catalogues.environment(world.env_id, world.settings, world.catalogue_hash)
        options = {name: value for name, value in episode.reset_options.items() if name in GOAL_OPTIONS}
        _, info = env.reset(seed=episode.seed, options=options)
    except ShopGymError as error:
        return Replay((), None, "", str(error))
    pages, is_same = [env.page], True
    for step in episode.steps:
        is_same = is_same and _is_page_of(step.page, env.page, info["instruction_text"])
        env.step(step.action)
        pages.append(env.page)
    problem = "" if is_same else "played again, the episode leads to other pages than those of the record"
    return Replay(tuple(pages), env.shop, info["instruction_text"], problem)


def _is_page_of(recorded: str, page: Page, instruction: str) -> bool:
    """Whether a page is the one that was recorded: as an observation in any form, or as an anchor.

    An anchor is the page's segments after the instruction, each in single quotes, or the whole page.
    """
    if recorded in (page.text, page.text_rich, page.html, page.url):
        return True
    segments = page.text.split(SEP)
    if instruction.strip() in segments:
        segments = segments[segments.index(instruction.strip()) + 1 :]
    if recorded == SEP.join(f"'{segment}'" for segment in segments):
        return True
    return recorded.endswith(SEP + page.text)  # with earlier observations before it
