// What stands above the editors: kernel, target, parameters.
import { post } from "./api.js";
import { $, element } from "./dom.js";

export const written = (value) => (Array.isArray(value) ? value.join(",") : String(value));
export const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

/** Kernels by op, a person's own first. */
export function fillKernels(kernels) {
  const byOp = Map.groupBy(kernels, (one) => (one.yours ? "yours" : one.op));
  const groups = [...byOp].sort(([one], [other]) => (other === "yours") - (one === "yours"));
  $("kernel").replaceChildren(
    ...groups.map(([op, some]) =>
      element("optgroup", { label: op === "yours" ? "Yours, and a new one" : op },
        ...some.map((one) => element("option", { value: one.kernel, title: one.doc },
          one.kernel === "new_kernel.plain" ? "new kernel" : one.kernel)))));
}

/** Targets; those on which a kernel has no variant say so. */
export function fillTargets(select, kernel, chosen) {
  select.replaceChildren(
    ...Object.entries(kernel.first).map(([name, first]) =>
      element("option", { value: name, disabled: first === null },
        first === null ? `${name} (not for it)` : name)));
  select.value = chosen;
}

/** A list for each parameter; `changed(params)`. Values that do not go with the others are marked. */
export function fillParams(parent, kernel, params, arch, changed) {
  const id = parent.id;
  const chosen = { ...params };
  parent.replaceChildren(
    ...kernel.parameters.filter((one) => one.values.length > 1).map((one) => {
      const select = element("select", {
        id: `${id}-${one.name}`,
        onchange: () => {
          chosen[one.name] = one.values[select.selectedIndex];
          changed({ ...chosen });
          void markIllegal(parent, kernel, chosen, arch);
        },
      }, ...one.values.map((value) => element("option", {}, written(value))));
      select.selectedIndex = one.values.findIndex((value) => same(value, params[one.name]));
      return element("label", { class: "field", title: one.doc },
        `${one.name.replaceAll("_", " ")}${one.tunable ? "*" : ""} `, select);
    }));
  void markIllegal(parent, kernel, chosen, arch);
}

async function markIllegal(parent, kernel, params, arch) {
  let legal;
  try {
    legal = await post("api/legal", { kernel: kernel.kernel, arch, params });
  } catch {
    return; // the run itself says what is wrong
  }
  for (const one of kernel.parameters) {
    const select = document.getElementById(`${parent.id}-${one.name}`);
    [...(select?.options ?? [])].forEach((option, at) => {
      option.textContent = written(one.values[at]) + (legal[one.name][at] ? "" : " ✕");
    });
  }
}

/** A legal variant on a target with as much of what is wanted as there is. `keep`: a whole variant
 * that is not legal stays as it is; the run says why. */
export async function startingParams(kernel, arch, wanted = {}, keep = false) {
  const known = ({ name, values }) => values.some((value) => same(value, wanted[name]));
  if (keep && kernel.parameters.every(known)) return { ...wanted };
  const found = await post("api/nearest", { kernel: kernel.kernel, arch, params: wanted });
  return found.params ?? { ...Object.values(kernel.first).find((one) => one) };
}

/** Commands of a terminal that do the same, for the kernel as its file has it. */
export function commands(kernel, params, arch) {
  const [op, name] = kernel.kernel.split(".");
  const words = kernel.parameters
    .map((one) => `--${one.name.replaceAll("_", "-")} ${written(params[one.name])}`)
    .join(" ");
  return [
    ["machine code with its lines", `fkjit show ${op} ${name} ${words} --arch ${arch} --sass --lines`],
    ["registers and occupancy", `fkjit show ${op} ${name} ${words} --arch ${arch}`],
    ["numbers, memory, races, banks", `fkjit check ${op} ${name} ${words} --arch ${arch}`],
    ["image, manifest and C header", `fkjit compile ${op} ${name} ${words} --arch ${arch} --output kernels`],
  ];
}
