// The bar on top: which part, mode and cases every chart and matrix shows; all of it is in the
// address, so that what is seen can be sent.

const DATA = JSON.parse(document.getElementById("data").textContent);
const OURS = new Set(DATA.ours);
const PARTS = [...document.querySelectorAll(".part")];
const KEYS = ["mode", "cases"];
const state = { part: "", mode: "", cases: "", filter: "", hide: "" };
const pictures = new Map(PARTS.map((part) => [part, []]));
const controls = {};

function shownPart() {
  return PARTS.find((part) => part.dataset.part === state.part) || PARTS[0];
}

function hidden() {
  return new Set(state.hide.split(",").filter(Boolean));
}

// What a part's charts can be chosen by, in the order in which they have it.
function optionsOf(part) {
  const made = Object.fromEntries(KEYS.map((key) => [key, new Set()]));
  for (const table of part.querySelectorAll("[data-mode]")) made.mode.add(table.dataset.mode);
  for (const host of part.querySelectorAll("[data-charts]"))
    for (const chart of DATA.charts[host.dataset.charts])
      for (const key of KEYS)
        if (chart.choice[key] && (key !== "cases" || !("kind" in chart.choice)))
          made[key].add(chart.choice[key]);
  return Object.fromEntries(KEYS.map((key) => [key, [...made[key]]]));
}

function readAddress() {
  const text = decodeURIComponent(location.hash.slice(1));
  const target = text && !text.includes("=") && document.getElementById(text);
  if (target) return { part: target.closest(".part")?.dataset.part || "", target };
  const found = new URLSearchParams(location.hash.slice(1));
  return Object.fromEntries(Object.keys(state).map((key) => [key, found.get(key) || ""]));
}

function writeAddress() {
  const given = Object.entries(state).filter(([key, value]) => value && !(key === "part" && PARTS.length < 2));
  history.replaceState(null, "", given.length ? `#${new URLSearchParams(given)}` : "#");
}

function change(changes) {
  Object.assign(state, changes);
  writeAddress();
  apply();
}

function fill(select, values, value) {
  select.replaceChildren(...values.map((text) => new Option(text, text)));
  select.value = values.includes(value) ? value : values[0] || "";
  select.parentElement.hidden = values.length < 2;
}

function apply() {
  const part = shownPart(), options = optionsOf(part);
  for (const other of PARTS) other.hidden = other !== part;
  controls.part.value = part.dataset.part;
  for (const key of KEYS) fill(controls[key], options[key], state[key]);
  controls.filter.value = state.filter;
  controls.filter.placeholder = part.querySelector("[data-case]")?.dataset.case || "";
  const asked = Object.fromEntries(KEYS.map((key) => [key, controls[key].value]).filter(([, v]) => v));
  for (const picture of pictures.get(part)) picture.choose(asked);
  const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
  for (const matrix of part.querySelectorAll(".matrix")) {
    matrix.hidden = matrix.dataset.mode !== asked.mode;
    for (const row of matrix.querySelectorAll("[data-case]"))
      row.hidden = !words.every((word) => row.dataset.case.toLowerCase().includes(word));
  }
}

function bar() {
  const form = document.getElementById("choice");
  const names = { part: "operation", mode: "timed", cases: "charts of" };
  for (const [key, text] of Object.entries(names)) {
    const label = make(form, "label", {}, `${text} `);
    controls[key] = make(label, "select", { "data-key": key });
    controls[key].onchange = () =>
      change({ [key]: controls[key].value, ...(key === "part" ? { cases: "" } : {}) });
  }
  for (const part of PARTS) controls.part.append(new Option(part.dataset.part, part.dataset.part));
  const label = make(form, "label", {}, "cases with ");
  controls.filter = make(label, "input", { type: "search" });
  controls.filter.oninput = () => change({ filter: controls.filter.value });
  form.onsubmit = (event) => event.preventDefault();
  form.hidden = false;
}

function start() {
  bar();
  for (const part of PARTS)
    for (const host of part.querySelectorAll("[data-charts]"))
      pictures.get(part).push(new Picture(host, DATA.charts[host.dataset.charts], DATA.notes));
  document.querySelectorAll("table").forEach(sortable);
  for (const link of document.querySelectorAll("nav a"))
    link.onclick = (event) => {
      event.preventDefault();
      document.querySelector(link.getAttribute("href")).scrollIntoView();
    };
  const { target, ...found } = readAddress();
  Object.assign(state, found);
  apply();
  if (target) target.scrollIntoView();
  window.onhashchange = () => { const { target: _, ...now } = readAddress(); Object.assign(state, now); apply(); };
  document.getElementById("theme").onclick = () => {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  };
}
