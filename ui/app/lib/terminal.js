// xterm.js under a policy without inline styles. It sets style sheets as text of <style> elements and styles as
// attributes, which the policy rejects; both are replaced by the object model, which the policy allows.
import { Terminal } from "../vendor/xterm/xterm.mjs";
import { FitAddon } from "../vendor/xterm/addon-fit.mjs";

function adoptStyles() {
  const create = document.createElement.bind(document);
  document.createElement = (name, options) => (name === "style" ? adopted(create("template")) : create(name, options));
  const setAttribute = Element.prototype.setAttribute;
  Element.prototype.setAttribute = function set(name, value) {
    if (name === "style") this.style.cssText = value;
    else setAttribute.call(this, name, value);
  };
}

/** Makes an element the handle of a style sheet. */
function adopted(element) {
  const sheet = new CSSStyleSheet();
  document.adoptedStyleSheets.push(sheet);
  Object.defineProperty(element, "textContent", { get: () => "", set: (text) => sheet.replaceSync(text) });
  const remove = element.remove.bind(element);
  element.remove = () => {
    document.adoptedStyleSheets = document.adoptedStyleSheets.filter((other) => other !== sheet);
    remove();
  };
  return element;
}

let isPrepared = false;

/** Loads the style sheet of the terminal. */
function loadStyles() {
  return new Promise((resolve, reject) => {
    const link = document.createElement("link");
    link.rel = "stylesheet";
    link.href = new URL("../vendor/xterm/xterm.css", import.meta.url);
    link.addEventListener("load", resolve);
    link.addEventListener("error", () => reject(new Error("failed to load the style sheet of the terminal")));
    document.head.append(link);
  });
}

/** Opens a terminal in an element. Returns the terminal and a function that fits it to the element. */
export async function openTerminal(element) {
  if (!isPrepared) {
    adoptStyles();
    await loadStyles();
    isPrepared = true;
  }
  const terminal = new Terminal({
    cursorBlink: true,
    fontSize: 14,
    scrollback: 5000,
    screenReaderMode: false,
    fontFamily: getComputedStyle(document.documentElement).getPropertyValue("--mono"),
    theme: { background: "#0b0d0e" },
  });
  const fit = new FitAddon();
  terminal.loadAddon(fit);
  terminal.open(element);
  fit.fit();
  return { terminal, fit: () => fit.fit() };
}
