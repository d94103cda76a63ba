// Bundles CodeMirror 6 into ../static/editor.js and its licences into ../static/LICENSES.txt:
//   cd fkjit/playground/editor && npm ci && npm run build
import { build } from "esbuild";
import { existsSync, readFileSync, writeFileSync } from "node:fs";

const made = await build({
  entryPoints: ["editor.js"],
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  legalComments: "none", // all licences stand in LICENSES.txt
  metafile: true,
  outfile: "../static/editor.js",
});

const packages = new Set();
for (const path of Object.keys(made.metafile.inputs)) {
  const found = path.match(/node_modules\/((?:@[^/]+\/)?[^/]+)\//);
  if (found) packages.add(found[1]);
}
const texts = [...packages].sort().map((name) => {
  const { version, license } = JSON.parse(readFileSync(`node_modules/${name}/package.json`));
  const file = ["LICENSE", "LICENSE.md", "license"].find((f) => existsSync(`node_modules/${name}/${f}`));
  if (!file) throw new Error(`${name} has no licence file`);
  const text = readFileSync(`node_modules/${name}/${file}`, "utf8").trim();
  return `${name} ${version} (${license})\n\n${text}\n`;
});
const rule = `\n${"-".repeat(80)}\n\n`;
writeFileSync("../static/LICENSES.txt", `editor.js is a bundle of these packages.\n${rule}${texts.join(rule)}`);
