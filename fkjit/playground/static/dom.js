// Elements, always from text, never from HTML: what a kernel says is shown, not obeyed.

export const $ = (id) => document.getElementById(id);

/** element("button", { class: "quiet", onclick: f }, "Copy"): attributes, listeners, children. */
export function element(tag, given = {}, ...children) {
  return fill(document.createElement(tag), given, children);
}

/** The same for SVG. */
export function shape(tag, given = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), given, children);
}

function fill(made, given, children) {
  for (const [name, value] of Object.entries(given)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== null && value !== false)
      made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export function bytes(count) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (count < 1024) return `${unit === "B" ? count : count.toFixed(1)} ${unit}`;
    count /= 1024;
  }
  return `${count.toFixed(1)} GiB`;
}

export const percent = (share) => `${Math.round(100 * share)} %`;

/** Tabs of a list: click and arrow keys choose one; `choose(name)` is told. */
export function tabs(list, attribute, choose) {
  const all = () => [...list.querySelectorAll("button:not([hidden])")];
  const select = (name, focus = false) => {
    for (const tab of list.querySelectorAll("button")) {
      const on = tab.dataset[attribute] === name;
      tab.setAttribute(tab.role === "radio" ? "aria-checked" : "aria-selected", on);
      tab.tabIndex = on ? 0 : -1;
      if (on && focus) tab.focus();
    }
  };
  list.addEventListener("click", (event) => {
    const tab = event.target.closest("button");
    if (tab) select(tab.dataset[attribute]), choose(tab.dataset[attribute]);
  });
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const tabs = all();
    const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
    select(next.dataset[attribute], true);
    choose(next.dataset[attribute]);
    event.preventDefault();
  });
  return select;
}

/** A separator that divides `parent` in two, by pointer and by arrow keys: a percentage. */
export function divide(separator, parent) {
  const set = (share) => {
    const value = Math.round(Math.min(Math.max(share, 20), 85));
    separator.setAttribute("aria-valuenow", value);
    parent.style.setProperty("--above", `${value}fr`);
    parent.style.setProperty("--below", `${100 - value}fr`);
  };
  separator.addEventListener("keydown", (event) => {
    const step = { ArrowUp: -4, ArrowDown: 4 }[event.key];
    if (!step) return;
    set(Number(separator.getAttribute("aria-valuenow")) + step);
    event.preventDefault();
  });
  separator.addEventListener("pointerdown", (event) => separator.setPointerCapture(event.pointerId));
  separator.addEventListener("pointermove", (event) => {
    if (!separator.hasPointerCapture(event.pointerId)) return;
    const { top, height } = parent.getBoundingClientRect();
    set((100 * (event.clientY - top)) / height);
  });
}

/** A button that copies what `text()` gives, and says so. */
export function copyButton(text, label = "Copy") {
  const button = element("button", { class: "quiet", type: "button" }, label);
  button.addEventListener("click", () => copy(button, text()));
  return button;
}

export async function copy(button, text) {
  const before = button.dataset.label ?? button.textContent;
  button.dataset.label = before;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = before), 1200);
}
