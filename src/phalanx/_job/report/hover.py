"""This module is the script of a report's page: it shows a curve's values under the pointer, and enlarges parts.

The script is embedded in the page, and loads nothing. Without it the page has the same contents.
"""

SCRIPT = """
"use strict";
(() => {
  const svgNS = "http://www.w3.org/2000/svg";
  const place = ([low, high, from, to, isLog], at) => {
    const share = (at - low) / (high - low);
    return isLog ? from * (to / from) ** share : from + (to - from) * share;
  };
  const number = value => {
    const size = Math.abs(value);
    return size >= 1e6 || (size > 0 && size < 1e-3) ? value.toExponential(2)
      : size >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  };
  const clock = s => s < 60 ? `${s.toFixed(1)} s`
    : `${Math.floor(s / 60)}:${String(Math.floor(s % 60)).padStart(2, "0")} min`;
  const add = (svg, kind, attributes) => {
    const made = svg.appendChild(document.createElementNS(svgNS, kind));
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };
  for (const svg of document.querySelectorAll("svg[data-scale]")) {
    const {x, y} = JSON.parse(svg.dataset.scale);
    const curves = [...svg.querySelectorAll("[data-name]")].map(line => ({
      line, all: line.getAttribute("points").split(" ").map(pair => pair.split(",").map(Number))}));
    if (!curves.length) continue;
    const dot = add(svg, "circle", {r: 4, fill: "var(--ink)", visibility: "hidden"});
    const told = add(svg, "text", {"font-size": 12, "font-weight": 600, fill: "var(--ink)", y: 26, class: "told"});
    const band = add(svg, "rect", {y: y[1], height: y[0] - y[1], fill: "var(--data)", opacity: 0.25, width: 0});
    const ends = [add(svg, "text", {"font-size": 12, fill: "var(--ink)", y: y[0] - 4, "text-anchor": "start"}),
      add(svg, "text", {"font-size": 12, fill: "var(--ink)", y: y[0] - 4, "text-anchor": "end"})];
    let shown = [x[0], x[1]], began = null;
    const toPicture = event => {
      const box = svg.getBoundingClientRect();
      const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      return Math.min(x[1], Math.max(x[0], at));
    };
    const unzoomed = at => shown[0] + (at - x[0]) / (x[1] - x[0]) * (shown[1] - shown[0]);
    const zoomed = at => x[0] + (at - shown[0]) / (shown[1] - shown[0]) * (x[1] - x[0]);
    const sayX = at => {
      const value = place(x, at);
      return x[5] === "time" ? clock(value) : `${x[5]} ${number(value)}`;
    };
    const draw = () => {
      for (const {line, all} of curves) {
        const inside = all.filter(([at]) => at >= shown[0] && at <= shown[1]);
        line.setAttribute("points", inside.map(([at, up]) => `${zoomed(at).toFixed(1)},${up}`).join(" "));
      }
      const isPart = shown[0] > x[0] || shown[1] < x[1];
      ends.forEach((text, i) => { text.setAttribute("x", x[i]); text.textContent = isPart ? sayX(shown[i]) : ""; });
    };
    svg.addEventListener("pointermove", event => {
      const at = toPicture(event);
      if (began !== null) {
        band.setAttribute("x", Math.min(began, at)); band.setAttribute("width", Math.abs(at - began));
      }
      const wanted = unzoomed(at), height = svg.viewBox.baseVal.height, box = svg.getBoundingClientRect();
      const up = (event.clientY - box.top) / box.height * height;
      let best = null;
      for (const {line, all} of curves) for (const point of all) {
        if (point[0] < shown[0] || point[0] > shown[1]) continue;
        const far = Math.abs(point[0] - wanted) * 1000 + Math.abs(point[1] - up);
        if (best === null || far < best.far) best = {far, point, line};
      }
      if (best === null) return;
      const cx = zoomed(best.point[0]);
      dot.setAttribute("cx", cx); dot.setAttribute("cy", best.point[1]); dot.setAttribute("visibility", "visible");
      const name = best.line.dataset.name ? `${best.line.dataset.name}: ` : "";
      told.textContent = `${name}${number(place(y, best.point[1]))} ${y[5]}, ${sayX(best.point[0])}`;
      told.setAttribute("x", x[1]); told.setAttribute("text-anchor", "end"); told.setAttribute("y", y[1] - 4);
    });
    svg.addEventListener("pointerleave", () => {
      dot.setAttribute("visibility", "hidden"); told.textContent = ""; band.setAttribute("width", 0); began = null;
    });
    svg.addEventListener("pointerdown", event => { began = toPicture(event); event.preventDefault(); });
    svg.addEventListener("pointerup", event => {
      const at = toPicture(event), from = began;
      band.setAttribute("width", 0); began = null;
      if (from === null || Math.abs(at - from) < 8) return;
      shown = [unzoomed(Math.min(from, at)), unzoomed(Math.max(from, at))];
      draw();
    });
    svg.addEventListener("dblclick", () => { shown = [x[0], x[1]]; draw(); });
  }
})();
"""
