// Pairs to drop: what is unticked becomes a table for ncm pairs --drop, to download or to copy.
for (const form of document.querySelectorAll("form.pairs")) {
  const button = form.querySelector("button"), text = form.querySelector("textarea");
  const cell = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
  const show = () => {
    const boxes = [...form.querySelectorAll("input")], out = boxes.filter((box) => !box.checked);
    const rows = [...form.querySelectorAll("span[data-a]"), ...out].map(({dataset: {a, b}}) => `${cell(a)},${cell(b)}\n`);
    text.value = `id_a,id_b\n${rows.join("")}`;
    button.disabled = out.length === 0;
    const left = boxes.length - out.length;
    form.querySelector("output").textContent = out.length ? `${out.length} dropped, ${left} of those shown kept.` : "All pairs are kept.";
    for (const box of boxes) box.closest("li").classList.toggle("out", !box.checked);
  };
  // Ticks are kept until the next visit, if the browser lets a file store anything.
  const key = `ncm pairs ${form.dataset.store}`;
  const pair = ({dataset: {a, b}}) => JSON.stringify([a, b]);
  try {
    const out = new Set(JSON.parse(localStorage.getItem(key)));
    for (const box of form.querySelectorAll("input")) box.checked = !out.has(pair(box));
  } catch { /* they begin as they are written */ }
  form.addEventListener("change", () => {
    show();
    try {
      localStorage.setItem(key, JSON.stringify([...form.querySelectorAll("input:not(:checked)")].map(pair)));
    } catch { /* nothing is kept */ }
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text.value], {type: "text/csv"}));
    link.download = "drop.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  show();
}
