"use strict";
// Sorting: a button in each heading; numbers by their full value, which cells carry in data-key.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const key = (row, column) => row.cells[column].dataset.key ?? row.cells[column].textContent.trim();
  const number = (text) => (text === "" ? NaN : Number(text.replaceAll(",", "")));
  heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...body.rows].map((row) => [key(row, column), row]).sort(([a], [b]) => {
      if ((a === "") !== (b === "")) return a === "" ? 1 : -1; // what is unknown comes last, either way
      const [x, y] = [number(a), number(b)];
      const order = Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, undefined, {numeric: true}) : x - y;
      return down ? -order : order;
    });
    body.append(...rows.map(([, row]) => row));
  }));
}
// Filters: choosing a group hides the tiles of other groups.
for (const select of document.querySelectorAll("select[data-filters]")) {
  const items = [...document.getElementById(select.dataset.filters).querySelectorAll("[data-group]")];
  const said = select.closest(".filter").querySelector("output");
  const show = () => {
    let shown = 0;
    for (const item of items) {
      item.hidden = select.value !== "" && item.dataset.group !== select.value;
      shown += !item.hidden;
    }
    said.textContent = `${shown} shown`;
  };
  select.addEventListener("change", show);
  show(); // a browser may have kept the choice of an earlier visit
}
// A block wider than the screen fades at the edge beyond which it continues.
for (const box of document.querySelectorAll(".scroll")) {
  const show = () => {
    box.classList.toggle("before", box.scrollLeft > 1);
    box.classList.toggle("after", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  };
  box.addEventListener("scroll", show, {passive: true});
  new ResizeObserver(show).observe(box);
}
for (const button of document.querySelectorAll("button[data-copies]")) {
  button.addEventListener("click", async () => {
    const text = document.getElementById(button.dataset.copies);
    getSelection().selectAllChildren(text); // if the clipboard is blocked, Ctrl-C copies it
    try {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Selected";
    }
  });
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => (one.open = true)));
