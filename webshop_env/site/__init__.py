"""The shop in a browser, a viewer of recorded episodes, and the environment that drives a real Chromium.

`python -m webshop_env.site` serves the first two (extra `site`); `gymnasium.make("webshop_env:WebShopSite-v0")` is the
third (extra `browser`).
"""
