"use strict";

const POLL_MS = 1000;
const WINDOW_S = 300;
const LENGTH_WINDOW_S = 120;
const PROCESS_SILENT_S = 60;
const KEY = "outrider.key";
const ORIGINS = ["draft", "recovery", "bonus", "target"];

const byId = (id) => document.getElementById(id);
const seconds = () => performance.now() / 1000;
const points = []; // {at, in_flight, batch, qps, mean_depth, tokens}, oldest first
const latencies = new Map(); // Api process -> {at, summary}: with several, every poll may reach another one
let model = null;
let answering = null;

// --- asking the server -----------------------------------------------------------------------------------------------------

function headers(more) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, Authorization: `Bearer ${key}` } : { ...more };
}

async function ask(path, options = {}) {
  const reply = await fetch(path, { cache: "no-store", ...options, headers: headers(options.headers) });
  if (reply.ok) return reply;
  if (reply.status === 401) byId("key-box").open = true;
  const body = await reply.json().catch(() => null);
  throw new Error(body?.error?.message ?? `the server answered ${reply.status}`);
}

async function poll() {
  try {
    if (!document.hidden) {
      show(await (await ask("dashboard/data")).json());
      connected("live", true);
    }
  } catch (error) {
    connected(error instanceof TypeError ? "the server cannot be reached; trying again" : error.message, false);
  }
  setTimeout(poll, POLL_MS);
}

function connected(text, isLive) {
  if (byId("connection").textContent !== text) byId("connection").textContent = text;
  byId("connection").classList.toggle("wrong", !isLive);
  document.body.classList.toggle("stale", !isLive);
}

// --- what the cluster does -------------------------------------------------------------------------------------------------

function show(data) {
  const now = seconds();
  model = data.model;
  byId("model").textContent = model.name;
  remember(now, data);
  showLatency(now);
  showLength(now);
  showBreakEven(data.break_even);
  byId("throughput").textContent = number(data.speculation.tokens_per_s);
  showGain(data);
  showReplicas(data);
  drawChart(now, data.max_depth);
}

function remember(now, data) {
  points.push({ at: now, ...data.load, lanes: new Map(data.lanes.map((lane) => [lane.lane_id, lane])) });
  while (points[0].at < now - WINDOW_S) points.shift();
  latencies.set(data.latency.process, { at: now, summary: data.latency });
  for (const [process, { at }] of latencies) if (at < now - PROCESS_SILENT_S) latencies.delete(process);
}

function showLatency(now) {
  const heard = [...latencies.values()].map((entry) => entry.summary);
  setText("ttft", milliseconds(percentile(heard, "ttft", 0.5)));
  setText("ttft-note", `p50 · p95 ${milliseconds(percentile(heard, "ttft", 0.95))}`);
  setText("itl", milliseconds(percentile(heard, "itl", 0.5)));
  const processes = heard.length > 1 ? `, ${heard.length} API processes together` : "";
  setText("latency-note", `Times are those of HTTP requests in the last two minutes${processes}.`);
}

/** Of the counts of all processes together; each names its own steps, and all of one release name the same. */
function percentile(summaries, kind, share) {
  const counts = new Map();
  for (const summary of summaries) {
    for (const [step, count] of summary[kind]) {
      const ms = 10 ** (step / summary.steps_per_factor_of_ten);
      counts.set(ms, (counts.get(ms) ?? 0) + count);
    }
  }
  const sorted = [...counts].sort((a, b) => a[0] - b[0]);
  let left = share * sorted.reduce((sum, entry) => sum + entry[1], 0);
  for (const [ms, count] of sorted) if ((left -= count) <= 0) return ms;
  return null;
}

/** Every target step of a request says one token of its own: accepted length = tokens / (tokens - accepted draft tokens). */
function showLength(now) {
  const last = points[points.length - 1];
  const first = points.find((point) => point.at >= now - LENGTH_WINDOW_S);
  let [tokens, steps] = counted(last.lanes, first.lanes);
  let note = "tokens per target step";
  if (steps === 0) {
    [tokens, steps] = counted(last.lanes, new Map());
    note += ", since start";
  }
  setText("length", steps ? (tokens / steps).toFixed(2) : "–");
  setText("length-note", note);
}

function counted(lanes, before) {
  let tokens = 0;
  let accepted = 0;
  for (const [id, lane] of lanes) {
    const old = before.get(id);
    const isSame = old && old.tokens <= lane.tokens;
    tokens += lane.tokens - (isSame ? old.tokens : 0);
    accepted += lane.accepted - (isSame ? old.accepted : 0);
  }
  return [tokens, tokens - accepted];
}

function showBreakEven(told) {
  let text = "–";
  let note = "requests in flight";
  if (told.is_known && told.concurrency === null) [text, note] = [`> ${told.largest}`, "requests in flight: it pays at all loads"];
  else if (told.is_known && told.per_lane <= 1) [text, note] = ["none", "drafts pay at no load"];
  else if (told.is_known) text = String(told.concurrency);
  setText("break-even", text);
  setText("break-even-note", note);
}

function showGain(data) {
  const { tokens_per_s: now, without, gain } = data.speculation;
  const most = Math.max(now, without ?? 0, 1e-9);
  byId("bar-now").style.width = `${(100 * now) / most}%`;
  byId("bar-without").style.width = `${(100 * (without ?? 0)) / most}%`;
  setText("rate-now", `${number(now)} tokens/s`);
  setText("rate-without", without === null ? "–" : `≈ ${number(without)} tokens/s`);
  setText("gain", gainSentence(data, gain));
  setText("reason", sentence(data.reason));
  const reasons = data.lanes.filter((lane) => lane.why).map((lane) => `Lane ${short(lane.lane_id)}: ${lane.why}.`);
  setItems("lane-reasons", reasons);
}

function gainSentence(data, gain) {
  const depth = data.load.mean_depth;
  if (gain === null) return "Nobody is being answered.";
  if (depth === 0) return "No drafts in the last two seconds: what is said is the target's own.";
  const numbers = `acceptance ${data.acceptance.toFixed(2)}, mean depth ${depth.toFixed(1)}`;
  return `${gain.toFixed(2)} times the tokens, by the controller's cost model at this load (${numbers}).`;
}

function showReplicas(data) {
  const rows = data.lanes.map((lane) => [
    ["Target", `lane ${short(lane.lane_id)}${lane.leaving ? ", leaving" : ""}`],
    [device(lane), lane.dtype],
    [`${lane.running} running, ${lane.waiting} waiting`, `depth ${lane.mean_depth.toFixed(1)}, ${number(lane.tokens_per_s)} tokens/s; drafts: ${lane.draft}, ${lane.draft_state}`],
  ]);
  for (const draft of data.drafts) {
    const merged = draft.mean_merged === null ? "not asked yet" : `${draft.mean_merged.toFixed(1)} messages per step`;
    rows.push([
      ["Draft", short(draft.draft_id)],
      [device(draft), ""],
      [`serves ${count(draft.lanes, "lane")}, ${count(draft.sequences, "request")}`, merged],
    ]);
  }
  byId("parts").replaceChildren(...rows.map(row));
  const wanted = data.replicas;
  setItems("wanted", wanted ? [`Lanes wanted: ${wanted.lanes}: ${wanted.lanes_reason}.`, `Drafts wanted: ${wanted.drafts}: ${wanted.drafts_reason}.`] : []);
}

function row(cells) {
  const line = document.createElement("tr");
  cells.forEach(([text, detail], index) => {
    const cell = document.createElement(index ? "td" : "th");
    if (!index) cell.scope = "row";
    cell.append(text);
    if (detail) cell.appendChild(document.createElement("small")).textContent = detail;
    line.append(cell);
  });
  return line;
}

function device(part) {
  return part.gpus > 0 ? `${part.device}, ${count(part.gpus, "GPU")}` : part.device;
}

// --- the chart -------------------------------------------------------------------------------------------------------------

const GUTTER = 30;
const SVG = "http://www.w3.org/2000/svg";

function drawChart(now, maxDepth) {
  const chart = byId("chart");
  const width = chart.clientWidth;
  const height = chart.clientHeight;
  if (!width) return;
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const span = Math.min(WINDOW_S, Math.max(60, now - points[0].at));
  const last = points[points.length - 1];
  const panels = [
    { title: `${last.in_flight} in flight`, more: `${last.batch.toFixed(1)} per lane (dotted)`, top: most("in_flight", 4), lines: [["in_flight", "load", "area"], ["batch", "batch", null]] },
    { title: `${last.qps.toFixed(2)} requests/s`, more: "", top: most("qps", 1), lines: [["qps", "rate", null]] },
    { title: `mean depth ${last.mean_depth.toFixed(1)}`, more: `of at most ${maxDepth}`, top: Math.max(maxDepth, 1), lines: [["mean_depth", "depth", "depth-area"]] },
  ];
  const heightOfPanel = (height - 18) / panels.length;
  const parts = panels.flatMap((panel, index) => drawPanel(panel, index * heightOfPanel, heightOfPanel, { now, span, width }));
  parts.push(label(GUTTER, height - 4, "start", `${Math.round(span)} s ago`), label(width, height - 4, "end", "now"));
  chart.replaceChildren(...parts);
  chart.setAttribute("aria-label", `Load and depth over time. Now: ${last.in_flight} requests in flight, ${last.batch.toFixed(1)} per lane, ${last.qps.toFixed(2)} requests per second, mean depth ${last.mean_depth.toFixed(1)} of ${maxDepth}.`);
}

function most(name, least) {
  return Math.max(least, ...points.map((point) => point[name]));
}

function drawPanel(panel, y, height, { now, span, width }) {
  const top = y + 26;
  const bottom = y + height - 8;
  const x = (at) => width - ((width - GUTTER) * (now - at)) / span;
  const level = (value) => bottom - ((bottom - top) * value) / panel.top;
  const parts = [label(0, y + 14, "start", panel.title, "title"), label(width, y + 14, "end", panel.more)];
  for (const value of [0, panel.top]) {
    parts.push(shape("line", "axis", { x1: GUTTER, x2: width, y1: level(value), y2: level(value) }));
    parts.push(label(GUTTER - 6, level(value) + 4, "end", tick(value), "tick"));
  }
  for (const [name, line, area] of panel.lines) {
    const path = points.map((point, i) => `${i ? "L" : "M"}${x(point.at).toFixed(1)} ${level(point[name]).toFixed(1)}`).join("");
    if (area) parts.push(shape("path", area, { d: `${path}L${width} ${bottom}L${x(points[0].at).toFixed(1)} ${bottom}Z` }));
    parts.push(shape("path", line, { d: path }));
  }
  return parts;
}

function tick(value) {
  return Number.isInteger(value) ? String(value) : value.toFixed(1);
}

function shape(kind, name, attributes) {
  const made = document.createElementNS(SVG, kind);
  made.setAttribute("class", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function label(x, y, anchor, text, name = "label") {
  const made = shape("text", name, { x, y, "text-anchor": anchor });
  made.textContent = text;
  return made;
}

// --- the prompt ------------------------------------------------------------------------------------------------------------

async function answer() {
  if (!model) return status("the server has not answered yet", true);
  const counts = Object.fromEntries(ORIGINS.map((origin) => [origin, 0]));
  const started = seconds();
  answering = new AbortController();
  busy(true);
  byId("answer").replaceChildren();
  showCounts(counts);
  status("answering");
  try {
    const end = await stream((tokens) => addTokens(tokens, counts));
    const steps = end.tokens - end.accepted;
    const each = steps > 0 ? `, ${(end.tokens / steps).toFixed(2)} per target step` : "";
    const took = seconds() - started;
    status(`${count(end.tokens, "token")} in ${took.toFixed(1)} s${each}; seed ${end.seed}; ended by ${end.reason}`);
  } catch (error) {
    status(error.name === "AbortError" ? "stopped" : error.message, error.name !== "AbortError");
  }
  busy(false);
}

function body() {
  const text = byId("prompt").value;
  const seed = byId("seed").value;
  return {
    model: model.name,
    ...(model.has_chat ? { messages: [{ role: "user", content: text }] } : { prompt: text }),
    max_tokens: Number(byId("max-tokens").value),
    temperature: Number(byId("temperature").value),
    ...(seed && { seed: Number(seed) }),
    stream: true,
    stream_options: { include_usage: true },
    speculation: { report_origins: true, ...(!byId("speculate").checked && { max_depth: 0 }) },
  };
}

/** Calls `onTokens` for every chunk. Resolves to the number of tokens, those accepted, the seed and the reason of the end. */
async function stream(onTokens) {
  const path = model.has_chat ? "v1/chat/completions" : "v1/completions";
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body()), signal: answering.signal };
  const reader = (await ask(path, options)).body.pipeThrough(new TextDecoderStream()).getReader();
  const end = { tokens: 0, accepted: 0, seed: null, reason: null };
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (!frame.startsWith("data: {")) continue;
      const event = JSON.parse(frame.slice(6));
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      if (choice) {
        onTokens(choice.speculation.tokens);
        end.seed ??= choice.seed ?? null;
        end.reason = choice.finish_reason ?? end.reason;
      }
      if (event.usage) {
        end.tokens = event.usage.completion_tokens;
        end.accepted = event.usage.completion_tokens_details.accepted_prediction_tokens;
      }
    }
  }
  if (end.reason === null) throw new Error("the connection ended before the answer did");
  return end;
}

function addTokens(tokens, counts) {
  const box = byId("answer");
  const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  for (const { text, origin } of tokens) {
    counts[origin] += 1;
    if (!text) continue;
    const token = document.createElement("span");
    token.className = `token ${origin}`;
    token.textContent = text;
    box.append(token);
  }
  if (isAtEnd) box.scrollTop = box.scrollHeight;
  showCounts(counts);
}

function showCounts(counts) {
  for (const origin of ORIGINS) setText(`count-${origin}`, counts[origin] ? String(counts[origin]) : "");
}

function busy(isBusy) {
  const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
  byId("send").disabled = isBusy;
  byId("stop").disabled = !isBusy;
  if (hadFocus) byId(isBusy ? "stop" : "send").focus();
}

function status(text, isWrong = false) {
  setText("answer-status", text);
  byId("answer-status").classList.toggle("wrong", isWrong);
}

// --- small things ----------------------------------------------------------------------------------------------------------

function setText(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

function setItems(id, texts) {
  byId(id).replaceChildren(...texts.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
}

function number(value) {
  return value >= 100 ? String(Math.round(value)) : value >= 10 ? value.toFixed(1) : value.toFixed(value === 0 ? 0 : 2);
}

function milliseconds(ms) {
  if (ms === null) return "–";
  return ms >= 9950 ? `${(ms / 1000).toFixed(0)} s` : ms >= 995 ? `${(ms / 1000).toFixed(1)} s` : ms >= 9.95 ? `${ms.toFixed(0)} ms` : `${ms.toFixed(1)} ms`;
}

function count(amount, noun) {
  return `${amount} ${noun}${amount === 1 ? "" : "s"}`;
}

function short(id) {
  return id.slice(-8);
}

function sentence(text) {
  return text ? `${text[0].toUpperCase()}${text.slice(1)}.` : "–";
}

// --- keyboard and mouse ----------------------------------------------------------------------------------------------------

byId("prompt-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!answering || byId("stop").disabled) answer();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("prompt-form").requestSubmit();
});
byId("stop").addEventListener("click", () => answering.abort());
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  byId("key-box").open = false;
  connected("connecting", true);
});
byId("key-forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  connected("the key is forgotten", true);
});
poll();
