// Arrow keys go from step to step, the control that was clicked is marked, and the curve of a running training is live.
"use strict";
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea, select")) return;
  const link = document.getElementById({ ArrowLeft: "step-before", ArrowRight: "step-after" }[event.key] || "");
  if (link) link.click();
});

const form = document.querySelector("form[data-pick]");
if (form) {
  const picked = form.querySelector(`button[name="click"][value="${CSS.escape(form.dataset.pick)}"]`);
  if (picked) (picked.closest(".hit") || picked).setAttribute("data-picked", "");
}

const curve = document.querySelector("[data-curve]");
if (curve) {
  const again = async () => {
    if (document.visibilityState === "visible") {
      try {
        const answer = await fetch(curve.dataset.curve, { cache: "no-store" });
        if (answer.ok) curve.innerHTML = await answer.text(); // the site's own, escaped like the page itself
      } catch {
        // the site is away for the moment: the next try may find it
      }
    }
    setTimeout(again, 3000);
  };
  setTimeout(again, 3000);
}
