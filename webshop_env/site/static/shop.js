// Keys for people in a hurry: / to the search field, n and p to turn pages, b back to the search.
"use strict";
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea, select")) return;
  const field = document.getElementById("query");
  if (event.key === "/" && field) {
    event.preventDefault();
    field.focus();
    return;
  }
  const click = { n: "next >", p: "< prev", b: "back to search" }[event.key];
  if (!click) return;
  const button = [...document.querySelectorAll("button[data-click]:enabled")].find((b) => b.dataset.click === click);
  if (button) button.click();
});
