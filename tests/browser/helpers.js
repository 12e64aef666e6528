// Finds controls as assistive technology does, by their accessible names.
window.testHelpers = (() => {
  const visible = (element) => element.checkVisibility?.() ?? true;
  // While a dialog is being opened, nothing else can be used.
  const root = () => {
    const dialog = [...document.querySelectorAll("dialog")].at(-1);
    return !dialog ? document : dialog.open ? dialog : document.createElement("div");
  };
  const nameOf = (element) => (element.getAttribute("aria-label") ?? element.textContent).trim();
  const within = (parent, name) =>
    [...parent.querySelectorAll("button, a, [role=option]")].find(
      (element) => visible(element) && !element.disabled && nameOf(element) === name,
    );
  // The content comes before the navigation.
  const control = (name) => within(root().querySelector?.("main") ?? root(), name) ?? within(root(), name);
  const field = (label) => {
    const named = [...root().querySelectorAll("input, select, textarea")].find(
      (element) => element.getAttribute("aria-label") === label,
    );
    const labelled = [...root().querySelectorAll("label")].find(
      (element) => (element.querySelector(".label") ?? element).textContent.trim() === label,
    );
    return named ?? labelled?.querySelector("input, select, textarea");
  };
  const click = (name) => {
    const element = control(name);
    element?.click();
    return Boolean(element);
  };
  const select = (label) => {
    const element = field(label);
    element?.focus();
    element?.select?.();
    return Boolean(element) && document.activeElement === element;
  };
  /** Drops a file with a text on the area for files. */
  const drop = (name, text) => {
    const area = root().querySelector(".drop");
    const data = new DataTransfer();
    data.items.add(new File([text], name));
    for (const type of ["dragover", "drop"])
      area.dispatchEvent(new DragEvent(type, { dataTransfer: data, bubbles: true }));
  };
  /** Ends the animations of new rows. */
  const settle = () => {
    for (const animation of document.getAnimations())
      if (animation.effect.getTiming().iterations !== Infinity) animation.finish();
  };
  /** Remembers when a text appears on the page. */
  const watch = (text) => {
    window.seenAt = null;
    const timer = setInterval(() => {
      if (document.body.innerText.includes(text)) {
        window.seenAt = Date.now();
        clearInterval(timer);
      }
    }, 10);
  };
  return { click, control, drop, field, select, settle, watch };
})();
