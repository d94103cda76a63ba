// What the page shows, as an address and as a file. Kernels, parameters and text; no results.

const MOST_ADDRESS = 60_000; // characters that browsers and chats let pass
const FORMAT = "fkjit playground 1";

/** The state as the part of the address after "#". */
export async function toAddress(state) {
  const found = new URLSearchParams();
  found.set("kernel", state.kernel);
  found.set("arch", state.arch);
  found.set("params", JSON.stringify(state.params));
  if (state.b) found.set("b", JSON.stringify(state.b));
  for (const name of ["view", "panel", "line"]) if (state[name]) found.set(name, state[name]);
  if (state.text !== null) found.set("text", await packed(state.text));
  const text = `#${found}`;
  if (text.length > MOST_ADDRESS) found.delete("text");
  return { address: `#${found}`, whole: text.length <= MOST_ADDRESS };
}

/** The inverse; null where there is nothing. Values are checked by the server. */
export async function fromAddress(hash) {
  const found = new URLSearchParams(hash.replace(/^#/, ""));
  if (!found.get("kernel")) return null;
  const text = found.get("text");
  return read({
    kernel: found.get("kernel"),
    arch: found.get("arch"),
    params: JSON.parse(found.get("params") ?? "{}"),
    b: JSON.parse(found.get("b") ?? "null"),
    view: found.get("view"),
    panel: found.get("panel"),
    line: Number(found.get("line")) || 0,
    text: text ? await unpacked(text) : null,
  });
}

export function toFile({ kernel, arch, params, b, view, panel, line, text }) {
  const content = { format: FORMAT, kernel, arch, params, b, view, panel, line, text };
  return new Blob([JSON.stringify(content, null, 2)], { type: "application/json" });
}

/** An Error where it is no share file. */
export async function fromFile(file) {
  if (file.size > 2 << 20) throw new Error("more than 2 MiB: this is no share file");
  const found = JSON.parse(await file.text());
  if (found?.format !== FORMAT) throw new Error(`this file does not say "${FORMAT}"`);
  return read(found);
}

/** Only what a state has, each of its type. */
function read(found) {
  const word = (value, fallback) => (typeof value === "string" ? value : fallback);
  const mapping = (value) => (value && typeof value === "object" ? value : {});
  const b = found.b && {
    arch: word(found.b.arch, "sm_80"),
    params: mapping(found.b.params),
    source: found.b.source === "file" ? "file" : "edited",
  };
  return {
    kernel: word(found.kernel, ""),
    arch: word(found.arch, ""),
    params: mapping(found.params),
    b: b || null,
    view: ["source", "ptx", "code", "diff"].find((name) => name === found.view) ?? "code",
    panel: ["overview", "banks", "fragments", "compare"].find((n) => n === found.panel) ?? "overview",
    line: Number.isInteger(found.line) ? found.line : 0,
    text: word(found.text, null),
  };
}

async function packed(text) {
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  const data = new Uint8Array(await new Response(stream).arrayBuffer());
  let binary = "";
  for (const byte of data) binary += String.fromCharCode(byte);
  return btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

async function unpacked(text) {
  const binary = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
  const data = Uint8Array.from(binary, (char) => char.charCodeAt(0));
  const stream = new Blob([data]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const reader = stream.getReader();
  const parts = [];
  for (let size = 0; ; ) {
    const { done, value } = await reader.read();
    if (done) break;
    size += value.length;
    if (size > 1 << 20) throw new Error("the address holds more than 1 MiB of text");
    parts.push(value);
  }
  return new Blob(parts).text();
}
