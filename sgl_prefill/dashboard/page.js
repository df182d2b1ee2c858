"use strict";
// Shows snapshots as they come. Whatever a client or a prompt may have written goes through textContent.
(() => {
const HISTORY = 300, RETRY_MS = 1000, KEY = "sgl_prefill.key", THEME = "sgl_prefill.theme";
const $ = (id) => document.getElementById(id);
const storage = (() => { try { return window.sessionStorage; } catch { return null; } })(); // blocked in some browsers
const color = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const ticked = new Intl.NumberFormat("en"), whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const shown = (value) => value === null || value === undefined ? "–"
  : typeof value !== "number" ? String(value)
  : Number.isInteger(value) || Math.abs(value) >= 1000 ? whole.format(value) : value.toPrecision(3);
const percent = (value) => value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`;

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}
// The page is written only where it changes: a browser lays out again whatever is written, also if it says the same.
function write(place, text) { if (place.textContent !== text) place.textContent = text; }
function label(place, text) { if (place.getAttribute("aria-label") !== text) place.setAttribute("aria-label", text); }
function meter(share, text) {
  const made = element("meter");
  made.value = share;
  label(made, text);
  return made;
}
function put(id, value, text = shown(value)) {
  const place = $(id), known = value === null || value === undefined ? "" : String(value);
  write(place, text);
  if (place.dataset.value !== known) place.dataset.value = known;
}
function fill(id, rows) {
  const body = $(id).tBodies[0];
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, place) => {
    const row = body.rows[place] ?? body.insertRow();
    cells.forEach((cell, column) => {
      const made = row.cells[column] ?? row.insertCell();
      if (cell instanceof Node) made.replaceChildren(cell);
      else write(made, typeof cell === "string" ? cell : shown(cell));
    });
  });
  $(id).hidden = rows.length === 0;
}

// A chart is drawn while it is in view, and when it has changed since it was drawn.
const inView = new Set(), widths = new Map(), drawings = new Map(), drawn = new Map();
const watcher = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
  if (!isIntersecting) inView.delete(target.id);
  else { inView.add(target.id); drawIfNew(target.id); }
}));
const resizer = new ResizeObserver((entries) => entries.forEach(({ target, contentRect }) => {
  widths.set(target.id, contentRect.width);
  drawIfNew(target.id);
}));
function drawing(id, data, text, paintIt) {
  label($(id), text);
  if (!drawings.has(id)) { watcher.observe($(id)); resizer.observe($(id)); }
  drawings.set(id, { data: JSON.stringify(data), paintIt });
  drawIfNew(id);
}
function drawIfNew(id) {
  if (!inView.has(id) || !widths.has(id)) return;
  const { data, paintIt } = drawings.get(id), key = `${widths.get(id)} ${data}`;
  if (drawn.get(id) === key) return;
  drawn.set(id, key);
  paintIt();
}

// Charts: uPlot draws them.
const charts = new Map();
function draw(id, series, data, text, more = {}) {
  drawing(id, data, text, () => {
    const host = $(id), size = { width: Math.max(host.clientWidth, 50), height: host.clientHeight };
    let chart = charts.get(id);
    if (!chart) {
      const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif", labelSize: 16, labelGap: 0 };
      chart = new uPlot({
        ...size, cursor: { show: false }, legend: { show: false },
        scales: { x: { time: false }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.05 : 1] } },
        axes: [{ ...axis, size: 24, ...more.x }, { ...axis, size: 46, values: (_, ticks) => ticks.map((tick) => ticked.format(tick)), ...more.y }],
        series: [{}, ...series], ...more.options,
      }, data, host);
      charts.set(id, chart);
      return;
    }
    if (chart.width !== size.width) chart.setSize(size);
    chart.setData(data);
  });
}
const line = (name) => ({ stroke: color(name), width: 1.5, points: { show: false } });
const bars = (name) => ({ stroke: color(name), fill: color(name), width: 0, paths: uPlot.paths.bars({ size: [0.8, 60] }), points: { show: false } });
function histogram(id, found, what, unit) {
  if (!found) { label($(id), `${what}: unknown`); return; }
  const names = [...found.edges.map((edge) => `≤${edge >= 1000 ? edge / 1000 + "k" : edge}`), "more"];
  const text = names.map((name, place) => `${name}: ${found.counts[place]}`).join(", ");
  $(id).dataset.counts = found.counts.join(",");
  draw(id, [bars("--one")], [found.counts.map((_, place) => place), found.counts], `${what}: ${text}`, {
    y: { label: "requests" },
    x: { label: unit, values: (_, ticks) => ticks.map((tick) => tick % 2 ? "" : names[tick] ?? ""), splits: () => names.map((_, place) => place), space: 20, grid: { show: false } },
    options: { scales: { x: { time: false, range: [-0.6, names.length - 0.4] }, y: { range: (_, low, high) => [0, Math.max(high, 1) * 1.05] } } },
  });
}

// Parts of a whole: d3-hierarchy lays them out, along a bar or as a tree map.
function cells(id, root, tile, textOf) {
  const host = $(id), width = host.clientWidth, height = host.clientHeight;
  d3.treemap().tile(tile).size([width, height]).paddingInner(0).paddingTop((node) => node.depth && node.children ? 16 : 0).round(true)(root);
  host.replaceChildren(...root.descendants().slice(1).filter((node) => node.x1 - node.x0 > 1 && node.y1 - node.y0 > 1).map((node) => {
    const cell = element("div", node.x1 - node.x0 > 30 && node.y1 - node.y0 > 14 ? textOf(node.data) : "", "cell");
    cell.title = textOf(node.data);
    Object.assign(cell.style, { left: `${node.x0}px`, top: `${node.y0}px`, width: `${node.x1 - node.x0}px`, height: `${node.y1 - node.y0}px` });
    return cell;
  }));
}
function bar(id, parts, unit) {
  const all = parts.reduce((sum, [, value]) => sum + value, 0) || 1;
  const text = (one) => `${one.name}: ${shown(one.value)} ${unit} (${percent(one.value / all)})`;
  drawing(id, parts, parts.map(([name, value]) => text({ name, value })).join("; "), () => {
    const root = d3.hierarchy({ children: parts.map(([name, value]) => ({ name, value })) }).sum((one) => one.value ?? 0);
    cells(id, root, d3.treemapDice, text);
  });
}
const nameOf = (prefix) => `#${prefix.name}`;
function tree(prefixes) {
  const by = $("tree-by").value, nodes = prefixes.largest.map((prefix) => ({ ...prefix, children: [] }));
  const size = (one) => by === "hits" ? one.hits : one.tokens + one.below;
  const top = [];
  for (const node of nodes) (node.parent === null ? top : nodes[node.parent].children).push(node);
  for (const node of nodes) node.own = Math.max(size(node) - node.children.reduce((sum, child) => sum + size(child), 0), 0);
  const others = prefixes.tokens - top.reduce((sum, node) => sum + node.tokens + node.below, 0);
  const rest = by === "tokens" && others > 0 ? [{ own: others, rest: true, tokens: others, below: 0, children: [] }] : [];
  const text = (one) => one.rest ? `all others: ${shown(others)} tokens` : `${nameOf(one)}: ${shown(one.tokens + one.below)} tokens, ${shown(one.hits)} hits`;
  const largest = `${prefixes.count} cached prefixes of ${prefixes.tokens} tokens; the largest: ${top.slice(0, 5).map(text).join("; ")}`;
  drawing("tree", [by, others, prefixes.largest], largest, () => {
    const root = d3.hierarchy({ children: [...top, ...rest] }).sum((one) => one.own ?? 0).sort((a, b) => b.value - a.value);
    cells("tree", root, d3.treemapSquarify, text);
  });
}

// One snapshot.
let last = null, history = [[], [], []], before = null;
function show(message) {
  last = message;
  const { http, engines: [engine] } = message;
  if (!engine) return;
  write($("model"), engine.model);
  showRefusals(http);
  showMemory(engine);
  if (!engine.now) { $("next-note").textContent = `--scheduling ${engine.scheduling}: SGLang's own scheduler decides, and shows nothing here.`; return; }
  showNow(engine);
  showSpeed(engine);
  showClients(engine, http);
}
function showRefusals(http) {
  const reasons = Object.entries(http.refused).sort();
  put("refused", reasons.reduce((sum, [, count]) => sum + count, 0));
  fill("refusals", reasons.length ? reasons : [["none", 0]]);
}
function showNow({ now, steps, knee_tokens: knee }) {
  put("waiting", now.waiting);
  put("waiting-tokens", now.waiting_tokens);
  put("oldest", now.oldest_s);
  histogram("by-age", now.by_age, "Waiting requests by age in seconds", "age, s");
  histogram("by-predicted", now.by_predicted, "Waiting requests by predicted milliseconds", "predicted, ms");
  fill("next", now.next.map((one) => [one.rides ? "rides along" : "first", one.input_tokens, `${shown(one.cached_tokens)} (${percent(one.cached_tokens / one.input_tokens)})`,
    one.cost, one.credit, one.score, one.wait_s, one.background ? "background" : one.client || "–"]));
  const many = now.next.length && now.next[0].of > now.next.length ? ` The step takes ${now.next[0].of} requests.` : "";
  write($("next-note"), now.next.length ? `Score = cost - credit, in ${now.unit}; the smallest runs.${many}` : "Nobody waits.");
  const places = steps.forward_ms.map((_, place) => place - steps.forward_ms.length);
  const perStep = { x: { label: "step, -1 is the last" } };
  const middle = (list) => shown([...list].sort((a, b) => a - b)[list.length >> 1]);
  draw("predicted-actual", [line("--one"), line("--two")], [places, steps.predicted_ms, steps.forward_ms],
    `${places.length} steps; median actual ${middle(steps.forward_ms)} ms, predicted ${middle(steps.predicted_ms)} ms`, { ...perStep, y: { label: "ms" } });
  draw("step-tokens", [bars("--one"), line("--two")], [places, steps.tokens, places.map(() => knee || null)],
    `${places.length} steps; median ${middle(steps.tokens)} computed tokens, packing knee ${knee || "none"}`, { ...perStep, y: { label: "tokens" } });
}
function showMemory({ memory, cache, totals }) {
  const rows = memory ? memory.rows : [];
  fill("memory-table", rows.map((row) => [row.what, row.mib, row.bytes_per_token]));
  bar("memory-bar", rows.map((row) => [row.what, row.mib]), "MiB");
  put("kept", totals?.kept_tokens);
  put("evicted", totals?.evicted_tokens);
  if (!cache) return;
  put("cached-now", cache.cached_tokens + cache.in_use_tokens);
  put("kv-tokens", cache.kv_tokens);
  put("removed", cache.removed_tokens);
  put("wanted", cache.wanted_removals);
  if (!cache.prefixes) return;
  write($("tree-note"), `${shown(cache.prefixes.count)} prefixes, as of ${shown(cache.prefixes.age_s)} s ago`);
  tree(cache.prefixes);
  fill("most-hit", cache.prefixes.most_hit.map((one) => [nameOf(one), one.tokens, one.hits]));
}
function showSpeed({ start, at_s: at, totals, steps, speed }) {
  put("requests", totals.requests);
  put("cached", totals.cached_tokens);
  const share = totals.input_tokens ? totals.cached_tokens / totals.input_tokens : null;
  put("hit-share", share, percent(share));
  if (before && before.start === start && at > before.at) {
    const seconds = at - before.at, point = [at, (totals.requests - before.requests) / seconds, (totals.input_tokens - before.tokens) / seconds];
    put("requests-per-s", point[1]);
    put("tokens-per-s", point[2]);
    history.forEach((column, place) => { column.push(place === 2 ? point[2] / 1000 : point[place]); if (column.length > HISTORY) column.shift(); });
    draw("rates", [line("--one"), line("--two")], [history[0].map((one) => one - at), history[1], history[2]],
      `${shown(point[1])} requests and ${shown(point[2])} prompt tokens a second now`, { x: { label: "time, s; 0 is now" }, y: { label: "per second" } });
  }
  before = { start, at, requests: totals.requests, tokens: totals.input_tokens };
  bar("parts", Object.entries(steps.parts_ms), "ms");
  fill("latency", speed.map((one) => [one.up_to_tokens ? `up to ${shown(one.up_to_tokens)}` : "more", one.requests, one.p50_s, one.p99_s]));
}
function showClients({ clients }, http) {
  write($("clients-note"), http.named_by === "none" ? "All are one client (--fair-by none)." : clients.length ? "Of the last 2,000 requests, and of those that wait."
    : `No ${http.named_by} is named by requests.`);
  fill("client-table", clients.map((one) => [one.client || "not named", percent(one.share), one.requests, one.waiting, one.wait_s, one.longest_wait_s]));
}

// The stream. A browser's own EventSource sends no key.
let listening = null;
const headers = () => { const key = storage?.getItem(KEY); return key ? { authorization: `Bearer ${key}` } : {}; };
const pause = (ms) => new Promise((done) => { setTimeout(done, ms); });
async function listen() {
  for (;;) {
    if (document.hidden) await new Promise((done) => { document.addEventListener("visibilitychange", done, { once: true }); });
    listening = new AbortController();
    try {
      const reply = await fetch(`dashboard/events?per_second=${$("rate").value}`, { headers: headers(), signal: listening.signal, cache: "no-store" });
      if (reply.status === 401) { await askForKey(); continue; }
      if (!reply.ok) throw new Error(`the server answers ${reply.status}`);
      await read(reply.body.getReader());
      $("status").textContent = "the server has ended the stream, trying again";
    } catch (error) {
      if (listening.signal.aborted) continue; // another rate, or the page was hidden
      if (!(error instanceof TypeError) && !String(error.message).startsWith("the server")) console.error(error);
      $("status").textContent = "no connection, trying again";
    }
    await pause(RETRY_MS);
  }
}
async function read(reader) {
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const events = text.split("\n\n");
    text = events.pop();
    const snapshot = events.filter((event) => event.startsWith("data: ")).pop();
    if (snapshot) { show(JSON.parse(snapshot.slice(6))); write($("status"), "live"); }
    else if (events.includes(": a step computes")) $("status").textContent = "a long step computes";
  }
}
function askForKey() {
  $("status").textContent = "this server asks for a key";
  $("key-form").hidden = false;
  $("key").focus();
  return new Promise((done) => {
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      storage?.setItem(KEY, $("key").value);
      $("key-form").hidden = true;
      done();
    };
  });
}

// A labelled prompt, or a question about a state.
async function ask(event) {
  event.preventDefault();
  $("ask-error").textContent = "";
  const prompt = $("prompt").value, question = $("question").value.trim();
  const labels = $("labels").value.split("\n").filter((label) => label !== "");
  try {
    if (question) {
      const criteria = Object.fromEntries(labels.map((label) => [label.trim(), null]));
      const body = { model: "jev-latest", state: prompt, questions: { asked: { type: "choice", instructions: question, criteria } } };
      showAnswer(scoresOf(await posted("v1/systemone", body)));
    } else showAnswer((await posted("v1/completions", { model: "default", prompt, allowed_tokens: labels })).choices[0].label_scores);
  } catch (error) { $("ask-error").textContent = error.message; }
}
async function posted(path, body) {
  const reply = await fetch(path, { method: "POST", headers: { ...headers(), "content-type": "application/json" }, body: JSON.stringify(body) });
  const answer = await reply.json();
  if (reply.ok) return answer;
  throw new Error(answer.error?.message ?? answer.message ?? answer.detail?.message ?? answer.detail?.[0]?.msg ?? `the server answers ${reply.status}`);
}
function scoresOf({ answers: { asked }, usage, x_cached_tokens, x_predicted_ms, x_actual_ms }) {
  const labels = Object.entries(asked.probabilities).map(([label, probability]) => ({ label, probability, logprob: shown(null) }));
  return { labels, label_mass: asked.x_label_mass, prompt_tokens: usage.input_tokens, cached_tokens: x_cached_tokens,
    queue_ms: null, predicted_jct_ms: x_predicted_ms, actual_ms: x_actual_ms };
}
function showAnswer(scores) {
  $("answer").hidden = false;
  put("mass", scores.label_mass);
  put("ask-tokens", scores.prompt_tokens);
  put("ask-cached", scores.cached_tokens);
  put("ask-queue", scores.queue_ms);
  put("ask-predicted", scores.predicted_jct_ms);
  put("ask-actual", scores.actual_ms);
  fill("distribution", [...scores.labels].sort((a, b) => b.probability - a.probability).map((one) => {
    return [JSON.stringify(one.label), shown(one.probability), meter(one.probability, `probability of ${one.label}`), one.logprob];
  }));
}

// Light or dark.
function paint(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
  for (const chart of charts.values()) chart.redraw(false, true);
}
const system = matchMedia("(prefers-color-scheme: dark)");
const chosen = () => storage?.getItem(THEME) ?? (system.matches ? "dark" : "light");
$("theme").onclick = () => { storage?.setItem(THEME, chosen() === "dark" ? "light" : "dark"); paint(chosen()); };
system.addEventListener("change", () => paint(chosen()));
$("rate").onchange = () => listening?.abort();
document.addEventListener("visibilitychange", () => { if (document.hidden) listening?.abort(); });
$("tree-by").onchange = () => last && show(last);
$("ask-form").onsubmit = ask;
for (const table of ["next", "refusals", "memory-table", "most-hit", "latency", "client-table", "distribution"]) $(table).hidden = true;
// Tooltips need a pointer: the same texts as a list.
const told = [...document.querySelectorAll("[title]")].map((term) => [term.textContent, term.title]);
$("terms").append(...told.flatMap(([term, text]) => [element("dt", term), element("dd", text)]));
paint(chosen());
listen();
})();
