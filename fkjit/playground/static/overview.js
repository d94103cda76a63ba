// The overview: a card for each thing that was found out about a variant.
import { $, bytes, copyButton, element, percent, shape } from "./dom.js";
import { kinds, roofline } from "./pictures.js";

/** All cards of one variant's results. */
export function overview(found, context) {
  const cards = [
    ...(found.errors ?? []).map(failure), resources(found), occupancy(found), checks(found, context), banks(found, context),
    times(found), instructionMix(found), roof(found), commandList(context),
  ];
  const failed = found.errors?.length ? " failed" : "";
  return element("div", { class: `cards${failed}` }, ...cards.filter((one) => one !== null));
}

function card(title, hint, ...children) {
  return element("section", { class: "card" },
    element("h3", {}, title, hint ? element("small", {}, hint) : null), ...children);
}

function waiting(title) {
  const made = card(title, "", element("p", { class: "hint" }, "not known yet"));
  made.classList.add("waiting");
  return made;
}

function facts(rows) {
  return element("dl", { class: "facts" },
    ...rows.map(([name, value, bad]) => element("div", { class: bad ? "bad" : null },
      element("dt", {}, name), element("dd", {}, value))));
}

function failure({ stage, text }) {
  const made = card(`Error in ${stage}`, "", element("pre", { class: "report", tabindex: 0 }, text));
  made.classList.add("whole");
  return made;
}

function resources({ resources: one }) {
  if (!one) return waiting("Resources");
  const made = card("Resources", `${one.target}, NVRTC ${one.nvrtc}`,
    facts([
      ["registers", one.registers],
      ["spilled", one.spilled ? bytes(one.spilled) : "0", one.spilled],
      ["shared", bytes(one.shared)],
      ["threads", one.threads],
      ["stack", bytes(one.stack), one.stack],
      ["compile", `${Math.round(one.compile_seconds * 1e3)} ms`],
    ]));
  for (const problem of one.problems) made.append(element("p", { class: "problem" }, problem));
  return made;
}

function occupancy({ resources: one }) {
  if (!one) return waiting("Occupancy");
  const each = Math.ceil(one.threads / 32);
  const all = one.occupancy ? Math.round((one.blocks * each) / one.occupancy) : 0;
  const squares = Array.from({ length: all }, (_, warp) => {
    const block = Math.floor(warp / each);
    const held = block < one.blocks;
    return shape("rect", {
      x: (warp % 16) * 11, y: Math.floor(warp / 16) * 11, width: 9, height: 9, rx: 2,
      class: held ? `warp block${block % 2}` : "warp free",
    });
  });
  const label = `${one.blocks} blocks of ${each} warps; ${percent(one.occupancy)} of ${all} warps`;
  return card("Occupancy", "of an SM",
    element("p", { class: "big" }, percent(one.occupancy)),
    shape("svg", { viewBox: `0 0 176 ${Math.max(Math.ceil(all / 16), 1) * 11}`, role: "img",
      "aria-label": label, class: "warps" }, ...squares),
    element("p", {}, `${one.blocks} ${one.blocks === 1 ? "block" : "blocks"}; limited by `,
      element("b", {}, one.limit)));
}

function checks({ check }, { go }) {
  if (!check) return waiting("Check");
  const made = card("Check", `problem ${check.number} of ${check.of}`);
  if (!check.of) {
    made.append(element("p", { class: "hint" }, "This kernel has no problems to check it with."));
    return made;
  }
  const bad = check.findings.length > 0;
  made.classList.toggle("wide", bad);
  const done = check.number === check.of || bad;
  made.append(element("p", { class: `big ${bad ? "bad" : ""}` },
    bad ? check.findings[0].kind : done ? "no faults" : "so far no faults"));
  if (!bad) made.append(element("progress", { max: check.of, value: check.number,
    "aria-label": "problems checked" }));
  for (const one of check.findings) {
    made.append(element("pre", { class: "report", tabindex: 0 }, one.text));
    made.append(...one.lines.map((line) => lineButton(line, go)));
  }
  made.append(error(check));
  made.append(element("p", { class: "hint" }, `memory, barriers, races, numbers; ${check.problem}`));
  return made;
}

function error({ error: one }) {
  if (!one) return element("p", { class: "hint" }, "no reference to compare with yet");
  const share = one.ratio === null ? 1 : Math.min(one.ratio, 1);
  return element("div", { title: one.text },
    element("meter", { min: 0, max: 1, high: 0.999, optimum: 0, value: share,
      "aria-label": "error in tolerances" }),
    element("p", {}, `error of ${one.output}: `,
      element("b", {}, one.ratio === null ? "not finite" : `${one.ratio.toPrecision(2)}`),
      ` of the tolerance (${one.bound.toPrecision(2)})`));
}

function banks({ check }, { go, openBanks }) {
  if (!check) return waiting("Bank conflicts");
  const rows = byLine(check.banks);
  if (!rows.length)
    return card("Bank conflicts", "", element("p", { class: "hint" }, "No thread loads or stores shared memory by itself."));
  return card("Bank conflicts", "wavefronts to ideal ones",
    element("table", { class: "rows" },
      element("tbody", {}, ...rows.slice(0, 9).map((row) => element("tr", { class: row.ratio > 1.5 ? "bad" : null },
        element("td", {}, lineButton(row.line, (line) => (go(line), openBanks()))),
        element("td", {}, element("code", {}, row.instruction)),
        element("td", { class: "number" }, `${row.ratio.toFixed(2)}×`))))));
}

/** Wavefronts of all instructions of a line that have one opcode, the worst first. */
function byLine(banks) {
  const found = Map.groupBy(banks.filter((row) => row.lines.length), (row) => `${row.lines[0]} ${row.instruction}`);
  const sum = (some, name) => some.reduce((total, row) => total + row[name], 0);
  return [...found.values()].map((some) => ({
    line: some[0].lines[0], instruction: short(some[0].instruction),
    ratio: sum(some, "wavefronts") / Math.max(sum(some, "ideal"), 1),
  })).sort((one, other) => other.ratio - one.ratio || one.line - other.line);
}

/** "ldmatrix.sync.aligned.m8n8.x4.shared.b16" without what all of them have. */
const short = (text) => text.replace(/\.(sync|aligned|m8n8|shared|cta)\b|::cta/g, "");

export function lineButton(line, go) {
  return element("button", { class: "quiet", type: "button", onclick: () => go(line) }, `line ${line}`);
}

function instructionMix({ code }) {
  if (!code) return waiting("Instructions");
  const all = Object.values(code.mix).reduce((sum, count) => sum + count, 0);
  const rows = Object.entries(code.mix);
  return card("Instructions", `${all.toLocaleString("en")} in the machine code`,
    element("div", { class: "stack", role: "img", "aria-label": "shares of kinds, as listed" },
      ...rows.map(([kind, count]) => {
        const part = element("span", { class: kinds(kind), title: `${kind}: ${count}` });
        part.style.flexGrow = count;
        return part;
      })),
    element("ul", { class: "legend" }, ...rows.map(([kind, count]) => element("li", {},
      element("i", { class: kinds(kind) }), `${kind} `, element("b", {}, count.toLocaleString("en"))))));
}

function roof({ work }) {
  if (!work) return card("Roofline", "", element("p", { class: "hint" }, "No work is counted for this kernel."));
  const intensity = work.flops / work.bytes;
  const by = !work.balance ? "" : intensity >= work.balance ? "arithmetic" : "memory";
  return card("Roofline", "counted, not measured",
    roofline(intensity, work.balance),
    element("p", {}, `${intensity.toPrecision(3)} flops a byte`,
      by ? element("span", {}, "; limited by ", element("b", {}, by)) : ""),
    element("p", { class: "hint", title: work.problem }, work.problem));
}

/** On a GPU: the edited kernel beside the unedited one. */
function times({ times: one }) {
  if (!one) return null;
  if (one.why) return card("Times", "on the GPU", element("p", { class: "hint" }, one.why));
  const shown = one.edited ?? one.unedited;
  const made = card("Times", one.gpu, element("p", { class: "big" }, `${shown.toPrecision(3)} µs`));
  if (one.edited) made.append(element("p", {}, "unedited ", element("b", {}, `${one.unedited.toPrecision(3)} µs`),
    `: ${((100 * (one.edited - one.unedited)) / one.unedited).toFixed(1)} %`));
  made.append(element("p", {}, `${(one.flops / shown / 1e6).toPrecision(3)} TFLOP/s, ${(one.bytes / shown / 1e3).toPrecision(3)} GB/s`),
    element("p", { class: "hint" }, `median of 15 graphs of 10 launches, warm; ${one.problem}`));
  return made;
}

function commandList({ commands, edited, unsaved }) {
  return card("Commands", unsaved ? "once it is saved" : edited ? "of the kernel as its file has it" : "",
    element("ul", { class: "commands" }, ...commands.map(([what, text]) => element("li", {},
      element("span", {}, what), copyButton(() => text), element("code", {}, text)))));
}

export function show(panel) {
  const at = $("panel").scrollTop;
  $("panel").replaceChildren(panel);
  $("panel").scrollTop = at;
}
