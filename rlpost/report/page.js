"use strict";
// Everything is built from text nodes and attributes: no text of a model or a user is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";
// Okabe and Ito's colours, told apart by colour-blind readers; the dashes tell the runs apart without colour
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d3b", "#7f7f7f"];
const DASHES = ["", "7 3", "2 2", "9 3 2 3", "4 4", "1 3", "12 4", "6 2 1 2"];
const PHASES = ["#7fb8e0", "#f2b48a", "#8fd3b4", "#e3b8cf", "#f0d48a", "#b9c3cf"];
const MOST_POINTS = 600; // of a curve that are drawn
const PAGE = 20; // held-out prompts shown at a time
const MOST_FOUND = 60; // completions that a search shows
const MAIN = [
  "reward/mean", "accuracy/lenient", "eval/accuracy_lenient", "eval/reward", "eval/loss", "eval/pair_accuracy",
  "eval/reward_margin", "loss/policy", "loss/sft", "loss/dpo", "loss/distill", "reward_margin", "pair_accuracy",
  "loss/kl", "entropy", "kl/ref", "kl/teacher", "sampler/logprob_gap", "ratio/clip_fraction", "grad_norm", "lr",
  "groups/zero_std",
  "completion/tokens_mean", "completion/truncated", "policy/lag_mean",
];
const MEANING = {
  "reward/mean": "mean reward of the step's completions",
  "accuracy/lenient": "share of sampled completions with a right answer",
  "eval/accuracy_lenient": "share of held-out prompts answered right, with its 95% interval",
  "eval/reward": "mean reward on held-out prompts, with its 95% interval",
  "eval/loss": "loss of held-out rows: per token, or per pair of replies",
  "eval/pair_accuracy": "share of held-out pairs whose chosen reply has the higher implicit reward",
  "eval/reward_margin": "implicit reward of the chosen reply minus that of the rejected one, held-out pairs",
  "loss/policy": "policy loss of the step's updates",
  "loss/sft": "negative log-likelihood per trained token",
  "loss/dpo": "loss per pair of replies",
  "reward_margin": "implicit reward of the chosen reply minus that of the rejected one",
  "pair_accuracy": "share of the step's pairs whose chosen reply has the higher implicit reward",
  "loss/kl": "KL term of the loss",
  "entropy": "mean entropy of the policy per token, in nats",
  "kl/ref": "divergence from the reference, nats per token",
  "loss/distill": "distillation loss per trained token",
  "kl/teacher": "mean log-prob of the model minus the teacher's, nats per sampled token",
  "sampler/logprob_gap": "mean |log-prob of trainer - log-prob of sampler| per token",
  "ratio/clip_fraction": "share of tokens whose ratio a bound clipped",
  "grad_norm": "gradient norm before clipping",
  "lr": "learning rate",
  "groups/zero_std": "share of groups whose rewards are all equal, which teach nothing",
  "completion/tokens_mean": "mean tokens of a completion",
  "completion/truncated": "share of completions cut at the token limit",
  "policy/lag_mean": "weight pushes between sampling and training",
};

let runs = [];
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

function told(value) {
  if (value === null || value === undefined) return "-";
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

const percent = (value) => `${(100 * value).toFixed(1)}%`;
const colour = (number) => COLOURS[number % COLOURS.length];
const dash = (number) => DASHES[number % DASHES.length];

function section(id, title) {
  const body = h("section", { id, "aria-label": title }, h("h2", {}, title));
  document.getElementById("main").append(body);
  return body;
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

function chart(title, meaning, lines) {
  // lines: {name, number, points}; a point is [step, value] or [step, value, low, high]
  const svg = s("svg", { tabindex: "0", role: "img", "aria-label": `${title}: ${meaning || "a metric"}; arrow keys read values` });
  const say = h("div", { class: "told", "aria-live": "polite" });
  const box = h("div", { class: "chart" }, h("h3", {}, title), meaning ? h("div", { class: "dim" }, meaning) : null, svg, say);
  const left = 52, right = 8, top = 8, bottom = 20, height = 190;
  let scales = null, at = null;

  function draw() {
    svg.replaceChildren();
    const width = svg.clientWidth || 360;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const visible = lines.filter((line) => !shown.hidden.has(line.number) && line.points.length);
    const log = shown.log;
    const usable = (value) => Number.isFinite(value) && (!log || value > 0);
    const xs = visible.flatMap((line) => [line.points[0][0], line.points[line.points.length - 1][0]]);
    let low = Infinity, high = -Infinity;
    for (const line of visible) for (const point of line.points) for (const value of point.slice(1)) {
      if (usable(value)) { low = Math.min(low, value); high = Math.max(high, value); }
    }
    if (!Number.isFinite(low)) {
      svg.append(s("text", { x: left, y: height / 2 }, log ? "no value above 0" : "no values"));
      scales = null;
      return;
    }
    if (low === 0 && high === 0) high = 1;
    if (low === high) { const more = Math.abs(low) / 2 || 1; low -= log ? low / 2 : more; high += more; }
    const x0 = Math.min(...xs), x1 = Math.max(...xs, x0 + 1);
    const [y0, y1] = log ? [Math.log10(low), Math.log10(high)] : [low, high];
    const X = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
    const Y = (y) => top + (1 - ((log ? Math.log10(y) : y) - y0) / (y1 - y0 || 1)) * (height - top - bottom);
    scales = { X, Y, x0, x1, width, visible, usable };
    for (const tick of ticks(y0, y1, 5)) {
      const value = log ? 10 ** tick : tick;
      svg.append(s("line", { class: "grid", x1: left, x2: width - right, y1: Y(value), y2: Y(value) }));
      svg.append(s("text", { x: left - 4, y: Y(value) + 4, "text-anchor": "end" }, told(value)));
    }
    for (const tick of ticks(x0, x1, 4)) svg.append(s("text", { x: X(tick), y: height - 5, "text-anchor": "middle" }, String(tick)));
    for (const line of visible) {
      const points = thinned(line.points.filter((point) => usable(point[1])));
      const stroke = colour(line.number);
      const path = (list) => list.map(([x, y], i) => `${i ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join("");
      const smooth = shown.smooth > 0 && points.length > 3;
      if (points.length > 1) svg.append(s("path", {
        d: path(points), fill: "none", stroke, "stroke-width": smooth ? 1 : 1.6, "stroke-opacity": smooth ? 0.35 : 1,
        "stroke-dasharray": dash(line.number),
      }));
      if (smooth) svg.append(s("path", {
        d: path(thinned(smoothed(line.points.filter((point) => usable(point[1])), shown.smooth)).filter((point) => usable(point[1]))),
        fill: "none", stroke, "stroke-width": 2, "stroke-dasharray": dash(line.number),
      }));
      if (points.length < 40) for (const [x, y, least, most] of points) {
        svg.append(s("circle", { cx: X(x), cy: Y(y), r: 2.4, fill: stroke }));
        if (least !== undefined && usable(least) && usable(most)) {
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
    const step = values.length ? values.reduce((a, b) => (Math.abs(b[1][0] - at) < Math.abs(a[1][0] - at) ? b : a))[1][0] : at;
    at = step;
    svg.append(s("line", { class: "cursor", x1: scales.X(step), x2: scales.X(step), y1: top, y2: height - bottom }));
    const parts = values.filter(([, found]) => found[0] === step).map(([line, found]) => {
      const range = found.length > 3 ? ` [${told(found[2])}, ${told(found[3])}]` : "";
      return (lines.length > 1 ? `${line.name} ` : "") + told(found[1]) + range;
    });
    say.textContent = `step ${step}: ${parts.join("; ")}`;
  }

  svg.addEventListener("pointermove", (event) => {
    if (!scales) return;
    const inside = event.clientX - svg.getBoundingClientRect().left;
    point(scales.x0 + ((inside - left) / (scales.width - left - right)) * (scales.x1 - scales.x0));
  });
  svg.addEventListener("keydown", (event) => {
    if (!scales || !["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) return;
    event.preventDefault();
    const steps = [...new Set(scales.visible.flatMap((line) => line.points.map((each) => each[0])))].sort((a, b) => a - b);
    const here = at === null ? -1 : steps.indexOf(at);
    const moved = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: steps.length - 1 }[event.key];
    point(steps[Math.max(0, Math.min(steps.length - 1, moved))]);
  });
  let seen = false;
  new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting) && !seen) { seen = true; draw(); }
  }, { rootMargin: "400px" }).observe(box);
  redraw.push(() => seen && draw());
  return box;
}

function linesOf(key) {
  return runs.map((run, number) => ({ name: run.name, number, points: run.curves[key] || [] })).filter((line) => line.points.length);
}

function charts(keys) {
  return h("div", { class: "charts" }, ...keys.map((key) => chart(key, MEANING[key], linesOf(key))));
}

// The parts of the page

function head(made) {
  const top = document.getElementById("top");
  const themes = ["system", "light", "dark"];
  const theme = h("button", { onclick: () => {
    const next = themes[(themes.indexOf(theme.dataset.theme || "system") + 1) % 3];
    theme.dataset.theme = next;
    theme.textContent = `colours: ${next}`;
    if (next === "system") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = next;
  } }, "colours: system");
  top.replaceChildren(
    h("h1", {}, runs.map((run) => run.name).join(" · ")),
    h("div", { class: "row dim" }, `report of rlpost ${made.rlpost}, ${made.made}`, theme),
    h("nav", { "aria-label": "Sections" }),
  );
}

function figure(found, isShare) {
  if (!found) return "not measured";
  const say = isShare ? percent : told;
  return found.low === null ? say(found.value) : `${say(found.value)} [${say(found.low)}, ${say(found.high)}]`;
}

function results() {
  const body = section("result", "Result");
  for (const [number, run] of runs.entries()) {
    const cards = run.headline.map((each) => {
      const prompts = (each.after || each.before).prompts;
      const paired = each.paired && each.paired.low !== null ? each.paired : null;
      const say = each.is_share ? percent : told;
      return h("div", { class: "card" },
        h("div", { class: "dim" }, `${each.name}${prompts ? `, ${prompts} held-out ${each.name === "loss" ? "rows" : "prompts"}` : ""}, 95% intervals`),
        h("div", { class: "big" }, `${each.before ? say(each.before.value) : "-"} → ${each.after ? say(each.after.value) : "-"}`),
        h("div", {}, `before ${figure(each.before, each.is_share)}`), h("div", {}, `after ${figure(each.after, each.is_share)}`),
        paired ? h("div", { class: paired.low > 0 ? "good" : paired.high < 0 ? "bad" : "" },
          `paired difference ${say(paired.value)} [${say(paired.low)}, ${say(paired.high)}]: ${paired.verdict}`) : null);
    });
    if (runs.length > 1) body.append(h("h3", {}, mark(number), ` ${run.name}`));
    body.append(cards.length ? h("div", { class: "cards" }, ...cards) : h("p", {}, "No held-out evaluation was made: the curves below are of training prompts."));
    body.append(h("details", runs.length > 1 ? {} : { open: "" }, h("summary", {}, "What was trained"), h("div", { class: "scroll" },
      h("table", {}, ...Object.entries(run.facts).map(([name, value]) => h("tr", {}, h("th", {}, name), h("td", {}, value)))))));
  }
}

function mark(number) {
  const svg = s("svg", { viewBox: "0 0 34 10", width: 34, height: 10, "aria-hidden": "true" });
  svg.append(s("line", { x1: 0, x2: 34, y1: 5, y2: 5, stroke: colour(number), "stroke-width": 3, "stroke-dasharray": dash(number) }));
  return svg;
}

function curves() {
  const body = section("curves", "Curves");
  const all = () => redraw.forEach((draw) => draw());
  const smooth = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, "aria-label": "smoothing",
    oninput: () => { shown.smooth = Number(smooth.value); all(); } });
  const log = h("input", { type: "checkbox", onchange: () => { shown.log = log.checked; all(); } });
  const legend = runs.length < 2 ? [] : runs.map((run, number) => {
    const box = h("input", { type: "checkbox", checked: "", onchange: () => {
      if (box.checked) shown.hidden.delete(number); else shown.hidden.add(number);
      all();
    } });
    return h("label", { class: "legend" }, box, mark(number), run.name);
  });
  body.append(h("div", { class: "row" }, h("label", { class: "row" }, "smoothing", smooth), h("label", {}, log, " log scale"), ...legend));
  const known = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))];
  const main = MAIN.filter((key) => known.includes(key));
  const parts = known.filter((key) => /^reward\/(?!mean$|std$|failed$|mean_drawn$)/.test(key));
  body.append(charts(main));
  if (parts.length) body.append(h("h3", {}, "Reward parts"), charts(parts));
  const rest = known.filter((key) => !main.includes(key) && !parts.includes(key) && !key.startsWith("time/"));
  const more = h("details", {}, h("summary", {}, `${rest.length} more metrics`));
  more.addEventListener("toggle", () => { if (more.open && more.children.length < 2) more.append(charts(rest)); });
  body.append(more);
}

function time() {
  const body = section("time", "Time and memory");
  for (const [number, run] of runs.entries()) {
    const sum = (key) => (run.curves[key] || []).reduce((total, point) => total + point[1], 0);
    const whole = sum("time/step");
    if (!whole) continue;
    const keys = Object.keys(run.curves).filter((key) => key.startsWith("time/") && key !== "time/step" && sum(key) > 0);
    const parts = keys.map((key) => [key.slice(5), sum(key)]).sort((a, b) => b[1] - a[1]);
    const rest = whole - parts.reduce((total, part) => total + part[1], 0);
    if (rest > 0) parts.push([parts.length ? "between the phases" : "training", rest]);
    const memory = Math.max(0, ...(run.curves["memory/peak_gb"] || []).map((point) => point[1]));
    if (runs.length > 1) body.append(h("h3", {}, mark(number), ` ${run.name}`));
    body.append(
      h("div", { class: "bar", role: "img", "aria-label": parts.map(([name, value]) => `${name} ${percent(value / whole)}`).join(", ") },
        ...parts.map(([name, value], i) => {
          const piece = h("span", { title: `${name} ${percent(value / whole)}` }, `${name} ${percent(value / whole)}`);
          piece.style.width = `${(100 * value) / whole}%`;
          piece.style.background = PHASES[i % PHASES.length];
          return piece;
        })),
      h("div", { class: "scroll" }, h("table", {},
        h("tr", {}, ...["phase", "seconds", "share", "a step"].map((name, i) => h("th", i ? { class: "figure" } : {}, name))),
        ...parts.map(([name, value]) => h("tr", {}, h("td", {}, name), ...[value.toFixed(1), percent(value / whole),
          `${(value / run.curves["time/step"].length).toFixed(2)} s`].map((text) => h("td", { class: "figure" }, text)))))),
      memory ? h("p", {}, `peak memory ${memory.toFixed(1)} GB`) : null);
  }
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))].filter((key) => key.startsWith("time/"));
  body.append(charts(keys));
}

function diagnosis() {
  const body = section("diagnosis", "Diagnosis");
  for (const run of runs) {
    if (runs.length > 1) body.append(h("h3", {}, run.name));
    for (const found of run.symptoms) body.append(h("div", { class: "symptom" },
      h("strong", {}, `${found.name}, steps ${found.steps[0]} to ${found.steps[1]}`), h("div", {}, found.evidence), h("div", {}, `What to do: ${found.fix}`)));
    if (!run.symptoms.length) body.append(h("p", {}, "Nothing stands out: no dead reward, no length hacking, no collapse."));
    if (run.warnings.length) body.append(h("details", {}, h("summary", {}, `${run.warnings.length} warnings`),
      h("ul", {}, ...run.warnings.map((line) => h("li", {}, line)))));
  }
}

function heldOut() {
  const having = runs.filter((run) => run.held_out && run.held_out.pairs.length);
  if (!having.length) return;
  const body = section("held-out", "Held-out prompts, before and after");
  const state = { run: having[0], kind: "all", text: "", count: PAGE };
  const list = h("div", {});
  const kinds = {
    all: () => true,
    "became right": (pair) => pair.after.score > pair.before.score,
    "became wrong": (pair) => pair.after.score < pair.before.score,
    "still wrong": (pair) => pair.after.score === pair.before.score && pair.after.score <= 0,
    "still right": (pair) => pair.after.score === pair.before.score && pair.after.score > 0,
  };
  const counts = h("div", { class: "row" });
  function draw() {
    const { pairs, steps, total } = state.run.held_out;
    const told = Object.entries(kinds).map(([name, is]) => `${name} ${pairs.filter(is).length}`).slice(1).join(", ");
    counts.replaceChildren(`${pairs.length} of ${total} prompts, before training and after step ${steps[1]}: ${told}`);
    const found = pairs.filter((pair) => kinds[state.kind](pair) && holds(state.text, pair.prompt, pair.before.text, pair.after.text));
    list.replaceChildren(...found.slice(0, state.count).map((pair) => h("div", { class: "card" },
      h("div", { class: "text" }, pair.prompt),
      h("div", { class: "pair" }, ...[["before", pair.before], ["after", pair.after]].map(([when, reply]) => h("div", {},
        h("div", { class: "dim" }, `${when}: ${reply.error ? `reward failed: ${reply.error}` : `score ${score(reply.score)}`}, ${reply.finish}`
          + (reply.answer ? `, answer read: ${reply.answer}` : "")),
        h("div", { class: "text" }, reply.text)))))));
    if (found.length > state.count) list.append(h("button", { onclick: () => { state.count += PAGE; draw(); } }, `${found.length - state.count} more`));
    if (!found.length) list.append(h("p", {}, "None."));
  }
  body.append(h("div", { class: "row" },
    having.length > 1 ? choice("run", having.map((run, i) => [i, run.name]), 0, (i) => { state.run = having[i]; draw(); }) : null,
    choice("show", Object.keys(kinds).map((name) => [name, name]), "all", (kind) => { state.kind = kind; state.count = PAGE; draw(); }),
    search((text) => { state.text = text; draw(); })), counts, list);
  draw();
}

const score = (value) => (value === null ? "none" : told(value));
const holds = (text, ...where) => !text || where.some((each) => each.toLowerCase().includes(text.toLowerCase()));

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

function completions() {
  const having = runs.filter((run) => run.completions.steps.length);
  if (!having.length) return;
  const body = section("completions", "Completions");
  const state = { run: having[0], place: having[0].completions.steps.length - 1, sort: "reward", up: false, text: "", colouring: "probability" };
  const list = h("div", {}), counts = h("p", { class: "dim" }), legend = h("span", { class: "dim" });
  const steps = h("select", { "aria-label": "step" });
  const sorts = { reward: (row) => row.reward, advantage: (row) => row.advantage, length: (row) => row.tokens, surprise: (row) => row.surprise };

  function fill() {
    steps.replaceChildren(...state.run.completions.steps.map((each, i) => h("option", { value: i }, `step ${each.step}`)));
    state.place = Math.min(state.place, state.run.completions.steps.length - 1);
  }
  function move(by) {
    state.place = Math.max(0, Math.min(state.run.completions.steps.length - 1, state.place + by));
    draw();
  }
  function draw() {
    const all = state.run.completions;
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
  body.append(h("div", { class: "row" },
    having.length > 1 ? choice("run", having.map((run, i) => [i, run.name]), 0, (i) => { state.run = having[i]; fill(); draw(); }) : null,
    h("button", { onclick: () => move(-1), "aria-label": "previous step" }, "◀"), steps, h("button", { onclick: () => move(1), "aria-label": "next step" }, "▶"),
    choice("sort by", Object.keys(sorts).map((name) => [name, name]), "reward", (name) => { state.sort = name; draw(); }),
    choice("order", [["down", "high to low"], ["up", "low to high"]], "down", (name) => { state.up = name === "up"; draw(); }),
    choice("colour tokens by", Object.keys(COLOURINGS).map((name) => [name, name]), "probability", (name) => { state.colouring = name; draw(); }),
    search((text) => { state.text = text; draw(); })), h("div", { class: "row" }, legend), counts, list);
  steps.addEventListener("change", () => { state.place = Number(steps.value); draw(); });
  fill();
  draw();
}

function completion(row, colouring, open) {
  const parts = Object.entries(row.parts).map(([name, value]) => `${name} ${told(value)}`).join(", ");
  const facts = [`reward ${score(row.reward)}`, row.advantage === null ? null : `advantage ${told(row.advantage)}`,
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

// Settings

function settings() {
  const body = section("settings", "Settings");
  const keys = [...new Set(runs.flatMap((run) => run.settings.map(([key]) => key)))];
  const tables = runs.map((run) => new Map(run.settings.map(([key, value, source]) => [key, [value, source]])));
  const differs = (key) => new Set(tables.map((table) => (table.get(key) || ["-"])[0])).size > 1;
  const given = (key) => tables.some((table) => (table.get(key) || ["", "default"])[1] !== "default");
  const kinds = runs.length > 1 ? [["differ", "that differ"], ["given", "not at their defaults"], ["all", "all"]] : [["given", "not at their defaults"], ["all", "all"]];
  const state = { kind: kinds[0][0] };
  const box = h("div", { class: "scroll" });
  function draw() {
    const chosen = keys.filter((key) => state.kind === "all" || (state.kind === "differ" ? differs(key) : given(key)));
    box.replaceChildren(h("p", { class: "dim" }, `${chosen.length} of ${keys.length} settings`), h("table", {},
      h("tr", {}, h("th", {}, "key"), ...runs.map((run) => h("th", {}, run.name)), h("th", {}, "set by")),
      ...chosen.map((key) => h("tr", runs.length > 1 && differs(key) ? { class: "differs" } : {}, h("td", {}, key),
        ...tables.map((table) => h("td", {}, (table.get(key) || ["-"])[0])),
        h("td", { class: "dim" }, [...new Set(tables.map((table) => (table.get(key) || ["", "-"])[1]))].join(" / "))))));
  }
  body.append(choice("show", kinds, state.kind, (kind) => { state.kind = kind; draw(); }), box);
  draw();
}

function again() {
  const body = section("again", "Do it again");
  for (const run of runs) {
    body.append(h("h3", {}, run.name), h("p", {}, run.commands.length > 1 ? `Its ${run.commands.length} commands, one an attempt:` : "Its command:"),
      h("pre", { tabindex: "0" }, run.commands.join("\n") || "command.txt is missing"),
      h("p", {}, "Run it again with the same settings, and compare:"), h("pre", { tabindex: "0" }, run.reproduce));
  }
}

async function begin() {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const found = JSON.parse(await new Response(stream).text());
  runs = found.runs;
  head(found);
  for (const part of [results, curves, diagnosis, heldOut, completions, time, settings, again]) part();
  const nav = document.querySelector("nav");
  for (const part of document.querySelectorAll("section")) nav.append(h("a", { href: `#${part.id}` }, part.getAttribute("aria-label")));
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => redraw.forEach((draw) => draw()), 100); });
  document.documentElement.dataset.ready = "true";
}

begin();
