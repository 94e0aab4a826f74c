// The map: a dot that is pointed at, tapped or reached by arrow keys shows its picture and words.
for (const map of document.querySelectorAll(".map")) {
  const rows = [...map.querySelectorAll("ul[hidden] > li")], picture = map.querySelector(".picture");
  const panels = [...map.querySelectorAll(".panels svg")].map((svg) => {
    const dots = [...svg.querySelectorAll(".dot")];
    return {svg, dots, at: dots.map((dot) => [dot.x.baseVal.value, dot.y.baseVal.value])};
  });
  const show = (index) => {
    const {id, said, src, why, crisp} = rows[index].dataset, box = document.createElement(src ? "img" : "span");
    if (src) Object.assign(box, {src, alt: "", className: crisp === undefined ? "" : "crisp"});
    else box.textContent = why;
    picture.replaceChildren(box);
    const name = document.createElement("code");
    name.textContent = id;
    map.querySelector(".card p").replaceChildren(name, said);
    for (const {svg, at} of panels) {
      svg.classList.add("chosen");
      const ring = svg.querySelector(".ring");
      [ring.cx.baseVal.value, ring.cy.baseVal.value] = at[index];
    }
  };
  for (const {svg, dots, at} of panels) {
    let current = 0;
    const go = (index, focus) => {
      dots[current].setAttribute("tabindex", "-1");
      dots[current = index].setAttribute("tabindex", "0");
      if (focus) dots[index].focus({preventScroll: true});
      show(index);
    };
    dots.forEach((dot, index) => {
      dot.setAttribute("tabindex", index ? "-1" : "0");
      dot.setAttribute("role", "img");
      dot.setAttribute("aria-label", `${rows[index].dataset.id}: ${rows[index].dataset.said}`);
      dot.addEventListener("focus", () => go(index));
    });
    // The dot next to the pointer; fingers are wider than a mouse's.
    const near = (event, reach) => {
      const {x, y} = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      const far = at.map(([left, top]) => Math.hypot(left - x, top - y)), index = far.indexOf(Math.min(...far));
      return far[index] < reach ? index : -1;
    };
    svg.addEventListener("pointermove", (event) => {
      const index = event.pointerType === "mouse" ? near(event, 12) : -1;
      if (index >= 0) show(index);
    });
    svg.addEventListener("click", (event) => {
      const index = near(event, 24);
      if (index >= 0) go(index, true);
    });
    const along = [0, 1].map((axis) => dots.map((_, index) => index).sort((a, b) => at[a][axis] - at[b][axis]));
    const keys = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, -1], ArrowDown: [1, 1]};
    svg.addEventListener("keydown", (event) => {
      const [axis, step] = keys[event.key] ?? [0, 0], order = along[axis];
      const next = order[event.key === "Home" ? 0 : event.key === "End" ? order.length - 1 : order.indexOf(current) + step];
      if (event.ctrlKey || event.altKey || event.metaKey || next === undefined || next === current) return;
      event.preventDefault();
      go(next, true);
    });
  }
}
