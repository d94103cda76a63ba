// The other panels: shared memory and fragments of a line, differences of A and B.
import { bytes, element, percent } from "./dom.js";
import { lineButton } from "./overview.js";
import { bankPicture, fragmentPicture } from "./pictures.js";

/** Accesses of the chosen line; without one all lines that access shared memory. */
export function memory({ check, unswizzled }, { line, go }) {
  if (!check) return hint("The interpreter has not run this variant yet.");
  const inOrder = (banks) => banks.filter((row) => row.lines.includes(line)).sort((one, other) => one.pc - other.pc);
  const rows = inOrder(check.banks);
  if (!rows.length) return chooser(check.banks, line, go, "accesses shared memory lane by lane");
  const plain = inOrder(unswizzled?.banks ?? []);
  const pairs = rows.map((row, at) => [row, plain.length === rows.length ? plain[at] : null]);
  const alike = Map.groupBy(pairs, (pair) => pattern(pair));
  return element("div", { class: "pictures" }, ...[...alike.values()].map((some) => accesses(some)));
}

/** What tells pictures apart: two instructions of an unrolled loop often touch the same banks. */
const pattern = (pair) => JSON.stringify(pair.map((row) => row && [row.instruction, row.picture?.lanes, row.picture?.bytes]));

function accesses(some) {
  const [row, plain] = some[0];
  const total = (name) => some.reduce((sum, [one]) => sum + one[name], 0);
  const counted = `${total("wavefronts").toLocaleString("en")} wavefronts in all, ideal ${total("ideal").toLocaleString("en")}: ${(total("wavefronts") / Math.max(total("ideal"), 1)).toFixed(2)}×`;
  const many = some.length > 1 ? `${some.length} instructions alike; ` : "";
  return element("section", {},
    element("h3", {}, element("code", {}, row.instruction), element("small", {}, `${row.place}; ${many}${counted}`)),
    element("div", { class: "row" },
      row.picture ? bankPicture(row.picture, plain?.picture ? "As it is:" : "") : null,
      plain?.picture ? bankPicture(plain.picture, "Without the swizzle:") : null));
}

/** Who holds which element, for the tensor-core instructions of the chosen line. */
export function fragments({ ptx }, { line, go }) {
  if (!ptx) return hint("There is no PTX yet.");
  const found = ptx.fragments ?? [];
  const here = found.filter((one) => one.lines.includes(line));
  if (!here.length)
    return chooser(found, line, go, "has mma, ldmatrix or wgmma");
  return element("div", { class: "pictures" }, ...here.map((one) => element("section", {},
    element("h3", {}, element("code", {}, one.instruction), element("small", {}, "lane:register of each element")),
    element("div", { class: "row" }, ...one.operands.map((operand) => fragmentPicture(operand))))));
}

const hint = (text) => element("p", { class: "hint roomy" }, text);

/** Lines to choose from. */
function chooser(rows, line, go, what) {
  const each = rows.flatMap((row) => row.lines.map((at) => ({ at, instruction: row.instruction })));
  const byLine = Map.groupBy(each, (row) => row.at);
  if (!byLine.size) return hint(`No line of this template ${what}.`);
  const said = line ? `Not line ${line}; choose` : "Choose";
  return element("div", { class: "roomy" },
    element("p", {}, `${said} a line that ${what}.`),
    element("ul", { class: "chooser" }, ...[...byLine].sort(([one], [other]) => one - other).map(([at, some]) =>
      element("li", {}, lineButton(at, go), element("code", {}, [...new Set(some.map((row) => row.instruction))].slice(0, 3).join(", "))))));
}

/** A table of everything that A and B have, with what differs. */
export function comparison({ a, b }) {
  if (!a?.resources || !b?.resources) return hint(b?.errors?.[0]?.text ?? "B is not compiled yet.");
  const rows = [
    ["target", a.resources.target, b.resources.target],
    ...numbers(a, b),
    ["limited by", a.resources.limit, b.resources.limit],
    ["check", verdict(a), verdict(b)],
  ];
  return element("table", { class: "compare" },
    element("thead", {}, element("tr", {}, ...["", "A", "B", "B − A"].map((head) => element("th", { scope: "col" }, head)))),
    element("tbody", {}, ...rows.map(([name, one, other, delta, better]) => element("tr", { class: one === other ? "same" : null },
      element("th", { scope: "row" }, name), element("td", {}, String(one)), element("td", {}, String(other)),
      element("td", { class: better ?? "" }, delta ?? "")))));
}

function numbers(a, b) {
  const kinds = [...new Set([...Object.keys(a.code?.mix ?? {}), ...Object.keys(b.code?.mix ?? {})])];
  const all = (mix) => Object.values(mix ?? {}).reduce((sum, count) => sum + count, 0);
  const plain = (value) => value.toLocaleString("en");
  const rows = [
    ["registers", a.resources.registers, b.resources.registers, plain, -1],
    ["spilled bytes", a.resources.spilled, b.resources.spilled, plain, -1],
    ["shared memory", a.resources.shared, b.resources.shared, bytes, -1],
    ["threads", a.resources.threads, b.resources.threads, plain, 0],
    ["blocks of an SM", a.resources.blocks, b.resources.blocks, plain, 1],
    ["occupancy", a.resources.occupancy, b.resources.occupancy, percent, 1],
    ["instructions", all(a.code?.mix), all(b.code?.mix), plain, -1],
    ...kinds.map((kind) => [`  ${kind}`, a.code?.mix[kind] ?? 0, b.code?.mix[kind] ?? 0, plain, 0]),
    ["wavefronts of shared memory", fronts(a), fronts(b), plain, -1],
    ["worst bank conflict", worst(a), worst(b), (v) => `${v.toFixed(2)}×`, -1],
    ["error in tolerances", a.check?.error?.ratio ?? 0, b.check?.error?.ratio ?? 0, (v) => v.toPrecision(2), -1],
    ["flops a byte", intensity(a), intensity(b), (v) => v.toPrecision(3), 0],
    ["compile time", a.resources.compile_seconds, b.resources.compile_seconds, (v) => `${Math.round(v * 1e3)} ms`, 0],
  ];
  return rows.map(([name, one, other, write, good]) => {
    const delta = other - one;
    const better = delta && good ? (delta * good > 0 ? "better" : "worse") : "";
    const shown = delta ? `${delta > 0 ? "+" : "−"}${write(Math.abs(delta))}` : "";
    return [name, write(one), write(other), shown, better];
  });
}

const fronts = ({ check }) => (check?.banks ?? []).reduce((sum, row) => sum + row.wavefronts, 0);
const worst = ({ check }) => Math.max(1, ...(check?.banks ?? []).map((row) => row.ratio));
const intensity = ({ work }) => (work ? work.flops / work.bytes : 0);

function verdict({ check, errors }) {
  if (errors?.length) return `error in ${errors[0].stage}`;
  if (!check) return "not run";
  return check.findings[0]?.kind ?? "no faults";
}
