// Pictures drawn from what the interpreter saw: banks, fragments; and the roofline.
import { element, shape } from "./dom.js";

const BANKS = 32;
const WORD = 4;
const CELL = { width: 17, height: 15 };

/** The class of a kind of instruction: "shared memory" -> "kind kind-shared-memory". */
export const kinds = (kind) => `kind kind-${kind.replaceAll(" ", "-")}`;

/** Which lane of a warp touches which bank in one access. */
export function bankPicture(access, title) {
  const phases = Math.max(1, access.width / WORD);
  const words = [];
  access.lanes.forEach((lane, at) => {
    for (let byte = 0; byte < Math.max(access.width, WORD); byte += WORD) {
      const word = Math.floor((access.bytes[at] + byte) / WORD);
      words.push({ lane, word, bank: word % BANKS, row: Math.floor(word / BANKS),
        phase: Math.floor(lane / (32 / phases)) });
    }
  });
  const wanted = counts(words, phases);
  const rows = [...new Set(words.map(({ row }) => row))].sort((one, other) => one - other);
  const figure = element("figure", { class: "banks" },
    element("figcaption", {}, element("b", {}, title),
      ` ${access.wavefronts} wavefronts, ideal ${access.ideal}; warp ${access.warp}, ${access.where}`),
    grid(words, rows, wanted, access));
  return figure;
}

/** Of each phase and bank the distinct words; the phase of the most, first. */
function counts(words, phases) {
  const sets = Array.from({ length: phases }, () => Array.from({ length: BANKS }, () => new Set()));
  for (const { word, bank, phase } of words) sets[phase][bank].add(word);
  return sets.map((banks) => banks.map((some) => some.size));
}

function grid(words, rows, wanted, access) {
  const left = 52;
  const top = 18;
  const most = wanted.map((banks) => Math.max(...banks));
  const worst = most.indexOf(Math.max(...most));
  const cells = new Map(); // by row and bank: who wants it
  for (const one of words) {
    const key = `${one.row} ${one.bank}`;
    cells.set(key, [...(cells.get(key) ?? []), one]);
  }
  const parts = [];
  for (let bank = 0; bank < BANKS; bank += 1)
    parts.push(label(left + (bank + 0.5) * CELL.width, 12, bank, "middle"));
  rows.forEach((row, at) => {
    const y = top + at * CELL.height;
    parts.push(label(left - 6, y + 11, `+${row * BANKS * WORD}`, "end"));
    for (let bank = 0; bank < BANKS; bank += 1) parts.push(cell(cells.get(`${row} ${bank}`), left + bank * CELL.width, y, wanted));
  });
  const y = top + rows.length * CELL.height + 6;
  parts.push(label(left - 6, y + 11, "words", "end"));
  for (let bank = 0; bank < BANKS; bank += 1) {
    const count = wanted[worst][bank];
    const x = left + bank * CELL.width;
    parts.push(shape("rect", { x: x + 1, y, width: CELL.width - 2, height: 14, rx: 2,
      class: count > 1 ? "wanted many" : count ? "wanted" : "wanted none" }));
    if (count) parts.push(label(x + CELL.width / 2, y + 11, count, "middle", count > 1 ? "onmany" : ""));
  }
  const phases = wanted.length > 1 ? ` Words of lanes ${(32 / wanted.length) * worst} to ${(32 / wanted.length) * (worst + 1) - 1}, which go together.` : "";
  const text = `Banks 0 to 31 from left to right. The fullest has ${Math.max(...most)} words of one phase.${phases}`;
  return element("div", { class: "wide", tabindex: 0, role: "group", "aria-label": text },
    shape("svg", { width: left + BANKS * CELL.width + 4, height: y + 18, role: "img", "aria-label":
      `${text} ${access.kind} of ${access.width} bytes a lane` }, ...parts),
    element("p", { class: "hint" }, text));
}

function cell(wanting, x, y, wanted) {
  const place = { x: x + 1, y: y + 1, width: CELL.width - 2, height: CELL.height - 2, rx: 2 };
  if (!wanting) return shape("rect", { ...place, class: "cell empty" });
  const { phase, bank } = wanting[0];
  const conflict = wanted[phase][bank] > 1;
  const lanes = wanting.map(({ lane }) => lane);
  const text = lanes.length > 1 ? `${lanes[0]}…` : `${lanes[0]}`;
  return shape("g", {},
    shape("title", {}, `bank ${bank}: ${lanes.length > 1 ? "lanes" : "lane"} ${lanes.join(", ")}`),
    shape("rect", { ...place, class: `cell phase${phase % 4} ${conflict ? "conflict" : ""}` }),
    label(x + CELL.width / 2, y + 11, text, "middle", "oncell"));
}

function label(x, y, text, anchor, more = "") {
  return shape("text", { x, y, "text-anchor": anchor, class: `label ${more}` }, String(text));
}

/** Which lane holds which element of an operand: `owners[row][column]` is [lane, register, part]. */
export function fragmentPicture({ title, owners, parts }) {
  const width = parts > 1 ? 42 : 34;
  const height = 18;
  const left = 30;
  const shapes = [];
  owners[0].forEach((_, column) => shapes.push(label(left + (column + 0.5) * width, 12, column, "middle")));
  owners.forEach((row, r) => {
    const y = 18 + r * height;
    shapes.push(label(left - 6, y + 13, r, "end"));
    row.forEach(([lane, register, part], column) => {
      const x = left + column * width;
      const where = parts > 1 ? `${lane}:${register}.${part}` : `${lane}:${register}`;
      const rect = shape("rect", { x: x + 1, y: y + 1, width: width - 2, height: height - 2, rx: 2, class: "owner" });
      rect.style.fill = `hsl(${(lane % 32) * 11.25} 55% var(--owner-light))`;
      const one = shape("g", { "data-lane": lane },
        shape("title", {}, `row ${r}, column ${column}: lane ${lane}, register ${register}${parts > 1 ? `, part ${part}` : ""}`),
        rect, label(x + width / 2, y + 13, where, "middle", "oncell"));
      shapes.push(one);
    });
  });
  const svg = shape("svg", { width: left + owners[0].length * width + 4, height: 22 + owners.length * height,
    role: "img", "aria-label": `${title}: lane:register of each element` }, ...shapes);
  const light = (lane) => {
    for (const one of svg.querySelectorAll("g[data-lane]"))
      one.classList.toggle("dim", lane !== null && one.dataset.lane !== lane);
  };
  svg.addEventListener("pointerover", (event) => light(event.target.closest("g")?.dataset.lane ?? null));
  svg.addEventListener("pointerleave", () => light(null));
  return element("figure", { class: "fragment" }, element("figcaption", {}, element("b", {}, title)),
    element("div", { class: "wide", tabindex: 0, role: "group", "aria-label": title }, svg));
}

/** Where flops a byte put a kernel below the roof; the roof's edge is the GPU's balance. */
export function roofline(intensity, balance) {
  const [low, high] = [2 ** -4, 2 ** 13];
  const x = (value) => 8 + (184 * Math.log(Math.min(Math.max(value, low), high) / low)) / Math.log(high / low);
  const y = (share) => 8 + (72 * Math.log(1 / Math.max(share, 2 ** -12))) / Math.log(2 ** 12);
  const edge = balance || 0;
  const reach = edge ? Math.min(1, intensity / edge) : null;
  const parts = [shape("path", { d: "M8 4V84H196", class: "axis" })];
  if (edge) {
    parts.push(shape("path", { d: `M${x(low)} ${y(low / edge)}L${x(edge)} ${y(1)}H196`, class: "roof" }));
    parts.push(shape("path", { d: `M${x(intensity)} 84V${y(reach)}`, class: "drop" }));
    parts.push(shape("circle", { cx: x(intensity), cy: y(reach), r: 4, class: "point" }));
  }
  parts.push(label(8, 95, "1/16", "start"), label(x(16), 95, "16", "middle"), label(196, 95, "8192 flops a byte", "end"));
  const text = edge
    ? `At ${intensity.toPrecision(3)} flops a byte at most ${reach < 0.1 ? (100 * reach).toPrecision(2) : Math.round(100 * reach)} % of the tensor cores' peak; the GPU's balance is ${edge}.`
    : "No balance is known for this GPU.";
  return element("div", {}, shape("svg", { viewBox: "0 0 204 98", role: "img", "aria-label": text, class: "roofline" }, ...parts),
    element("p", { class: "hint" }, text));
}
