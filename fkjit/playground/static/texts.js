// The two editors: the template, and read-only texts that are linked with it by line.
import {
  Decoration, EditorState, EditorView, HighlightStyle, StateEffect, StateField, StreamLanguage,
  bracketMatching, cpp, defaultKeymap, drawSelection, highlightActiveLine,
  highlightActiveLineGutter, highlightSelectionMatches, history, historyKeymap, indentOnInput,
  indentWithTab, keymap, lineNumbers, lintGutter, lintKeymap, searchKeymap, setDiagnostics,
  syntaxHighlighting, tags,
} from "./editor.js";

const nonce = document.querySelector("meta[name=csp-nonce]").content;
const setLinked = StateEffect.define();
const linkedLine = Decoration.line({ class: "linked" });

/** The lines that are linked with the other editor's line; kept through edits. */
const linked = StateField.define({
  create: () => Decoration.none,
  update(found, transaction) {
    found = found.map(transaction.changes);
    for (const effect of transaction.effects) {
      if (!effect.is(setLinked)) continue;
      const { doc } = transaction.state;
      const lines = effect.value.filter((n) => n >= 1 && n <= doc.lines);
      found = Decoration.set(lines.map((n) => linkedLine.range(doc.line(n).from)));
    }
    return found;
  },
  provide: (field) => EditorView.decorations.from(field),
});

const colours = HighlightStyle.define([
  { tag: [tags.keyword, tags.modifier, tags.controlKeyword], color: "var(--code-keyword)" },
  { tag: [tags.typeName, tags.standard(tags.typeName), tags.className], color: "var(--code-type)" },
  { tag: [tags.number, tags.bool, tags.character], color: "var(--code-number)" },
  { tag: [tags.string, tags.special(tags.string)], color: "var(--code-string)" },
  { tag: [tags.comment, tags.lineComment, tags.blockComment], color: "var(--code-comment)" },
  { tag: [tags.processingInstruction, tags.meta], color: "var(--code-meta)" },
  { tag: [tags.function(tags.variableName), tags.function(tags.definition(tags.variableName))],
    color: "var(--code-function)" },
]);

/** PTX and machine code: an opcode, registers, numbers, labels, comments. */
const assembly = StreamLanguage.define({
  startState: () => ({ head: true }),
  token(stream, state) {
    if (stream.sol()) state.head = true;
    if (stream.eatSpace()) return null;
    if (stream.match(/^\/\/.*/)) return "comment";
    if (stream.match(/^[0-9a-f]{5,}(?=  )/)) return "comment";
    if (stream.match(/^@!?%?U?p?P?\w+/)) return "meta";
    if (stream.match(/^[$.]L[\w$.]*:?/)) return "meta";
    if (state.head && stream.match(/^\.[\w.]+/)) return "keyword";
    if (state.head && stream.match(/^[A-Za-z][\w.:]*/)) return (state.head = false), "keyword";
    if (stream.match(/^(U?[RP]\d+|U?RZ|U?PT)\b|^%[\w.]+/)) return "typeName";
    if (stream.match(/^-?(0x[0-9a-fA-F]+|0[fd][0-9A-Fa-f]+|\d[\d.eE+-]*)/)) return "number";
    if (stream.match(/^"[^"]*"/)) return "string";
    if (stream.match(/^\w+/)) return null;
    stream.next();
    return null;
  },
});

const difference = StreamLanguage.define({
  token(stream) {
    const first = stream.peek();
    stream.skipToEnd();
    return { "+": "string", "-": "number", "@": "meta" }[first] ?? null;
  },
});

const look = EditorView.theme({
  "&": { height: "100%", fontSize: "12.5px", backgroundColor: "transparent", color: "var(--ink)" },
  "&.cm-focused": { outline: "2px solid var(--accent)", outlineOffset: "-2px" },
  ".cm-scroller": { fontFamily: "var(--mono)", lineHeight: "1.5" },
  ".cm-gutters": { backgroundColor: "transparent", color: "var(--faint)", border: "none" },
  ".cm-activeLine": { backgroundColor: "var(--active)" },
  ".cm-activeLineGutter": { backgroundColor: "var(--active)", color: "var(--ink)" },
  ".cm-line.linked": { backgroundColor: "var(--linked)", boxShadow: "inset 3px 0 var(--accent)" },
  ".cm-cursor": { borderLeftColor: "var(--ink)" },
  "&.cm-focused > .cm-scroller > .cm-selectionLayer .cm-selectionBackground": {
    backgroundColor: "var(--selection)" },
  ".cm-selectionBackground": { backgroundColor: "var(--selection)" },
  ".cm-tooltip, .cm-panels": {
    backgroundColor: "var(--panel)", color: "var(--ink)", border: "1px solid var(--edge)" },
  ".cm-diagnostic": { whiteSpace: "pre-wrap", maxWidth: "70ch" },
  ".cm-selectionMatch": { backgroundColor: "var(--active)" },
});

const common = [
  EditorView.cspNonce.of(nonce), look, linked, lineNumbers(), drawSelection(),
  highlightActiveLine(), highlightActiveLineGutter(), highlightSelectionMatches(),
  syntaxHighlighting(colours),
];

/** The template. `changed(text)` at each edit, `moved(line)` when the cursor is on another line. */
export class TemplateEditor {
  constructor(parent, changed, moved) {
    this.quiet = false;
    this.extensions = [
      ...common, history(), cpp(), bracketMatching(), indentOnInput(), lintGutter(),
      keymap.of([...lintKeymap, ...searchKeymap, ...historyKeymap, indentWithTab, ...defaultKeymap]),
      EditorView.contentAttributes.of({ "aria-label": "Template of the kernel" }),
      EditorView.updateListener.of((update) => {
        if (update.docChanged && !this.quiet) changed(this.text);
        if (update.selectionSet && update.view.hasFocus) moved(this.line);
      }),
    ];
    this.view = new EditorView({ parent, state: this.stateOf("") });
  }

  stateOf(doc) {
    return EditorState.create({ doc, extensions: this.extensions });
  }

  get text() {
    return this.view.state.doc.toString();
  }

  /** Another text, with an empty history. */
  set text(text) {
    this.view.setState(this.stateOf(text));
  }

  get line() {
    return lineOf(this.view);
  }

  /** Marks of the last run: [{line, severity, kind, text}]. */
  mark(marks) {
    const { doc } = this.view.state;
    const found = marks.map(({ line, severity, kind, text }) => {
      const { from, to, text: own } = doc.line(Math.min(Math.max(line, 1), doc.lines));
      const start = from + own.length - own.trimStart().length;
      return { from: Math.min(start, to), to, severity, source: kind, message: text };
    });
    this.view.dispatch(setDiagnostics(this.view.state, found));
  }

  link(line, show) {
    link(this.view, line ? [line] : [], show);
  }

  /** Put the cursor on a line, and the keyboard there. */
  go(line) {
    const { doc } = this.view.state;
    const { from } = doc.line(Math.min(Math.max(line, 1), doc.lines));
    this.view.focus();
    this.view.dispatch({
      selection: { anchor: from }, effects: EditorView.scrollIntoView(from, { y: "center" }),
    });
  }
}

/** A read-only text. `moved(line)` when a person is on another of its lines. */
export class CodeView {
  constructor(parent, moved) {
    this.extensions = [
      ...common, keymap.of([...searchKeymap, ...defaultKeymap]), EditorState.readOnly.of(true),
      EditorView.contentAttributes.of({ "aria-label": "Text of the compiler", tabindex: "0" }),
      EditorView.updateListener.of((update) => {
        if (update.selectionSet && update.view.hasFocus) moved(lineOf(update.view));
      }),
    ];
    this.view = new EditorView({ parent, state: this.stateOf("", "source") });
  }

  stateOf(doc, kind) {
    const language = kind === "source" ? cpp() : kind === "diff" ? difference : assembly;
    return EditorState.create({ doc, extensions: [...this.extensions, language] });
  }

  /** Another text of a kind: "source", "ptx", "code", "diff". */
  show(text, kind) {
    if (this.text === text && this.kind === kind) return;
    const top = this.kind === kind ? this.view.scrollDOM.scrollTop : 0;
    this.text = text;
    this.kind = kind;
    this.view.setState(this.stateOf(text, kind));
    this.view.scrollDOM.scrollTop = top;
  }

  link(lines, show) {
    link(this.view, lines, show);
  }
}

function lineOf(view) {
  return view.state.doc.lineAt(view.state.selection.main.head).number;
}

function link(view, lines, show) {
  const effects = [setLinked.of(lines)];
  const first = lines.find((n) => n >= 1 && n <= view.state.doc.lines);
  if (show && first) {
    const { from } = view.state.doc.line(first);
    effects.push(EditorView.scrollIntoView(from, { y: "center" }));
  }
  view.dispatch({ effects });
}
