"use strict";
// What is said of a cell or a mark is its <title>; here it becomes its accessible name and is shown beside it.
const tip = document.getElementById("tip");
for (const title of document.querySelectorAll("svg g > title, svg circle > title, svg polygon > title, svg rect > title")) {
  const owner = title.parentElement;
  owner.setAttribute("aria-label", title.textContent);
  if (!owner.hasAttribute("role")) owner.setAttribute("role", "img");
  owner.classList.add("says");
  title.remove();
}
let shown = null;
function place() {
  if (!shown) return;
  const at = shown.getBoundingClientRect();
  const left = Math.min(Math.max(8, at.left + at.width / 2 - tip.offsetWidth / 2), innerWidth - tip.offsetWidth - 8);
  const above = at.top - tip.offsetHeight - 8;
  tip.style.left = left + "px";
  tip.style.top = (above > 4 ? above : at.bottom + 8) + "px";
}
function show(owner) {
  shown = owner;
  tip.hidden = !owner;
  if (!owner) return;
  tip.textContent = owner.getAttribute("aria-label");
  place();
}
document.addEventListener("pointerover", event => show(event.target.closest(".says") || document.activeElement.closest(".says")));
document.addEventListener("focusin", event => show(event.target.closest(".says")));
document.addEventListener("focusout", () => show(null));
document.addEventListener("scroll", place, { passive: true, capture: true });
document.addEventListener("keydown", event => { if (event.key === "Escape") show(null); });

// A map has one stop for the tab key; arrow keys go from unit to unit.
const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
for (const map of document.querySelectorAll(".map")) {
  const places = new Map();
  for (const cell of map.querySelectorAll(".cell")) places.set(cell.dataset.row + "." + cell.dataset.column, cell);
  map.addEventListener("keydown", event => {
    const cell = event.target.closest(".cell"), step = steps[event.key];
    if (!cell || !step) return;
    const next = places.get((+cell.dataset.row + step[0]) + "." + (+cell.dataset.column + step[1]));
    event.preventDefault();
    if (!next) return;
    cell.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  });
}

// The heading of a column sorts its table: numbers by size, the rest by letter.
function value(row, column) {
  const text = row.children[column].textContent.trim();
  const digits = text.replace(/−/g, "-").replace(/,/g, "").match(/^[-+]?[0-9]*\.?[0-9]+(e[-+]?[0-9]+)?/i);
  return digits ? parseFloat(digits[0]) : text === "∞" ? Infinity : text;
}
for (const button of document.querySelectorAll("table.sortable thead button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), body = button.closest("table").tBodies[0];
    const column = [...head.parentElement.children].indexOf(head);
    const descending = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const keyed = [...body.rows].map(row => [value(row, column), row]);
    keyed.sort(([a], [b]) => {
      const words = (typeof a === "string") - (typeof b === "string");
      if (words) return words;  // what is no number stays at the end, whichever way
      const order = typeof a === "string" ? a.localeCompare(b) : a - b;
      return descending ? -order : order;
    });
    body.append(...keyed.map(([, row]) => row));
  });
}

for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    const code = document.getElementById(button.dataset.copies);
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {  // a page that was opened from a file may not
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
  });
}
