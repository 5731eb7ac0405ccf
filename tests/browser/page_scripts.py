"""Scripts that the tests and the bench run in a page, to see what a user would see."""

from __future__ import annotations

OBSERVER = """
window.shifts = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shifts += entry.value;
}).observe({type: "layout-shift", buffered: true});
"""
"""Sums how far content moved without the user having done anything."""

SHOWN = """
window.shown = [];
const value = document.querySelector("[data-tile=step] .tile-value");
new MutationObserver(() => {
  window.shown.push([Date.now() / 1000, Number(value.textContent.split("/")[0].replaceAll(",", ""))]);
}).observe(value, {characterData: true, childList: true, subtree: true});
"""
"""Notes when a run's page shows which step."""
