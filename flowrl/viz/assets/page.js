"use strict";
// Everything here is comfort: the page says the same without it. Texts only ever enter through textContent.
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (name, words, attributes = {}) => {
    const element = document.createElement(name);
    element.textContent = words;
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };

  for (const note of all("[data-since]")) {
    const days = Math.floor((Date.now() - Date.parse(note.dataset.since)) / 864e5);
    if (days >= 0) note.append(`; ${days} day${days === 1 ? "" : "s"} ago`);
  }

  // ---- tips: the <title> of a mark becomes its label for screen readers and the text of one shared box
  const tip = make("div", "", { id: "tip", hidden: "", role: "status" });
  document.body.append(tip);
  const words = new WeakMap();
  for (const title of all("svg g > title")) {
    const mark = title.parentNode;
    words.set(mark, title.textContent);
    mark.setAttribute("aria-label", title.textContent);
    title.remove();
  }
  const markOf = (node) => {
    for (let at = node; at && at !== document; at = at.parentNode) if (words.has(at)) return at;
    return null;
  };
  const showTip = (mark, x, y) => {
    tip.textContent = words.get(mark);
    tip.hidden = false;
    tip.style.left = "8px"; // else the place where it was makes it narrow
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(8, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
    tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(8, y - box.height - 12) : y + 18) + "px";
  };

  // ---- the same step, edge or role in all pictures and tables
  const light = (mark) => {
    for (const one of all(".lit")) one.classList.remove("lit");
    const near = mark && mark.closest("[data-k],[data-edge]");
    if (!near) return;
    const edge = near.getAttribute("data-edge");
    const steps = (near.getAttribute("data-k") || "").split(" ").filter(Boolean);
    for (const one of all("[data-k],[data-edge]")) {
      const mine = (one.getAttribute("data-k") || "").split(" ");
      const same = edge !== null && one.getAttribute("data-edge") === edge;
      if (same || steps.some((step) => mine.includes(step))) one.classList.add("lit");
    }
  };
  let pinned = null;
  addEventListener("pointermove", (event) => {
    const mark = markOf(event.target);
    if (mark) showTip(mark, event.clientX, event.clientY);
    else tip.hidden = true;
    if (!pinned) light(mark || event.target.closest?.("[data-k],[data-edge]"));
  });
  addEventListener("click", (event) => {
    const mark = markOf(event.target);
    if (!mark || !mark.matches(".edge,.edgelabel,.bar,.point")) return;
    pinned = pinned === mark ? null : mark;
    light(mark);
    const edge = mark.getAttribute("data-edge");
    const row = pinned && edge !== null && document.querySelector(`tr[data-edge="${edge}"]`);
    if (row) {
      row.closest("details").open = true;
      row.scrollIntoView({ block: "center" });
    }
  });
  addEventListener("focusin", (event) => {
    const mark = markOf(event.target);
    if (!mark || !event.target.matches(":focus-visible")) return;
    const box = mark.getBoundingClientRect();
    showTip(mark, box.left, box.bottom - 12);
    light(mark);
  });
  addEventListener("focusout", () => { tip.hidden = true; });

  // ---- time: all pictures with the same axis are stretched together
  const NS = 6.5; // pixels of a letter, as the drawing reckoned
  const plots = all("svg[data-most]").map((svg) => {
    const [, , width] = svg.getAttribute("viewBox").split(" ").map(Number);
    const marks = all("[data-s]", svg).map((mark) => ({
      mark, s: +mark.dataset.s, e: +mark.dataset.e,
      boxes: all("rect:not(.plate)", mark),
      texts: all("text,.plate", mark).map((one) => ({ one, is: one.textContent, at: ["x", "width", "text-anchor"].map((name) => [name, one.getAttribute(name)]) })),
      plate: mark.querySelector(".plate"), label: mark.querySelector("text"),
    }));
    const paths = all("path.area", svg).map((path) => ({ path, d: path.getAttribute("d") }));
    const ticks = all(".axis", svg)[0];
    return { svg, most: +svg.dataset.most, left: 176, plot: width - 176 - 16, marks, paths, ticks,
      moving: all("[data-x]", svg), names: all("text[data-c]", svg), first: true, bottom: +(ticks?.querySelector("line")?.getAttribute("y2") || 0),
      top: +(ticks?.querySelector("line")?.getAttribute("y1") || 0) };
  });
  const longest = Math.max(0, ...plots.map((plot) => plot.most));
  let from = 0, until = longest;
  const svgNode = (name, attributes, content) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (content) node.textContent = content;
    return node;
  };
  const round = (span) => {
    const power = 10 ** Math.floor(Math.log10(span / 8));
    return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= span / 8 * 0.999);
  };
  const said = (seconds, step) => step >= 1 ? `${seconds.toFixed(0)} s` : step >= 1e-3 && until < 0.5 || step < 1e-3
    ? `${(seconds * 1e3).toFixed(step < 1e-3 ? 3 : 1)} ms` : `${seconds.toFixed(Math.min(3, Math.ceil(-Math.log10(step))))} s`;
  const fit = (text, width) => {
    const letters = Math.floor(width / NS);
    return text.length <= letters ? text : letters >= 4 ? text.slice(0, letters - 1).trimEnd() + "…" : "";
  };
  const draw = () => {
    const whole = from === 0 && until === longest;
    for (const plot of plots) {
      const scale = plot.plot / (until - from);
      const x = (seconds) => plot.left + (seconds - from) * scale;
      for (const { mark, s, e, boxes, plate, label, texts } of plot.marks) {
        const width = Math.max(2, (e - s) * scale);
        for (const box of boxes) { box.setAttribute("x", x(s)); box.setAttribute("width", width); }
        mark.classList.toggle("gone", x(e) < plot.left - 1 || x(s) > plot.left + plot.plot + 1);
        if (!label || !label.dataset.l) continue;
        if (whole) { // as it was drawn
          for (const { one, is, at } of texts) {
            if (one === label) one.textContent = is;
            for (const [name, value] of at) value === null ? one.removeAttribute(name) : one.setAttribute(name, value);
          }
          continue;
        }
        const start = Math.max(x(s), plot.left), room = Math.min(x(e), plot.left + plot.plot) - start;
        const full = label.dataset.m ? `${label.dataset.l} · ${label.dataset.m}` : label.dataset.l;
        label.removeAttribute("text-anchor");
        label.textContent = full.length * NS + 10 <= room ? full : fit(label.dataset.l, room - 10);
        label.setAttribute("x", start + (plate ? 8 : 6));
        if (plate) {
          plate.setAttribute("x", start + 5);
          plate.setAttribute("width", label.textContent ? label.textContent.length * 6.2 + 6 : 0);
        }
      }
      for (const { path, d } of plot.paths) {
        path.setAttribute("d", d.replace(/([ML])(-?[\d.]+),/g, (_, letter, at) =>
          letter + x((at - plot.left) / plot.plot * plot.most).toFixed(2) + ","));
      }
      for (const node of plot.moving) node.setAttribute("transform", `translate(${x(+node.dataset.x) - (plot.left + node.dataset.x / plot.most * plot.plot)} 0)`);
      for (const node of plot.names) node.classList.toggle("gone", !whole);
      if (!plot.ticks) continue;
      plot.ticks.replaceChildren();
      const step = round(until - from);
      for (let at = Math.ceil(from / step - 1e-9) * step; at <= until * 1.000001; at += step) {
        plot.ticks.append(svgNode("line", { x1: x(at), x2: x(at), y1: plot.top, y2: plot.bottom, class: "grid" }),
          svgNode("text", { x: x(at), y: plot.bottom + 15, class: "tick", "text-anchor": "middle" }, said(at, step)));
      }
    }
  };
  const zoom = (factor, middle = (from + until) / 2) => {
    const span = Math.min(longest, Math.max(longest / 1e5, (until - from) * factor));
    const part = (middle - from) / (until - from);
    from = Math.max(0, Math.min(longest - span, middle - part * span));
    until = from + span;
    draw();
  };
  const shift = (part) => {
    const by = Math.max(-from, Math.min(longest - until, (until - from) * part));
    from += by; until += by;
    draw();
  };
  const reset = () => { from = 0; until = longest; draw(); };
  const timeAt = (svg, clientX) => {
    const box = svg.getBoundingClientRect(), plot = plots.find((one) => one.svg === svg);
    const at = (clientX - box.left) / box.width * (plot.left + plot.plot + 16) - plot.left;
    return from + Math.max(0, Math.min(1, at / plot.plot)) * (until - from);
  };
  for (const { svg } of plots) {
    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(svg, event.clientX));
    }, { passive: false });
    svg.addEventListener("dblclick", (event) => zoom(0.5, timeAt(svg, event.clientX)));
  }

  // ---- legends filter
  for (const item of all(".legend li[data-filter]")) {
    const { filter, value } = item.dataset;
    const button = make("button", "", { type: "button", "aria-pressed": "true", title: "show or dim" });
    button.append(...item.childNodes);
    item.append(button);
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") === "false";
      button.setAttribute("aria-pressed", String(on));
      for (const mark of all(`[data-${filter}]`)) if (mark !== item && mark.getAttribute(`data-${filter}`) === value) mark.classList.toggle("off", !on);
    });
  }

  // ---- theme and keys
  const dark = () => document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const turn = () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; };
  const tools = make("span", "", { class: "tools" });
  const tool = (label, title, act) => {
    const button = make("button", label, { type: "button", title, "aria-label": title });
    button.addEventListener("click", act);
    tools.append(button);
  };
  if (longest) {
    tool("+", "stretch time (key +)", () => zoom(0.5));
    tool("−", "shrink time (key −)", () => zoom(2));
    tool("whole", "all of the iteration (key 0)", reset);
  }
  tool("theme", "light or dark (key t)", turn);
  document.querySelector("nav div").append(tools);
  const step = (event, by) => {
    const list = all("[tabindex='0']", event.target.closest("svg")).filter((mark) => !mark.classList.contains("gone"));
    const next = list[list.indexOf(event.target.closest("[tabindex]")) + by];
    if (next) { event.preventDefault(); next.focus({ focusVisible: true }); }
  };
  const keys = {
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": reset, t: turn,
    ",": () => shift(-0.25), ".": () => shift(0.25),
    Escape: () => { pinned = null; light(null); tip.hidden = true; },
  };
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input,select,textarea")) return;
    const inside = event.target.closest?.("svg");
    if (inside && (event.key === "ArrowRight" || event.key === "ArrowDown")) return step(event, 1);
    if (inside && (event.key === "ArrowLeft" || event.key === "ArrowUp")) return step(event, -1);
    keys[event.key]?.();
  });
  document.documentElement.dataset.ready = "true";
})();
