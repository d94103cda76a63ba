// What the page uses of CodeMirror 6, as one module: ../static/editor.js (build.mjs makes it).
import { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands";
import { cpp } from "@codemirror/lang-cpp";
import {
  HighlightStyle, StreamLanguage, bracketMatching, foldGutter, foldKeymap, indentOnInput,
  syntaxHighlighting,
} from "@codemirror/language";
import { lintGutter, lintKeymap, setDiagnostics } from "@codemirror/lint";
import { highlightSelectionMatches, searchKeymap } from "@codemirror/search";
import { Compartment, EditorState, RangeSet, StateEffect, StateField } from "@codemirror/state";
import {
  Decoration, EditorView, GutterMarker, drawSelection, gutter, highlightActiveLine,
  highlightActiveLineGutter, keymap, lineNumbers,
} from "@codemirror/view";
import { tags } from "@lezer/highlight";

export {
  Compartment, Decoration, EditorState, EditorView, GutterMarker, HighlightStyle, RangeSet,
  StateEffect, StateField, StreamLanguage, bracketMatching, cpp, defaultKeymap, drawSelection, foldGutter,
  foldKeymap, gutter, highlightActiveLine, highlightActiveLineGutter, highlightSelectionMatches,
  history, historyKeymap, indentOnInput, indentWithTab, keymap, lineNumbers, lintGutter, lintKeymap,
  searchKeymap, setDiagnostics, syntaxHighlighting, tags,
};
