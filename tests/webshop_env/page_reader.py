"""A reader of pages that knows only HTML: it is how tests check the markup without the code that wrote it."""

from __future__ import annotations

from html.parser import HTMLParser

from webshop_env.pages import Page


class PageReader(HTMLParser):
    """Visible texts of a page, and what can be clicked or filled in."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.texts: list[str] = []
        self.buttons: list[str] = []
        self.options: list[str] = []
        self.checked: list[str] = []
        self.has_search_bar = False
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "input" and values.get("type") == "radio":
            self.options.append(values["value"] or "")
            if "checked" in values:
                self.checked.append(values["value"] or "")
        elif tag == "input":
            self.has_search_bar = True
        elif tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "head" in self._open or (not data.strip(" \n\t\r\f") and "\n" in data):
            return
        self.texts.append(data.strip())
        if self._open[-1] in ("button", "a"):
            self.buttons.append(data)

    def actions(self, version: str) -> list[str]:
        """The available actions, from the markup alone."""
        buttons, options = [text.lower() for text in self.buttons], self.options
        if version == "v1":
            buttons = [" ".join(text.split()) for text in buttons if text != "search"]
            options = [" ".join(text.split()).lower() for text in options]
        clicks = [f"click[{text}]" for text in dict.fromkeys(buttons + options)]
        return (["search[<your query>]"] if self.has_search_bar else []) + clicks


def read(page: Page) -> PageReader:
    reader = PageReader()
    reader.feed(page.html)
    reader.close()
    return reader
