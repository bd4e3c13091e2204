"""The space of texts."""

from __future__ import annotations

import gymnasium
import pytest
from gymnasium.wrappers import DelayObservation, FrameStackObservation

from webshop_env.actions import parse_v1
from webshop_env.spaces import TextSpace


def test_it_contains_any_text_up_to_its_length_and_nothing_else():
    space = TextSpace(5)
    assert space.contains("") and space.contains("é🙂\ud800[]") and not space.contains("123456")
    assert not space.contains(5) and not space.contains(None) and not space.contains(b"abc")


def test_samples_are_actions_and_the_seed_decides_them():
    space, twin = TextSpace(seed=3), TextSpace(seed=3)
    samples = [space.sample() for _ in range(50)]
    assert samples == [twin.sample() for _ in range(50)]
    assert {parse_v1(text).kind for text in samples} == {"search", "click"}
    assert len(set(samples)) > 10 and all(space.contains(text) for text in samples)


def test_spaces_are_equal_by_length():
    assert TextSpace(5) == TextSpace(5, seed=1) != TextSpace(6)
    with pytest.raises(ValueError, match="max_chars must be at least 1"):
        TextSpace(0)


def test_gymnasiums_wrappers_put_an_empty_text_where_there_is_none_yet():
    stacked = FrameStackObservation(gymnasium.make("webshop_env:WebShop-v1"), 3, padding_type="zero")
    page, _ = stacked.reset(seed=1)
    assert page[:2] == ("", "") and page[2].startswith("WebShop") and stacked.observation_space.contains(page)
    delayed = DelayObservation(gymnasium.make("webshop_env:WebShop-v1"), 1)
    assert delayed.reset(seed=1)[0] == ""
    assert delayed.step("search[mug]")[0] == page[2]
