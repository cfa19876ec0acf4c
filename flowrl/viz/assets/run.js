"use strict";
// Curves that can be read at a step, responses that can be looked through. Texts only ever enter through textContent.
(() => {
  const make = (name, words = "", attributes = {}, ...inside) => {
    const element = document.createElement(name);
    if (words !== "") element.textContent = words;
    for (const [key, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(key, value);
    element.append(...inside);
    return element;
  };
  const say = (value) => value === null || value === undefined || Number.isNaN(value) ? "—"
    : Number.isInteger(value) ? String(value) : String(+value.toPrecision(4));
  const isLive = document.documentElement.dataset.live === "yes";

  // What would not be seen, or would turn the text around it, is named instead.
  const named = (letter) => {
    const code = letter.codePointAt(0);
    if (code < 32) return String.fromCodePoint(0x2400 + code);
    if (code === 127) return "\u2421";
    if (code >= 0xd800 && code <= 0xdfff) return "\ufffd";
    return `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
  };
  const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb\ufffe\uffff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
  const visible = (text) => text.replace(UNSEEN, named);

  const tip = make("div", "", { class: "tip", hidden: "", role: "status" });
  document.body.append(tip);
  const showTip = (words, x, y) => {
    tip.textContent = words;
    tip.hidden = false;
    tip.style.left = "8px";
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(8, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
    tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(8, y - box.height - 12) : y + 18) + "px";
  };

  // ---- curves: the same step in all charts
  const LEFT = 50, RIGHT = 10, WIDE = 372;
  let curves = JSON.parse(document.getElementById("chart-data").textContent);
  const nearest = (steps, step) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (steps[middle] <= step) low = middle; else high = middle; }
    return Math.abs(steps[low] - step) <= Math.abs(steps[high] - step) ? low : high;
  };
  const charts = () => [...document.querySelectorAll("svg[data-chart]")];
  const atStep = (svg, clientX) => {
    const box = svg.getBoundingClientRect(), first = +svg.dataset.first, last = +svg.dataset.last;
    const part = ((clientX - box.left) / box.width * WIDE - LEFT) / (WIDE - LEFT - RIGHT);
    return Math.round(first + Math.max(0, Math.min(1, part)) * (last - first));
  };
  const point = (step) => {
    for (const svg of charts()) {
      const cursor = svg.querySelector(".cursor"), first = +svg.dataset.first, last = +svg.dataset.last;
      const isIn = step !== null && step >= first && step <= last && last > first;
      cursor.setAttribute("visibility", isIn ? "visible" : "hidden");
      if (!isIn) continue;
      const x = LEFT + (step - first) / (last - first) * (WIDE - LEFT - RIGHT);
      cursor.setAttribute("x1", x); cursor.setAttribute("x2", x);
    }
  };
  addEventListener("pointermove", (event) => {
    const svg = event.target.closest?.("svg[data-chart]");
    if (svg) {
      const step = atStep(svg, event.clientX), lines = curves[svg.dataset.chart]?.lines ?? [];
      point(step);
      const words = lines.map(([name, steps, values]) => {
        const at = nearest(steps, step);
        return `${name}: ${say(values[at])}${steps[at] === step ? "" : ` (step ${steps[at]})`}`;
      });
      showTip([`step ${step}`, ...words].join("\n"), event.clientX, event.clientY);
      return;
    }
    const token = event.target.closest?.(".tk");
    if (token && token.tell) { showTip(token.tell(), event.clientX, event.clientY); return; }
    tip.hidden = true;
    point(null);
  });
  addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });

  // ---- blocks: from this file, or from who serves it
  const inflate = async (bytes) => new Uint8Array(await new Response(
    new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer());
  const packed = async (name) => {
    if (isLive) {
      const answer = await fetch(name.replace("-", "/"), { cache: "no-store" });
      if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
      return new Uint8Array(await answer.arrayBuffer());
    }
    const text = atob(document.getElementById(`block-${name}`).textContent);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    return bytes;
  };
  const recent = new Map(); // the blocks used last, unpacked
  const KEPT = 12;
  const block = async (name, read) => {
    if (recent.has(name)) {
      const found = recent.get(name);
      recent.delete(name); recent.set(name, found);
      return found;
    }
    const found = read(await inflate(await packed(name)));
    recent.set(name, found);
    if (recent.size > KEPT) recent.delete(recent.keys().next().value);
    return found;
  };
  const asJson = (bytes) => JSON.parse(new TextDecoder().decode(bytes));
  const half = (() => { // float16 -> number, by table
    const table = new Float32Array(65536);
    for (let bits = 0; bits < 65536; bits++) {
      const sign = bits & 0x8000 ? -1 : 1, power = bits >> 10 & 31, part = bits & 1023;
      table[bits] = power === 31 ? (part ? NaN : sign * Infinity) : power ? sign * 2 ** (power - 15) * (1 + part / 1024) : sign * part * 2 ** -24;
    }
    return table;
  })();
  const asTokens = (bytes) => {
    const size = new DataView(bytes.buffer).getUint32(0, true);
    const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + size)));
    const starts = [0];
    for (const length of header.lengths) starts.push(starts[starts.length - 1] + length);
    const count = starts[starts.length - 1];
    let at = 4 + size;
    const take = (Type, name) => { const found = new Type(bytes.buffer, at, count); at += found.byteLength; return [name, found]; };
    const ids = take(Uint32Array, "")[1];
    const numbers = new Map(header.numbers.map((name) => take(Uint16Array, name)));
    const masks = new Map(header.masks.map((name) => take(Uint8Array, name)));
    const words = header.words && Object.fromEntries(Object.entries(header.words).map(([id, word]) =>
      [id, word === null ? null : Uint8Array.from(atob(word), (letter) => letter.charCodeAt(0))]));
    return { starts, ids, numbers, masks, words };
  };

  // ---- the viewer
  const viewer = document.getElementById("viewer");
  const state = { chunks: [], groups: [], found: [], page: 0, words: "", run: 0, matches: null };
  const PAGE = 5, CHARS = 4000, TOKENS = 1500;
  const ui = {};

  const groupsOf = (chunk, number) => {
    const made = [];
    let start = 0;
    for (let i = 1; i <= chunk.group.length; i++) {
      if (i < chunk.group.length && chunk.group[i] === chunk.group[start]) continue;
      made.push({ chunk: number, step: chunk.step, node: chunk.node, group: chunk.group[start], start, stop: i });
      start = i;
    }
    return made;
  };
  const add = (chunks) => {
    for (const chunk of chunks) {
      state.groups.push(...groupsOf(chunk, state.chunks.length));
      state.chunks.push(chunk);
    }
  };
  const rowsOf = (group) => { const found = []; for (let i = group.start; i < group.stop; i++) found.push(i); return found; };
  const rewardOf = (group, row) => state.chunks[group.chunk].scores.reward?.[row] ?? NaN;

  // ---- filters
  const passes = (asked) => (group, row) => {
    const chunk = state.chunks[group.chunk];
    if (asked.end && chunk.end?.[row] !== asked.end) return false;
    if (asked.failed && !chunk.failed?.[row]) return false;
    const reward = rewardOf(group, row);
    if (asked.low !== null && !(reward >= asked.low)) return false;
    if (asked.high !== null && !(reward <= asked.high)) return false;
    if (asked.shortest !== null && !((chunk.length?.[row] ?? NaN) >= asked.shortest)) return false;
    return !state.matches || state.matches.has(group.chunk * 65536 + row);
  };
  const number = (input) => input.value.trim() === "" || Number.isNaN(+input.value) ? null : +input.value;
  const asked = () => ({ from: number(ui.from), until: number(ui.until), low: number(ui.low), high: number(ui.high),
    shortest: number(ui.shortest), end: ui.end.value, failed: ui.failed.checked, node: ui.node.value });
  const spread = (group, of) => {
    let low = Infinity, high = -Infinity, sum = 0, count = 0;
    for (let row = group.start; row < group.stop; row++) {
      const value = of(group, row);
      if (Number.isNaN(value)) continue;
      low = Math.min(low, value); high = Math.max(high, value); sum += value; count++;
    }
    return { low, high, mean: count ? sum / count : NaN };
  };
  const lengthOf = (group, row) => state.chunks[group.chunk].length?.[row] ?? NaN;
  const advantageOf = (group, row) => Math.abs(state.chunks[group.chunk].scores.advantage?.[row] ?? NaN);
  const ORDERS = {
    newest: ["newest steps first", null],
    oldest: ["oldest steps first", null],
    best: ["highest mean reward", (g) => -spread(g, rewardOf).mean],
    worst: ["lowest mean reward", (g) => spread(g, rewardOf).mean],
    mixed: ["widest rewards in a group", (g) => { const s = spread(g, rewardOf); return s.low - s.high; }],
    strong: ["largest advantages", (g) => -spread(g, advantageOf).high],
    longest: ["longest responses", (g) => -spread(g, lengthOf).high],
    shortest: ["shortest responses", (g) => spread(g, lengthOf).low],
  };
  const filter = (keepPage = false) => {
    const want = asked(), pass = passes(want);
    const found = [];
    let rows = 0;
    for (const group of state.groups) {
      if (want.from !== null && group.step < want.from || want.until !== null && group.step > want.until) continue;
      if (want.node && group.node !== want.node) continue;
      let hits = 0;
      for (let row = group.start; row < group.stop; row++) if (pass(group, row)) hits++;
      if (hits) { found.push(group); rows += hits; }
    }
    const key = ORDERS[ui.order.value][1];
    if (key) {
      const keys = new Map(found.map((group) => [group, key(group)]));
      const value = (group) => Number.isFinite(keys.get(group)) ? keys.get(group) : Infinity;
      found.sort((a, b) => value(a) - value(b) || 0);
    } else if (ui.order.value === "newest") {
      found.sort((a, b) => b.step - a.step); // stable: groups of a step stay in order
    }
    state.found = found;
    state.hits = rows;
    const turned = (low, high) => low !== null && high !== null && low > high;
    state.why = turned(want.from, want.until) ? `No response: steps from ${want.from} to ${want.until} are none, the first is the later one.`
      : turned(want.low, want.high) ? `No response: a reward of at least ${want.low} and at most ${want.high} is none.`
      : "No response fits; with fewer filters or other words there may be some.";
    state.pass = pass;
    if (!keepPage) state.page = 0;
    return show();
  };

  // ---- search: texts are unpacked one chunk after another, and none is kept but the last few
  const search = async () => {
    const mine = ++state.run, words = ui.words.value.trim().toLowerCase();
    state.words = words;
    if (!words) { state.matches = null; return filter(); }
    const matches = new Set(), want = asked();
    for (let number = 0; number < state.chunks.length; number++) {
      const chunk = state.chunks[number];
      if (want.from !== null && chunk.step < want.from || want.until !== null && chunk.step > want.until) continue;
      const text = await block(`text-${number}`, asJson);
      if (mine !== state.run) return;
      const inGiven = text.groups.map((_, at) => Object.values(text.given).some((column) => column[at]?.toLowerCase().includes(words)));
      for (let row = 0; row < chunk.group.length; row++) {
        if (inGiven[chunk.group[row]] || Object.values(text.words).some((column) => column[row]?.toLowerCase().includes(words))) {
          matches.add(number * 65536 + row);
        }
      }
      if (number % 8 === 7) {
        ui.said.textContent = `searched ${number + 1} of ${state.chunks.length} parts, ${matches.size} found so far…`;
        await new Promise((done) => setTimeout(done));
        if (mine !== state.run) return;
      }
    }
    state.matches = matches;
    return filter();
  };

  // ---- tokens: what a colour means
  const steps = (limits) => (size) => limits.filter((limit) => size >= limit).length;
  const SCALES = {
    logprob: { level: (v) => [steps([0.105, 0.693, 2.303, 4.605])(-v), 1],
      said: ["p ≥ 0.9", "p < 0.9", "p < 0.5", "p < 0.1", "p < 0.01"] },
    ratio: { level: (v) => [steps([0.01, 0.05, 0.18, 0.69])(Math.abs(Math.log(v))), v > 1 ? 1 : -1],
      said: ["within 1 %", "> 1.01", "> 1.05", "> 1.2", "> 2"], minus: ["< 0.99", "< 0.95", "< 0.82", "< 0.5"] },
    apart: { level: (v) => [steps([0.05, 0.3, 1, 2.3])(Math.abs(v)), v > 0 ? 1 : -1],
      said: ["near 0", "> 0.05 nats", "> 0.3", "> 1", "> 2.3"], minus: ["< −0.05 nats", "< −0.3", "< −1", "< −2.3"] },
    number: { level: (v, most) => [most ? steps([0.1, 0.3, 0.6, 0.85])(Math.abs(v) / most) : 0, v > 0 ? 1 : -1],
      said: ["near 0", "> 0.1 of the response's largest", "> 0.3", "> 0.6", "> 0.85"], minus: ["< −0.1 of it", "< −0.3", "< −0.6", "< −0.85"] },
    mask: { level: () => [0, 1], said: ["true"] },
  };
  const channelsOf = (tokens) => {
    const found = new Map();
    const get = (name) => { const bits = tokens.numbers.get(name); return (at) => half[bits[at]]; };
    const has = (name) => tokens.numbers.has(name);
    for (const name of tokens.numbers.keys()) found.set(name, { of: get(name), scale: name.endsWith("logprobs") ? "logprob" : "number" });
    if (has("old_logprobs") && has("rollout_logprobs")) {
      const old = get("old_logprobs"), then = get("rollout_logprobs");
      found.set("ratio", { of: (at) => Math.exp(old(at) - then(at)), scale: "ratio", said: "exp(old_logprobs − rollout_logprobs): the trainer before the update against the sampler" });
    }
    for (const other of ["ref_logprobs", "teacher_logprobs"]) {
      const base = has("old_logprobs") ? "old_logprobs" : "rollout_logprobs";
      if (has(other) && has(base)) {
        const mine = get(base), theirs = get(other);
        found.set(`${base} − ${other}`, { of: (at) => mine(at) - theirs(at), scale: "apart", said: "nats; above 0 the policy likes the token more" });
      }
    }
    for (const [name, bits] of tokens.masks) found.set(name, { of: (at) => bits[at], scale: "mask" });
    return found;
  };
  const decoded = (tokens, first, last) => { // what each token adds to the text; a character split over tokens comes with its last
    const decoder = new TextDecoder("utf-8"), found = [];
    for (let at = first; at < last; at++) {
      const word = tokens.words?.[tokens.ids[at]];
      if (word === null || word === undefined) { found.push(null); decoder.decode(new Uint8Array()); continue; }
      found.push(decoder.decode(word, { stream: true }));
    }
    const rest = decoder.decode();
    if (rest && found.length) found[found.length - 1] = (found[found.length - 1] ?? "") + rest;
    return found;
  };
  const tokenBody = (tokens, row, chosen) => {
    const body = make("div", "", { class: "body tokens", dir: "auto", tabindex: "0" });
    const channels = channelsOf(tokens), channel = channels.get(chosen), scale = SCALES[channel?.scale ?? "number"];
    const first = tokens.starts[row], last = tokens.starts[row + 1];
    let most = 0;
    if (channel && channel.scale === "number") for (let at = first; at < last; at++) { const v = Math.abs(channel.of(at)); if (v > most && v < Infinity) most = v; }
    const texts = decoded(tokens, first, last);
    const token = (index) => {
      const at = first + index, text = texts[index], value = channel ? channel.of(at) : NaN;
      const made = make("span", text === null ? `⟨${tokens.ids[at]}⟩` : visible(text).replace(/\n/g, "⏎\n"), { class: text === null ? "tk id" : "tk" });
      if (channel?.scale === "mask") { if (!value) made.classList.add("masked"); }
      else if (channel && !Number.isNaN(value)) {
        const [level, sign] = scale.level(value, most);
        if (level) made.classList.add((sign > 0 ? "q" : "n") + level);
      }
      made.tell = () => [`token ${index} · id ${tokens.ids[at]}`, ...[...channels].map(([name, one]) =>
        `${name}: ${one.scale === "mask" ? (one.of(at) ? "true" : "false") : say(one.of(at))}`)].join("\n");
      return made;
    };
    if (texts.length <= TOKENS) {
      for (let index = 0; index < texts.length; index++) body.append(token(index));
      if (!texts.length) body.append(make("span", "no tokens", { class: "fact" }));
      return body;
    }
    // a long response is seen through a window: browsers lay out a paragraph of 100,000 pieces for a minute
    const part = make("div"), at = make("span"), move = make("input", "", { type: "range", min: 0, max: texts.length - TOKENS, value: 0, step: 1, "aria-label": "first token shown" });
    const back = make("button", "‹", { type: "button", "aria-label": "earlier tokens" }), next = make("button", "›", { type: "button", "aria-label": "later tokens" });
    const write = (start) => {
      start = Math.max(0, Math.min(texts.length - TOKENS, start));
      move.value = start;
      at.textContent = `tokens ${start.toLocaleString("en")}–${(start + TOKENS - 1).toLocaleString("en")} of ${texts.length.toLocaleString("en")}`;
      back.disabled = start === 0; next.disabled = start === texts.length - TOKENS;
      part.replaceChildren(...Array.from({ length: TOKENS }, (_, index) => token(start + index)));
    };
    back.addEventListener("click", () => write(+move.value - TOKENS));
    next.addEventListener("click", () => write(+move.value + TOKENS));
    move.addEventListener("change", () => write(+move.value));
    write(0);
    body.append(make("div", "", { class: "window", dir: "ltr" }, back, move, next, at), part);
    return body;
  };

  // ---- texts, with what was searched for marked
  const marked = (text) => {
    const part = document.createDocumentFragment(), low = state.words ? text.toLowerCase() : "";
    // a lower-case letter may be longer than its capital: then places do not fit, and nothing is marked
    if (!state.words || low.length !== text.length) { part.append(visible(text)); return part; }
    let at = 0, count = 0;
    for (let next = low.indexOf(state.words); next >= 0 && count < 500; next = low.indexOf(state.words, at)) {
      part.append(visible(text.slice(at, next)), make("mark", visible(text.slice(next, next + state.words.length))));
      at = next + state.words.length;
      count++;
    }
    part.append(visible(text.slice(at)));
    return part;
  };
  const textBody = (text) => {
    const body = make("div", "", { class: "body", dir: "auto", tabindex: "0" });
    const cut = text.length > CHARS;
    body.append(marked(cut ? text.slice(0, CHARS) : text));
    if (cut) {
      const all = make("button", `show all ${text.length.toLocaleString("en")} characters`, { type: "button", class: "more" });
      all.addEventListener("click", () => body.replaceChildren(marked(text)));
      body.append(all);
    }
    if (!text) body.append(make("span", "empty", { class: "fact" }));
    return body;
  };
  const fact = (name, value, kind = "") => make("span", `${name} `, { class: `fact ${kind}` }, make("b", value));

  const rowView = (group, row, text, tokens, size) => {
    const chunk = state.chunks[group.chunk], facts = make("div", "", { class: "facts" });
    const words = (name) => text.words[name]?.[row];
    const order = ["reward", "advantage"];
    const names = Object.keys(text.scores).filter((name) => name !== "temperature" && name !== "sample_index" && name !== "num_turns");
    const last = ["min_policy_version", "max_policy_version"];
    names.sort((a, b) => (order.indexOf(a) + 1 || (last.includes(a) ? 10 : 9)) - (order.indexOf(b) + 1 || (last.includes(b) ? 10 : 9)));
    const low = text.scores.min_policy_version?.[row], high = text.scores.max_policy_version?.[row];
    for (const name of names) {
      const value = text.scores[name][row];
      if (name === "min_policy_version") {
        facts.append(fact("version", low === high ? say(low) : `${say(low)}–${say(high)}`));
        if (chunk.newest !== null && low !== null) facts.append(fact("staleness", say(chunk.newest - low), chunk.newest > low ? "poor" : ""));
        continue;
      }
      if (name === "max_policy_version") continue;
      const kind = name !== "advantage" || !value ? "" : value > 0 ? "good" : "poor";
      facts.append(fact(name, name === "advantage" && value > 0 ? `+${say(value)}` : say(value), kind));
    }
    if (chunk.length) facts.append(fact("tokens", say(chunk.length[row])));
    if (words("finish_reason")) facts.append(fact("ended by", visible(words("finish_reason"))));
    for (const name of Object.keys(text.words)) {
      if (!["response", "finish_reason", "row_error", "sample_id", "source_id"].includes(name) && words(name)) facts.append(fact(name, visible(words(name)).slice(0, 200)));
    }
    if (words("row_error")) facts.append(fact("failed:", visible(words("row_error")).slice(0, 600), "wrong"));
    const chosen = ui.colour.value;
    const body = tokens && chosen ? tokenBody(tokens, row, chosen) : words("response") !== undefined ? textBody(words("response"))
      : tokens ? tokenBody(tokens, row, chosen) : make("div", "no text was recorded", { class: "fact" });
    return make("article", "", { class: `row${size === 1 ? " alone" : ""}${state.pass(group, row) ? "" : " miss"}`, "aria-label": words("sample_id") ?? `response ${row}` }, facts, body);
  };
  const groupView = async (group) => {
    const chunk = state.chunks[group.chunk], text = await block(`text-${group.chunk}`, asJson);
    const tokens = chunk.has_tokens && (ui.colour.value || !text.words.response) ? await block(`tokens-${group.chunk}`, asTokens) : null;
    const size = group.stop - group.start, rewards = spread(group, rewardOf);
    const head = make("h3", `step ${group.step}`, {}, make("small", `prompt ${visible(text.groups[group.group]).slice(0, 80)} · ${size} response${size === 1 ? "" : "s"}${Number.isNaN(rewards.mean) ? "" : ` · mean reward ${say(rewards.mean)}`} · from ${group.node}`));
    const given = make("dl", "", { class: "given" });
    for (const [name, column] of Object.entries(text.given)) {
      if (name === "prompt_id" || !column[group.group]) continue;
      given.append(make("dt", name), make("dd", "", { dir: "auto" }, marked(column[group.group])));
    }
    const rows = make("div", "", { class: "rows", tabindex: "0", role: "group", "aria-label": "responses" });
    for (const row of rowsOf(group)) rows.append(rowView(group, row, text, tokens, size));
    if (ui.colour.value && !tokens) head.append(make("small", "its tokens are not in this page"));
    if (tokens) offer([...channelsOf(tokens)]);
    return make("section", "", { class: "group-of" }, make("header", "", {}, head, given), rows);
  };

  // ---- what can be coloured by, known once tokens were seen
  const offer = (channels) => {
    for (const [name, channel] of channels) {
      if ([...ui.colour.options].some((one) => one.value === name)) continue;
      ui.colour.append(make("option", name, { value: name }));
    }
    const channel = new Map(channels).get(ui.colour.value);
    ui.scale.replaceChildren();
    if (!channel) return;
    const scale = SCALES[channel.scale];
    ui.scale.append(make("span", channel.said ?? (channel.scale === "logprob" ? "probability of the token:" : `${ui.colour.value}:`)));
    if (channel.scale === "mask") { ui.scale.append(make("i", "true"), make("i", "false", { class: "tk masked" })); return; }
    scale.said.forEach((words, level) => ui.scale.append(make("i", words, { class: level ? `q${level}` : "" })));
    (scale.minus ?? []).forEach((words, level) => ui.scale.append(make("i", words, { class: `n${level + 1}` })));
  };

  let drawing = 0;
  const show = async () => {
    const mine = ++drawing, pages = Math.max(1, Math.ceil(state.found.length / PAGE));
    state.page = Math.max(0, Math.min(pages - 1, state.page));
    const some = state.found.slice(state.page * PAGE, state.page * PAGE + PAGE);
    ui.said.textContent = !state.hits ? state.why : `${state.hits.toLocaleString("en")} response${state.hits === 1 ? "" : "s"} in ${state.found.length.toLocaleString("en")} group${state.found.length === 1 ? "" : "s"}`;
    ui.at.textContent = state.hits ? `page ${state.page + 1} of ${pages.toLocaleString("en")}` : "";
    ui.back.disabled = state.page === 0;
    ui.next.disabled = state.page === pages - 1;
    const views = [];
    try {
      for (const group of some) views.push(await groupView(group));
    } catch (error) {
      views.push(make("p", `These responses cannot be shown: ${error.message}`, { class: "bad" }));
    }
    if (mine !== drawing) return;
    ui.list.replaceChildren(...views);
    viewer.dataset.shown = String(some.length);
  };

  const build = () => {
    const field = (label, ...inside) => make("label", label, {}, ...inside);
    const input = (type, more = {}) => make("input", "", { type, ...more });
    const pair = (...inside) => make("span", "", { class: "pair" }, ...inside);
    ui.from = input("number", { "aria-label": "from step" }); ui.until = input("number", { "aria-label": "to step" });
    ui.low = input("number", { step: "any", "aria-label": "least reward" }); ui.high = input("number", { step: "any", "aria-label": "greatest reward" });
    ui.shortest = input("number", { "aria-label": "least tokens" });
    ui.end = make("select"); ui.node = make("select"); ui.order = make("select"); ui.colour = make("select");
    ui.failed = input("checkbox");
    ui.words = input("search", { placeholder: "in prompts and responses", maxlength: "200" });
    ui.go = make("button", "search", { type: "button" });
    for (const [value, [words]] of Object.entries(ORDERS)) ui.order.append(make("option", words, { value }));
    ui.colour.append(make("option", "no colours: plain text", { value: "" }));
    ui.said = make("span", "", { role: "status" }); ui.at = make("span");
    ui.back = make("button", "‹ back", { type: "button" }); ui.next = make("button", "next ›", { type: "button" });
    ui.scale = make("div", "", { class: "scale" }); ui.list = make("div");
    for (const [name, element] of Object.entries(ui)) element.id = `ask-${name}`;
    const check = make("label", "", { class: "check" }, ui.failed, "only failed rows");
    ui.check = check; ui.nodeField = field("recorded at", ui.node); ui.colourField = field("colour tokens by", ui.colour); ui.lengthField = field("tokens at least", ui.shortest);
    viewer.replaceChildren(
      make("div", "", { class: "ask" }, field("steps", pair(ui.from, "–", ui.until)), field("reward", pair(ui.low, "–", ui.high)), ui.lengthField,
        field("ended by", ui.end), ui.nodeField, field("order", ui.order), ui.colourField, field("search", pair(ui.words, ui.go)), check),
      ui.scale,
      make("div", "", { class: "status" }, ui.said, make("span", "", { class: "at" }, ui.back, ui.at, ui.next)),
      ui.list);
    for (const one of [ui.from, ui.until, ui.low, ui.high, ui.shortest, ui.end, ui.node, ui.order, ui.failed]) one.addEventListener("change", () => filter());
    ui.colour.addEventListener("change", () => { if (!ui.colour.value) ui.scale.replaceChildren(); show(); });
    ui.go.addEventListener("click", search);
    ui.words.addEventListener("keydown", (event) => { if (event.key === "Enter") search(); });
    ui.words.addEventListener("search", search);
    const turn = (by) => { state.page += by; show().then(() => viewer.scrollIntoView({ block: "start" })); };
    ui.back.addEventListener("click", () => turn(-1));
    ui.next.addEventListener("click", () => turn(1));
  };
  const fill = () => { // what there is to choose from
    const choices = (select, values, every) => {
      const kept = select.value;
      select.replaceChildren(make("option", every, { value: "" }), ...values.map((value) => make("option", visible(value), { value })));
      select.value = values.includes(kept) ? kept : "";
    };
    const ends = new Set(), nodes = new Set();
    let low = Infinity, high = -Infinity, failed = false, lengths = false;
    for (const chunk of state.chunks) {
      for (const end of chunk.end ?? []) ends.add(end);
      nodes.add(chunk.node);
      low = Math.min(low, chunk.step); high = Math.max(high, chunk.step);
      failed ||= chunk.failed?.some(Boolean);
      lengths ||= chunk.length !== null;
    }
    choices(ui.end, [...ends].filter(Boolean).sort(), "anything");
    choices(ui.node, [...nodes].sort(), "any node");
    ui.nodeField.hidden = nodes.size < 2;
    ui.check.hidden = !failed;
    ui.lengthField.hidden = !lengths;
    ui.colourField.hidden = !state.chunks.some((chunk) => chunk.has_tokens);
    ui.from.placeholder = String(low); ui.until.placeholder = String(high);
    for (const one of [ui.from, ui.until]) { one.min = low; one.max = high; }
  };
  const learn = async () => { // the channels of one chunk with tokens, so that they can be chosen at once
    for (let number = state.chunks.length - 1; number >= 0; number--) {
      if (!state.chunks[number].has_tokens) continue;
      offer([...channelsOf(await block(`tokens-${number}`, asTokens))]);
      return;
    }
  };

  // ---- a run that goes on: what is new comes from who serves the page, this machine
  const EVERY_MS = 2000;
  let known = "";
  const refresh = async () => {
    const { stamp } = await (await fetch("state", { cache: "no-store" })).json();
    if (stamp === known) return;
    if (known) {
      const page = new DOMParser().parseFromString(await (await fetch("./", { cache: "no-store" })).text(), "text/html");
      for (const old of document.querySelectorAll("[data-fresh]")) {
        const fresh = page.querySelector(`[data-fresh="${old.dataset.fresh}"]`);
        const open = [...old.querySelectorAll("details")].map((one) => one.open);
        if (!fresh) continue;
        old.replaceChildren(...fresh.childNodes);
        [...old.querySelectorAll("details")].forEach((one, at) => { one.open = open[at] ?? one.open; });
      }
      curves = JSON.parse(page.getElementById("chart-data").textContent);
    }
    known = stamp;
    const more = asJson(await inflate(await packed(`index-${state.chunks.length}`)));
    const wasEmpty = !state.chunks.length;
    if (!more.length) {
      if (wasEmpty) viewer.replaceChildren(make("p", "No responses were recorded yet.", { class: "lead" }));
      return;
    }
    add(more);
    if (!ui.list) { build(); document.getElementById("samples").hidden = true; }
    fill();
    if (wasEmpty) { await learn(); await filter(); }
    else if (state.page > 0 || state.words || ui.order.value !== "newest") {
      ui.said.textContent += ` (${state.groups.length - state.found.length} groups more; filter again to see what is new)`;
    } else await filter(true);
  };
  const follow = async () => {
    try {
      await refresh();
      viewer.dataset.live = "yes";
    } catch (error) {
      viewer.dataset.live = "lost"; // who served it has ended, or the machine sleeps: it is asked again
    }
    document.documentElement.dataset.viewed = "true";
    setTimeout(follow, viewer.dataset.live === "lost" ? 5 * EVERY_MS : EVERY_MS);
  };

  const begin = async () => {
    if (typeof DecompressionStream === "undefined") {
      viewer.append(make("p", "This browser cannot unpack the responses (it has no DecompressionStream); newer ones can.", { class: "bad" }));
      return;
    }
    if (isLive) {
      viewer.append(make("p", "Reading what the run has recorded…", { class: "lead" }));
      await follow();
      return;
    }
    if (!document.getElementById("block-index")) return;
    add(asJson(await inflate(await packed("index"))));
    build();
    fill();
    document.getElementById("samples").hidden = true;
    await learn();
    await filter();
    document.documentElement.dataset.viewed = "true";
  };
  begin().catch((error) => {
    viewer.append(make("p", `The responses cannot be shown: ${error.message}`, { class: "bad" }));
    document.documentElement.dataset.viewed = "failed";
  });
})();
