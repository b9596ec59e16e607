"use strict";
// Everything is built from text nodes and attributes: no text of a model or a user is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 8; // --run0 to --run7 of the style; the dashes tell the runs apart without colour
const DASHES = ["", "7 3", "2 2", "9 3 2 3", "4 4", "1 3", "12 4", "6 2 1 2"];
const MOST_POINTS = 600; // of a curve that are drawn
const FIRST_REPLIES = 4; // held-out prompts shown outside the fold: those that changed most for the better
const PAGE = 20; // held-out prompts shown at a time inside it
const MOST_FOUND = 60; // completions that a search shows
const WIDTH = 440, HEIGHT = 200; // of a chart, in its own units: it is scaled to the page, or to the paper

let found = null, runs = [];
const shown = { smooth: 0, log: false, hidden: new Set() };
const redraw = []; // functions that draw the charts anew

function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function s(tag, attributes = {}, text = "") {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  return node;
}

function told(value, unit = "") {
  if (value === null || value === undefined) return "-";
  if (unit === "%") return `${Number((100 * value).toPrecision(4))}%`;
  if (value === 0) return "0";
  const size = Math.abs(value);
  return (size >= 1e6 || size < 1e-3 ? value.toExponential(1).replace("e+", "e") : String(Number(value.toPrecision(4)))) + (unit ? ` ${unit}` : "");
}

const percent = (value) => `${(100 * value).toFixed(1)}%`;
const colour = (number) => `var(--run${number % COLOURS})`;
const dash = (number) => DASHES[number % DASHES.length];

function section(parent, id, title) {
  const body = h("section", { id, "aria-label": title }, h("h2", {}, title));
  parent.append(body);
  return body;
}

function fold(parent, title, build, id = null) {
  // what is inside is built when it is first opened
  const box = h("details", { class: "fold", id }, h("summary", {}, title));
  box.addEventListener("toggle", () => { if (box.open && box.children.length < 2) build(box); });
  parent.append(box);
}

function choice(label, options, value, onchange) {
  const select = h("select", { "aria-label": label }, ...options.map(([key, text]) => h("option", { value: key }, text)));
  select.value = value;
  select.addEventListener("change", () => onchange(select.value));
  return h("label", { class: "row" }, label, select);
}

// Charts

function thinned(points) {
  if (points.length <= MOST_POINTS) return points;
  const kept = [];
  const each = points.length / (MOST_POINTS / 2);
  for (let begin = 0; begin < points.length; begin += each) {
    const bucket = points.slice(Math.floor(begin), Math.floor(begin + each));
    const low = bucket.reduce((a, b) => (b[1] < a[1] ? b : a));
    const high = bucket.reduce((a, b) => (b[1] > a[1] ? b : a));
    kept.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

function smoothed(points, share) {
  let mean = null;
  return points.map(([x, y]) => [x, (mean = mean === null ? y : share * mean + (1 - share) * y)]);
}

function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle; else high = middle;
  }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
}

function chart({ key, title, unit, lines }) {
  // lines: for each run its points, [step, value] or [step, value, low, high]
  const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: "0", role: "img", "aria-label": `${title}; arrow keys read values` });
  const say = h("div", { class: "told", "aria-live": "polite" });
  const box = h("div", { class: "chart" }, h("h3", {}, title, " ", h("code", {}, key)), svg, say);
  const left = 52, right = 10, top = 8, bottom = 34;
  let scales = null, at = null;

  function draw() {
    svg.replaceChildren();
    const visible = lines.map((points, number) => ({ points, number })).filter((line) => !shown.hidden.has(line.number) && line.points.length);
    const log = shown.log;
    const usable = (value) => !log || value > 0;
    const values = visible.flatMap((line) => line.points.flatMap((point) => point.slice(1))).filter(usable);
    if (!values.length) {
      svg.append(s("text", { x: left, y: HEIGHT / 2 }, log ? "no value above 0" : "no values"));
      scales = null;
      return;
    }
    let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
    if (low === 0 && high === 0) high = 1;
    if (low === high) { const more = Math.abs(low) / 2; low -= more; high += more; }
    const xs = visible.flatMap((line) => [line.points[0][0], line.points[line.points.length - 1][0]]);
    const x0 = Math.min(...xs), x1 = Math.max(...xs, x0 + 1);
    const [y0, y1] = log ? [Math.log10(low), Math.log10(high)] : [low, high];
    const X = (x) => left + ((x - x0) / (x1 - x0)) * (WIDTH - left - right);
    const Y = (y) => top + (1 - ((log ? Math.log10(y) : y) - y0) / (y1 - y0 || 1)) * (HEIGHT - top - bottom);
    scales = { X, x0, x1, visible };
    for (const tick of ticks(y0, y1, 5)) {
      const value = log ? 10 ** tick : tick;
      svg.append(s("line", { class: "grid", x1: left, x2: WIDTH - right, y1: Y(value), y2: Y(value) }));
      svg.append(s("text", { x: left - 4, y: Y(value) + 4, "text-anchor": "end" }, told(value, unit === "%" ? unit : "")));
    }
    for (const tick of ticks(x0, x1, 4).filter(Number.isInteger)) {
      svg.append(s("text", { x: X(tick), y: HEIGHT - bottom + 14, "text-anchor": "middle" }, String(tick)));
    }
    svg.append(s("text", { x: (left + WIDTH - right) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, "step"));
    for (const line of visible) {
      const all = line.points.filter((point) => usable(point[1])), points = thinned(all);
      const stroke = colour(line.number), dashes = dash(line.number);
      const path = (list) => list.map(([x, y], i) => `${i ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join("");
      const smooth = shown.smooth > 0 && points.length > 3;
      if (points.length > 1) svg.append(s("path", {
        d: path(points), fill: "none", stroke, "stroke-width": smooth ? 1 : 1.8, "stroke-opacity": smooth ? 0.35 : 1, "stroke-dasharray": dashes,
      }));
      if (smooth) svg.append(s("path", { d: path(thinned(smoothed(all, shown.smooth))), fill: "none", stroke, "stroke-width": 2, "stroke-dasharray": dashes }));
      if (points.length < 12) for (const [x, y, least, most] of points) {
        svg.append(s("circle", { cx: X(x), cy: Y(y), r: 2.6, fill: stroke }));
        if (least !== undefined && usable(least)) {
          svg.append(s("line", { x1: X(x), x2: X(x), y1: Y(least), y2: Y(most), stroke, "stroke-width": 1.2 }));
        }
      }
    }
    if (at !== null) point(at);
  }

  function point(x) {
    if (!scales) return;
    at = Math.max(scales.x0, Math.min(scales.x1, x));
    svg.querySelectorAll(".cursor").forEach((node) => node.remove());
    const values = scales.visible.map((line) => [line, nearest(line.points, at)]);
    at = values.reduce((a, b) => (Math.abs(b[1][0] - at) < Math.abs(a[1][0] - at) ? b : a))[1][0];
    svg.append(s("line", { class: "cursor", x1: scales.X(at), x2: scales.X(at), y1: top, y2: HEIGHT - bottom }));
    const parts = values.filter(([, near]) => near[0] === at).map(([line, near]) => {
      const range = near.length > 3 ? ` [${told(near[2], unit)}, ${told(near[3], unit)}]` : "";
      return (runs.length > 1 ? `${runs[line.number].name} ` : "") + told(near[1], unit) + range;
    });
    say.textContent = `step ${at}: ${parts.join("; ")}`;
  }

  svg.addEventListener("pointermove", (event) => {
    if (!scales) return;
    const place = svg.getBoundingClientRect();
    const inside = ((event.clientX - place.left) / place.width) * WIDTH;
    point(scales.x0 + ((inside - left) / (WIDTH - left - right)) * (scales.x1 - scales.x0));
  });
  svg.addEventListener("keydown", (event) => {
    if (!scales || !["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) return;
    event.preventDefault();
    const steps = [...new Set(scales.visible.flatMap((line) => line.points.map((each) => each[0])))].sort((a, b) => a - b);
    const here = at === null ? -1 : steps.indexOf(at);
    const moved = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: steps.length - 1 }[event.key];
    point(steps[Math.max(0, Math.min(steps.length - 1, moved))]);
  });
  redraw.push(draw);
  draw();
  return box;
}

const charts = (curves) => h("div", { class: "charts" }, ...curves.map(chart));

// The parts of the page, in its order

function head() {
  const themes = ["system", "light", "dark"];
  const theme = h("button", { class: "control", onclick: () => {
    const next = themes[(themes.indexOf(theme.dataset.theme || "system") + 1) % 3];
    theme.dataset.theme = next;
    theme.textContent = `colours: ${next}`;
    if (next === "system") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = next;
  } }, "colours: system");
  document.querySelector("header").append(h("div", { class: "row dim" }, `rlpost ${found.rlpost}, ${found.made}`, theme));
}

function mark(number) {
  const svg = s("svg", { viewBox: "0 0 34 10", width: 34, height: 10, "aria-hidden": "true" });
  svg.append(s("line", { x1: 0, x2: 34, y1: 5, y2: 5, stroke: colour(number), "stroke-width": 3, "stroke-dasharray": dash(number) }));
  return svg;
}

function diagnosis(parent, run) {
  const body = section(parent, "diagnosis", "Diagnosis");
  for (const each of run.symptoms) body.append(h("div", { class: "symptom" },
    h("strong", {}, `${each.name}, steps ${each.steps[0]} to ${each.steps[1]}`), `: ${each.evidence}. `, h("span", { class: "dim" }, `What to do: ${each.fix}.`)));
  if (!run.symptoms.length) body.append(h("p", {}, run.quiet));
  if (run.warnings.length) fold(body, `Warnings in log.txt (${run.warnings.length})`, (box) => box.append(h("ul", {}, ...run.warnings.map((line) => h("li", {}, line)))));
}

function story(parent) {
  const curves = found.curves.filter((curve) => curve.story);
  if (!curves.length) return;
  const body = section(parent, "story", "Training");
  if (runs.length > 1) body.append(h("div", { class: "row" }, ...runs.map((run, number) => {
    const box = h("input", { type: "checkbox", class: "control", checked: "", onchange: () => {
      if (box.checked) shown.hidden.delete(number); else shown.hidden.add(number);
      redraw.forEach((draw) => draw());
    } });
    return h("label", { class: "legend" }, box, mark(number), run.name);
  })));
  body.append(charts(curves));
}

function allCurves(parent) {
  fold(parent, `All curves (${found.curves.length})`, (box) => {
    const all = () => redraw.forEach((draw) => draw());
    const smooth = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, "aria-label": "smoothing",
      oninput: () => { shown.smooth = Number(smooth.value); all(); } });
    const log = h("input", { type: "checkbox", onchange: () => { shown.log = log.checked; all(); } });
    box.append(h("div", { class: "row control" }, h("label", { class: "row" }, "smoothing", smooth), h("label", {}, log, " log scale")), charts(found.curves));
    if (found.left_out) box.append(h("p", { class: "dim" }, found.left_out));
  }, "curves");
}

const holds = (text, ...where) => !text || where.some((each) => each.toLowerCase().includes(text.toLowerCase()));

function reply(when, { text, reward, accuracy, answer, finish, error }) {
  const facts = error ? [`reward failed: ${error}`] : [`reward ${told(reward)}`];
  if (accuracy !== null) facts.push(accuracy === 1 ? "right" : accuracy === 0 ? "wrong" : `accuracy ${told(accuracy, "%")}`);
  if (answer) facts.push(`answer read: ${answer}`);
  if (finish === "length") facts.push("truncated");
  return h("div", {}, h("div", { class: "dim" }, `${when}: `, h("strong", {}, facts[0]), ...facts.slice(1).map((each) => `, ${each}`)),
    text.trim() ? h("div", { class: "text" }, text) : h("div", { class: "text dim" }, text ? "(only white space)" : "(empty)"));
}

const pairCard = (pair) => h("div", { class: "card" }, h("div", { class: "dim" }, pair.kind), h("div", { class: "text" }, pair.prompt),
  h("div", { class: "pair" }, reply("before", pair.replies[0]), reply("after", pair.replies[1])));

function heldOut(parent, run) {
  if (!run.held_out) return;
  const { pairs, counts, total } = run.held_out;
  const body = section(parent, "held-out", "Held-out replies, before and after");
  const said = Object.entries(counts).map(([kind, count]) => `${kind} ${count}`).join(", ");
  body.append(h("p", {}, `Of ${total} prompts: ${said}. The best changes first.`), ...pairs.slice(0, FIRST_REPLIES).map(pairCard));
  if (pairs.length > FIRST_REPLIES) fold(body, `All replies (${pairs.length}${pairs.length < total ? ` of ${total}` : ""})`, (box) => {
    const state = { kind: "all", text: "", count: PAGE };
    const list = h("div", {});
    function draw() {
      const left = pairs.filter((pair) => (state.kind === "all" || pair.kind === state.kind) && holds(state.text, pair.prompt, ...pair.replies.map((each) => each.text)));
      list.replaceChildren(...left.slice(0, state.count).map(pairCard));
      if (left.length > state.count) list.append(h("button", { class: "control", onclick: () => { state.count += PAGE; draw(); } }, `${left.length - state.count} more`));
      if (!left.length) list.append(h("p", {}, "None."));
    }
    box.append(h("div", { class: "row control" },
      choice("show", ["all", ...Object.keys(counts)].map((name) => [name, name]), "all", (kind) => { state.kind = kind; state.count = PAGE; draw(); }),
      search((text) => { state.text = text; draw(); })), list);
    draw();
  });
}

function duration(seconds) {
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60);
  return minutes < 100 ? `${minutes} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function time(parent, run) {
  const whole = run.time.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!whole) return;
  const body = section(parent, "time", "Time");
  body.append(h("div", { class: "scroll" }, h("table", {}, ...[...run.time, ["the whole run", whole]].map(([name, seconds]) => {
    const bar = h("div", { class: "bar" });
    bar.style.width = `${(100 * seconds) / whole}%`;
    return h("tr", {}, h("td", {}, name), h("td", { class: "figure" }, duration(seconds)), h("td", { class: "figure" }, percent(seconds / whole)), h("td", { class: "share" }, bar));
  }))), run.memory ? h("p", { class: "dim" }, `Peak memory ${run.memory.toFixed(1)} GB.`) : "");
}

function search(then) {
  const input = h("input", { type: "search", placeholder: "search texts", "aria-label": "search texts" });
  let waiting = 0;
  input.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => then(input.value), 150); });
  return input;
}

// Tokens

function shade(share) {
  // from green (0) over no colour (0.5) to red (1): no information lies in the colour alone, the title has the number
  const far = Math.min(1, Math.abs(share - 0.5) * 2);
  return `color-mix(in srgb, ${share > 0.5 ? "#e0322b" : "#18a558"} ${Math.round(65 * far)}%, transparent)`;
}

const COLOURINGS = {
  probability: ["red: unlikely under the sampler, green: likely", (row, i) => shade(1 - Math.exp(row.sampler[i]))],
  advantage: ["green: positive advantage, red: negative", (row) => shade(0.5 - Math.max(-0.5, Math.min(0.5, (row.advantage || 0) / 4)))],
  "sampler gap": ["red: the trainer's and the sampler's log-probs differ by 0.2 or more", (row, i) =>
    row.trainer ? shade(0.5 + Math.min(0.5, Math.abs(row.trainer[i] - row.sampler[i]) * 2.5)) : ""],
  mask: ["green: sampled by the model and trained on; no colour: from the environment", (row, i) => (row.mask[i] === "1" ? shade(0.1) : "")],
  "policy version": ["a colour for each weight version", (row, i) => {
    const version = versionAt(row, i);
    return version === null || version < 0 ? "" : `color-mix(in srgb, ${colour(version)} 40%, transparent)`;
  }],
  none: ["no colours", () => ""],
};

function versionAt(row, place) {
  if (!row.version) return null;
  let found = null;
  for (const [begin, version] of row.version) if (begin <= place) found = version;
  return found;
}

function tokens(row, colouring) {
  if (!row.pieces) return h("div", { class: "text" }, row.text);
  const paint = COLOURINGS[colouring][1];
  const box = h("div", { class: "text" });
  row.pieces.forEach((piece, i) => {
    const known = [];
    if (row.mask[i] === "1") {
      known.push(`probability ${percent(Math.exp(row.sampler[i]))}`, `sampler ${row.sampler[i]}`);
      known.push(row.trainer ? `trainer ${row.trainer[i]}, gap ${(row.trainer[i] - row.sampler[i]).toFixed(3)}` : "not read by the trainer");
      if (row.version) known.push(`version ${versionAt(row, i)}`);
    } else known.push("not sampled by the model");
    const span = h("span", { title: known.join(" · ") }, piece);
    const back = row.mask[i] === "1" || colouring === "mask" ? paint(row, i) : "";
    if (back) span.style.background = back;
    box.append(span);
  });
  if (row.left_out) box.append(h("span", { class: "dim" }, ` … ${row.left_out} more tokens`));
  return box;
}

async function completions(body, run) {
  const all = (await unpacked())[runs.indexOf(run)];
  const state = { place: all.steps.length - 1, sort: "reward", up: false, text: "", colouring: "probability" };
  const list = h("div", {}), counts = h("p", { class: "dim" }), legend = h("span", { class: "dim" });
  const steps = h("select", { "aria-label": "step" });
  const sorts = { reward: (row) => row.reward, advantage: (row) => row.advantage, length: (row) => row.tokens, surprise: (row) => row.surprise };
  steps.append(...all.steps.map((each, i) => h("option", { value: i }, `step ${each.step}`)));

  function move(by) {
    state.place = Math.max(0, Math.min(all.steps.length - 1, state.place + by));
    draw();
  }
  function draw() {
    steps.value = state.place;
    legend.textContent = COLOURINGS[state.colouring][0];
    const here = all.steps[state.place];
    let rows = state.text
      ? all.steps.flatMap((step) => step.rows.map((row) => ({ ...row, step: step.step })))
      : here.rows.map((row) => ({ ...row, step: here.step }));
    rows = rows.filter((row) => holds(state.text, row.prompt, row.text));
    const value = sorts[state.sort];
    rows.sort((a, b) => (state.up ? 1 : -1) * ((value(a) ?? -Infinity) - (value(b) ?? -Infinity)));
    const sampled = all.steps.reduce((sum, step) => sum + step.rows.length, 0);
    counts.textContent = `${sampled.toLocaleString("en")} of ${all.total.toLocaleString("en")} completions of this run: of ${all.steps.length} of its ${all.of_steps} steps the best, the worst, the most surprising and random ones. `
      + (state.text ? `${rows.length} of them hold the text${rows.length > MOST_FOUND ? `; the first ${MOST_FOUND} are shown` : ""}.` : `Step ${here.step}: ${here.rows.length} of ${here.total}.`)
      + (all.has_pieces ? "" : " No checkpoint is left, so tokens have no texts and no colours.");
    list.replaceChildren(...rows.slice(0, MOST_FOUND).map((row, i) => completion(row, state.colouring, i < 2)));
  }
  body.append(h("div", { class: "row control" },
    h("button", { onclick: () => move(-1), "aria-label": "previous step" }, "◀"), steps, h("button", { onclick: () => move(1), "aria-label": "next step" }, "▶"),
    choice("sort by", Object.keys(sorts).map((name) => [name, name]), "reward", (name) => { state.sort = name; draw(); }),
    choice("order", [["down", "high to low"], ["up", "low to high"]], "down", (name) => { state.up = name === "up"; draw(); }),
    choice("colour tokens by", Object.keys(COLOURINGS).map((name) => [name, name]), "probability", (name) => { state.colouring = name; draw(); }),
    search((text) => { state.text = text; draw(); })), h("div", { class: "row" }, legend), counts, list);
  steps.addEventListener("change", () => { state.place = Number(steps.value); draw(); });
  draw();
}

function completion(row, colouring, open) {
  const parts = Object.entries(row.parts).map(([name, value]) => `${name} ${told(value)}`).join(", ");
  const facts = [`reward ${told(row.reward)}`, row.advantage === null ? null : `advantage ${told(row.advantage)}`,
    `${row.tokens} tokens`, row.finish === "length" ? "truncated" : row.finish, `surprise ${told(row.surprise)}`,
    row.versions[0] === row.versions[1] ? `version ${row.versions[0]}` : `versions ${row.versions.join(" to ")}`];
  const box = h("details", { class: "completion" }, h("summary", {},
    h("strong", {}, `step ${row.step}, group ${row.group}, sample ${row.sample}`), " ",
    ...row.why.map((why) => h("span", { class: "tag" }, why)), ` ${facts.filter(Boolean).join(" · ")} `, h("span", { class: "dim" }, row.text.slice(0, 100))));
  const fill = () => {
    if (box.children.length > 1) return;
    box.append(parts ? h("div", { class: "dim" }, `reward parts: ${parts}`) : "", h("div", { class: "dim" }, "prompt"), h("div", { class: "text" }, row.prompt),
      h("div", { class: "dim" }, "completion"), tokens(row, colouring));
  };
  box.addEventListener("toggle", fill);
  if (open) { fill(); box.setAttribute("open", ""); }
  return box;
}

// Settings and commands

function settings(body) {
  const keys = [...new Set(runs.flatMap((run) => run.settings.map(([key]) => key)))];
  const tables = runs.map((run) => new Map(run.settings.map(([key, value, source]) => [key, [value, source]])));
  const value = (table, key) => (table.get(key) || ["-"])[0];
  const differs = (key) => new Set(tables.map((table) => value(table, key))).size > 1;
  const given = (key) => tables.some((table) => (table.get(key) || ["", "default"])[1] !== "default");
  const kinds = [...(runs.length > 1 ? [["differ", "that differ"]] : []), ["given", "not at their defaults"], ["all", "all"]];
  const box = h("div", { class: "scroll" });
  function draw(kind) {
    const chosen = keys.filter((key) => kind === "all" || (kind === "differ" ? differs(key) : given(key)));
    box.replaceChildren(h("p", { class: "dim" }, `${chosen.length} of ${keys.length} settings`), h("table", {},
      h("tr", {}, h("th", {}, "key"), ...runs.map((run) => h("th", {}, run.name)), h("th", {}, "set by")),
      ...chosen.map((key) => h("tr", {}, h("td", {}, key), ...tables.map((table) => h("td", {}, value(table, key))),
        h("td", { class: "dim" }, [...new Set(tables.map((table) => (table.get(key) || ["", "-"])[1]))].join(" / "))))));
  }
  body.append(h("div", { class: "row control" }, choice("show", kinds, kinds[0][0], draw)), box);
  draw(kinds[0][0]);
}

function commands(parent, run) {
  const body = section(parent, "commands", "Go on with it");
  body.append(h("p", { class: "dim" }, "In the folder where this page was made:"),
    ...run.commands.flatMap(([what, command]) => [h("h3", {}, what), h("pre", { tabindex: "0" }, command)]),
    h("h3", {}, run.typed.length > 1 ? "its own commands, one an attempt" : "its own command"), h("pre", { tabindex: "0" }, run.typed.join("\n") || "command.txt is missing"));
}

function facts(run) {
  return h("div", { class: "scroll" }, h("table", {}, ...run.facts.map(([name, value]) => h("tr", {}, h("th", {}, name), h("td", {}, value)))));
}

function ofRun(parent, run, afterDiagnosis) {
  diagnosis(parent, run);
  afterDiagnosis();
  heldOut(parent, run);
  if (runs.length === 1) allCurves(parent);
  if (run.completions.sampled) fold(parent, `Completions of the training, token by token (${run.completions.of_steps} steps)`, (box) => completions(box, run), "completions");
  time(parent, run);
  if (runs.length === 1) fold(parent, "Settings", (box) => { box.append(facts(run)); settings(box); }, "settings");
  commands(parent, run);
}

async function unpacked() {
  const packed = Uint8Array.from(atob(document.getElementById("packed").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// All but the completions is built before the page has loaded, so that whatever prints it then prints its curves.
function begin() {
  found = JSON.parse(document.getElementById("data").textContent);
  runs = found.runs;
  const main = document.getElementById("main");
  head();
  if (runs.length === 1) ofRun(main, runs[0], () => story(main));
  else {
    story(main);
    allCurves(main);
    fold(main, "Settings", settings, "settings");
    const each = section(main, "runs", "Each run");
    for (const run of runs) fold(each, run.name, (box) => {
      box.append(...run.verdict.map((line) => h("p", {}, line)), facts(run));
      ofRun(box, run, () => {});
    });
  }
  document.documentElement.dataset.ready = "true";
}

begin();
