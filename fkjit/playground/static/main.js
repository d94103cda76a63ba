// The page: what a person chooses and writes goes to the server, and what comes back is shown.
import * as api from "./api.js";
import { comparison, memory, fragments } from "./panels.js";
import { commands, fillKernels, fillParams, fillTargets, same, startingParams } from "./controls.js";
import { $, copy, divide, element, tabs } from "./dom.js";
import { lineButton, overview, show } from "./overview.js";
import { fromAddress, fromFile, toAddress, toFile } from "./state.js";
import { CodeView, TemplateEditor } from "./texts.js";

const FIRST = { kernel: "attention.flash", arch: "sm_90a", params: { head_dim: 64, head_dim_v: 64, block: 64 } };
const PAUSE = 150; // ms after the last keystroke
const page = crypto.randomUUID();

let kernels = [];
let state = null; // see state.js
let file = ""; // the template as its file has it
let which = "a"; // whose texts are shown
let results = { a: {}, b: {} };
let running = null;
let timer = 0;
let scroll = false; // to the linked line, once there is a text

const template = new TemplateEditor($("template"), edited, moved);
const code = new CodeView($("code"), codeMoved);
const selectView = tabs($("views"), "view", (name) => ((state.view = name), (scroll = true), showCode(), remember()));
const selectWhich = tabs($("which"), "which", (name) => ((which = name), (scroll = true), showCode(), showPanel()));
const selectPanel = tabs($("results"), "panel", (name) => ((state.panel = name), showPanel(), remember()));

const kernelOf = (name) => kernels.find((one) => one.kernel === name);
const current = () => kernelOf(state.kernel);

// -- the state -----------------------------------------------------------------------------------

async function open(wanted) {
  const kernel = kernelOf(wanted.kernel) ?? kernelOf(FIRST.kernel);
  const fits = (name) => kernel.first[name];
  const arch = [wanted.arch, FIRST.arch, ...Object.keys(kernel.first)].find(fits) ?? FIRST.arch;
  state = {
    view: "code", panel: "overview", line: 0, text: null, b: null, ...wanted,
    kernel: kernel.kernel, arch, params: await startingParams(kernel, arch, wanted.params, true),
  };
  const found = await api.get(`api/template?kernel=${encodeURIComponent(state.kernel)}`);
  file = found.text;
  $("file").textContent = found.name;
  results = { a: {}, b: {} };
  template.text = state.text ?? file;
  showControls();
  if (state.line) template.go(state.line);
  scroll = state.line > 0;
  start();
}

function edited(text) {
  state.text = text === file ? null : text;
  clearTimeout(timer);
  timer = setTimeout(start, PAUSE);
  if (running) void stop();
  showEdited();
}

async function stop() {
  running.abort();
  running = null;
  await api.post("api/stop", { page });
}

function changed(more) {
  Object.assign(state, more);
  start();
}

let remembered = 0;
function remember() {
  clearTimeout(remembered);
  remembered = setTimeout(async () => history.replaceState(null, "", (await toAddress(state)).address), 300);
}

// -- a run ---------------------------------------------------------------------------------------

async function start() {
  clearTimeout(timer);
  running?.abort();
  const own = (running = new AbortController());
  const begin = performance.now();
  const fresh = { a: { errors: [] }, b: { errors: [] } };
  remember();
  document.body.classList.add("working");
  say("at work …");
  try {
    await api.run(request(), (event) => own === running && arrived(event, fresh), own.signal);
  } catch (error) {
    if (own !== running) return;
    fresh.a.errors.push({ stage: "server", text: `The playground does not answer: ${error.message}`, marks: [] });
  }
  if (own !== running) return;
  running = null;
  results = fresh;
  document.body.classList.remove("working");
  finished((performance.now() - begin) / 1e3);
}

function request() {
  const { kernel, arch, params, text, b } = state;
  const a = { kernel, arch, params, text };
  return { page, a, b: b && { kernel, arch: b.arch, params: b.params, text: b.source === "file" ? null : text } };
}

/** Each event replaces what it is about at once; the rest stays until its own event comes. */
function arrived(event, fresh) {
  if (event.event === "error") {
    fresh[event.which].errors.push(event);
  } else if (event.event === "diff") {
    fresh.diff = results.diff = event;
  } else if (event.which && event.event !== "done") {
    fresh[event.which][event.event] = event;
    results[event.which][event.event] = event;
    results[event.which].errors = fresh[event.which].errors;
    showPanel();
    if (event.event === state.view && event.which === which) showCode();
    if (event.event === "check" && event.which === "a") mark(results.a);
  }
}

function finished(seconds) {
  const errors = [...results.a.errors, ...results.b.errors];
  const faults = results.a.check?.findings.length ?? 0;
  const bad = errors.length > 0 || faults > 0;
  $("status").classList.toggle("bad", bad);
  const text = errors.length ? errors[0].stage === "check" ? "not checked" : `error in ${errors[0].stage}`
    : faults ? results.a.check.findings[0].kind : "compiled and checked";
  say(`${text} in ${seconds.toFixed(2)} s`);
  mark(results.a);
  showPanel();
  showCode();
}

const say = (text) => ($("status").textContent = text);

function mark(found) {
  const all = [...(found.errors ?? []).flatMap((one) => one.marks), ...(found.check?.marks ?? [])];
  const marks = all.filter((one, at) => all.findIndex((other) => same(one, other)) === at);
  template.mark(marks);
  const listed = marks.filter((one) => one.severity === "error");
  $("marks").replaceChildren(...listed.slice(0, 4).map((one) => element("li", { class: one.severity },
    lineButton(one.line, go), element("b", {}, one.kind), " ", one.text.split("\n")[0])));
}

// -- showing -------------------------------------------------------------------------------------

function showControls() {
  const kernel = current();
  $("kernel").value = state.kernel;
  fillTargets($("arch"), kernel, state.arch);
  fillParams($("params-a"), kernel, state.params, state.arch, (params) => changed({ params }));
  const both = state.b !== null;
  $("compare").setAttribute("aria-pressed", both);
  for (const id of ["variant-b", "which"]) $(id).hidden = !both;
  for (const tab of document.querySelectorAll("[data-view=diff], [data-panel=compare]")) tab.hidden = !both;
  $("name-a").hidden = !both;
  if (both) {
    $("source-b").value = state.b.source;
    fillTargets($("arch-b"), kernel, state.b.arch);
    fillParams($("params-b"), kernel, state.b.params, state.b.arch,
      (params) => changed({ b: { ...state.b, params } }));
  } else {
    which = "a";
    if (state.view === "diff") state.view = "code";
    if (state.panel === "compare") state.panel = "overview";
  }
  selectView(state.view);
  selectWhich(which);
  selectPanel(state.panel);
  showEdited();
}

function showEdited() {
  $("edited").hidden = $("revert").hidden = state.text === null;
}

function shownText() {
  if (state.view === "diff") return results.diff;
  return results[which][state.view];
}

function showCode() {
  const found = shownText();
  const error = results[which].errors?.[0];
  const missing = state.view === "diff" ? "A and B are the same." : error?.text ?? "";
  code.show(found?.text ?? missing, found || state.view === "diff" ? state.view : "diff");
  linkCode(scroll && found !== undefined);
  scroll = scroll && found === undefined;
}

function linkCode(show) {
  const { cu } = shownText() ?? {};
  const lines = [];
  cu?.forEach((from, at) => from.includes(state.line) && lines.push(at + 1));
  code.link(lines, show);
  $("place").textContent = state.line && cu ? `line ${state.line}: ${lines.length} ${lines.length === 1 ? "line" : "lines"} here` : "";
}

function showPanel() {
  const found = results[which];
  const { params, arch } = which === "b" ? state.b : state;
  const context = {
    line: state.line, go, edited: state.text !== null, unsaved: state.kernel === "new_kernel.plain",
    openBanks: () => (selectPanel("banks", true), (state.panel = "banks"), showPanel()),
    commands: commands(current(), params, arch),
  };
  const panels = { overview, banks: memory, fragments, compare: comparison };
  show(panels[state.panel](state.panel === "compare" ? results : found, context));
  const of = state.b && state.panel !== "compare" ? `of ${which.toUpperCase()}; ` : "";
  $("line").textContent = of + (state.line ? `line ${state.line} of the template` : "no line chosen");
}

// -- lines ---------------------------------------------------------------------------------------

function moved(line) {
  if (line === state.line) return;
  state.line = line;
  template.link(0, false);
  linkCode(true);
  if (state.panel !== "overview") showPanel();
  remember();
}

function codeMoved(at) {
  const found = shownText();
  const line = found?.cu?.[at - 1]?.[0] ?? 0;
  const place = found?.places?.[found.inner[at - 1]] ?? "";
  if (line && line !== state.line) {
    state.line = line;
    linkCode(false);
    if (state.panel !== "overview") showPanel();
    remember();
  }
  template.link(line, true);
  $("place").textContent = place;
}

function go(line) {
  template.go(line);
  state.line = 0;
  moved(line);
}

// -- controls ------------------------------------------------------------------------------------

$("kernel").addEventListener("change", () => {
  void open({ ...state, kernel: $("kernel").value, text: null, b: null, line: 0 });
});
$("arch").addEventListener("change", async () => {
  const arch = $("arch").value;
  changed({ arch, params: await startingParams(current(), arch, state.params) });
  showControls();
});
$("arch-b").addEventListener("change", async () => {
  const arch = $("arch-b").value;
  changed({ b: { ...state.b, arch, params: await startingParams(current(), arch, state.b.params) } });
  showControls();
});
$("source-b").addEventListener("change", () => changed({ b: { ...state.b, source: $("source-b").value } }));
$("variants").addEventListener("submit", (event) => event.preventDefault());
$("compare").addEventListener("click", () => {
  const { arch, params } = state;
  state.b = state.b ? null : { arch, params: { ...params }, source: "file" };
  if (state.b) state.panel = "compare";
  results.b = {};
  results.diff = undefined;
  showControls();
  start();
});
$("revert").addEventListener("click", () => {
  state.text = null;
  template.text = file;
  showEdited();
  start();
});
$("copy-code").addEventListener("click", () => copy($("copy-code"), code.text ?? ""));

$("save").addEventListener("click", () => {
  $("save-problem").textContent = "";
  $("save-dialog").showModal();
  $("save-name").select();
});
$("save-cancel").addEventListener("click", () => $("save-dialog").close());
$("save-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const name = $("save-name").value;
  try {
    const saved = await api.post("api/save", { kernel: state.kernel, name, text: template.text });
    $("save-dialog").close();
    await loadKernels();
    await open({ ...state, kernel: saved.kernel, text: null, b: null });
    say(`saved: ${saved.files.join(", ")}`);
  } catch (error) {
    $("save-problem").textContent = error.message;
  }
});

$("share").addEventListener("click", () => (($("share-said").textContent = ""), $("share-dialog").showModal()));
$("copy-link").addEventListener("click", async () => {
  const { address, whole } = await toAddress(state);
  await copy($("copy-link"), new URL(address, location.href).href);
  if (!whole) $("share-said").textContent = "The template is too long for an address: save a share file.";
});
$("export").addEventListener("click", () => {
  const link = element("a", { href: URL.createObjectURL(toFile(state)), download: `${state.kernel}.fkjit.json` });
  link.click();
  URL.revokeObjectURL(link.href);
});
$("import").addEventListener("change", async () => {
  try {
    await open(await fromFile($("import").files[0]));
    $("share-dialog").close();
  } catch (error) {
    $("share-said").textContent = error.message;
  }
  $("import").value = "";
});

divide($("split"), document.querySelector("main"));
$("theme").addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  const next = now === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = localStorage.theme = next;
});
if (localStorage.theme) document.documentElement.dataset.theme = localStorage.theme;

window.addEventListener("hashchange", async () => {
  const wanted = await fromAddress(location.hash);
  if (wanted && !same(wanted, { ...state })) void open(wanted);
});

async function loadKernels() {
  const found = await api.get("api/kernels");
  kernels = found.kernels;
  $("folder").textContent = found.folder;
  fillKernels(kernels);
}

await loadKernels();
await open((await fromAddress(location.hash).catch(() => null)) ?? FIRST);
document.body.dataset.ready = "";
