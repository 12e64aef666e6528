// Components that pages share.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./view.js";
import { age, fullTime } from "./format.js";
import { Icon } from "./icons.js";

export { Icon };

const TONES = {
  good: ["created", "on", "complete", "ready", "active", "live"],
  busy: [
    "draining",
    "restoring",
    "deleting",
    "initial",
    "preflight",
    "creating",
    "delete-wait",
    "queued",
    "executing",
    "stopping",
    "coming",
  ],
  bad: ["error", "crashed", "missing", "abort", "expired", "unknown", "degraded"],
};

export function toneOf(state) {
  if (!state) return "idle";
  if (state.endsWith("error")) return "bad";
  for (const [tone, states] of Object.entries(TONES)) if (states.includes(state)) return tone;
  return "idle";
}

/** A state as text with a colored dot. */
export const State = ({ value, tone }) => html`
  <span class=${`state ${tone ?? toneOf(value)}`}>${value ?? "–"}</span>
`;

/** Returns the state of an instance as one word: its power state once it is created. */
export const instanceState = (instance) => (instance.state === "created" ? instance.power_state : instance.state);

export function InstanceState({ instance }) {
  const value = instanceState(instance);
  return html`
    <${State} value=${value} />
  `;
}

export const Time = ({ value }) => html`
  <time title=${fullTime(value)}>${age(value)}</time>
`;

/** The id of a failed request. */
export const RequestId = ({ error }) =>
  error?.requestId
    ? html`
        <p class="request-id">
          Request
          <code>${error.requestId}</code>
        </p>
      `
    : null;

/** A failed request: its text, field and request id. */
export function Failure({ error, retry }) {
  if (!error) return null;
  return html`
    <div class="failure" role="alert">
      <p>
        ${
          error.field
            ? html`
                <b>${`${error.field}: `}</b>
              `
            : null
        }${error.text ?? error.message}
      </p>
      <${RequestId} error=${error} />
      ${
        retry
          ? html`
              <button type="button" onClick=${retry}>Try again</button>
            `
          : null
      }
    </div>
  `;
}

export const Loading = () => html`
  <p class="loading" role="status">Loading…</p>
`;
/** A page whose object is not known yet: it is loading, or it cannot be read. */
export const Unloaded = ({ title, up, error, retry }) =>
  error
    ? html`
        <${Heading} title=${title} up=${up} />
        <${Failure} error=${error} retry=${retry} />
      `
    : html`
        <${Loading} />
      `;
export const Empty = ({ children }) => html`
  <p class="empty">${children}</p>
`;

export function Panel({ title, actions, children, class: name = "" }) {
  return html`
    <section class=${`panel ${name}`} aria-label=${title}>
      <header>
        <h2>${title}</h2>
        <div class="actions">${actions}</div>
      </header>
      ${children}
    </section>
  `;
}

/** The heading of a page. It gets the focus when the page is shown, unless a control of the page has it. */
export function Heading({ title, up, children, status }) {
  const heading = useRef();
  useLayoutEffect(() => {
    if (!document.activeElement?.closest("main [tabindex], main input, main button, dialog"))
      heading.current.focus({ preventScroll: true });
  }, []);
  useEffect(() => {
    document.title = `${title} · Muster`;
  }, [title]);
  return html`
    <header class="heading">
      <div class="title">
        ${
          up
            ? html`
                <a class="up" href=${up[1]}>${up[0]}</a>
                <span class="slash" aria-hidden="true">/</span>
              `
            : null
        }
        <h1 ref=${heading} tabindex="-1">${title}</h1>
        ${status}
      </div>
      <div class="actions">${children}</div>
    </header>
  `;
}

/** Names and values. `rows` is a list of `[name, value]`; rows without a value are left out. */
export function Facts({ rows }) {
  return html`
    <dl class="facts">
      ${rows
        .filter((row) => row && row[1] != null && row[1] !== "")
        .map(
          ([name, value]) => html`
            <div key=${name}>
              <dt>${name}</dt>
              <dd>${value}</dd>
            </div>
          `,
        )}
    </dl>
  `;
}

export function CopyId({ value, label = `Copy ${value}` }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(value);
      setCopied(true);
      setTimeout(() => setCopied(false), 1200);
    } catch {
      /* not permitted */
    }
  };
  return html`
    <span class="copy">
      <code>${value}</code>
      <button type="button" class="icon" aria-label=${label} onClick=${copy}>
        <${Icon} name=${copied ? "check" : "copy"} />
      </button>
    </span>
  `;
}

/** A labelled control with the error of its field. */
export function Field({ label, name, hint, error, children, class: kind = "" }) {
  const failed = error && error.field === name;
  return html`
    <label class=${`field ${kind} ${failed ? "failed" : ""}`}>
      <span class="label">${label}</span>
      ${children}
      ${
        failed
          ? html`
              <span class="error" role="alert">${error.text}</span>
            `
          : hint
            ? html`
                <span class="hint">${hint}</span>
              `
            : null
      }
    </label>
  `;
}

export function Check({ label, ...rest }) {
  return html`
    <label class="check">
      <input type="checkbox" ...${rest} />
      ${label}
    </label>
  `;
}

/** A button that runs an asynchronous action and is disabled while it runs. */
export function Action({ run, children, onError, disabled = false, class: kind = "" }) {
  const [busy, setBusy] = useState(false);
  const alive = useRef(true);
  useEffect(() => {
    alive.current = true;
    return () => {
      alive.current = false;
    };
  }, []);
  const click = async () => {
    setBusy(true);
    try {
      await run();
    } catch (error) {
      (onError ?? toastError)(error);
    } finally {
      if (alive.current) setBusy(false);
    }
  };
  return html`
    <button type="button" class=${kind} disabled=${busy || disabled} aria-busy=${busy} onClick=${click}>
      ${children}
    </button>
  `;
}

/** A small button with an icon. `label` is its accessible name. */
export const IconButton = ({ label, icon, run }) => html`
  <button type="button" class="icon" aria-label=${label} onClick=${run}><${Icon} name=${icon} /></button>
`;

/**
 * A modal dialog. `close` is called when it is dismissed: by a click beside it, unless that would lose input that is not
 * `disposable`.
 */
export function Dialog({ title, close, children, wide, disposable = false }) {
  const element = useRef();
  const alive = useRef(true);
  const hasInput = useRef(false);
  const noteInput = () => {
    hasInput.current = true;
  };
  const press = (event) => {
    if (event.target === element.current && (disposable || !hasInput.current)) close();
  };
  useLayoutEffect(() => {
    const dialog = element.current;
    if (!dialog.open) dialog.showModal();
    return () => {
      alive.current = false;
      dialog.close();
    };
  }, []);
  // The event of a dialog that another one has replaced must not dismiss that one.
  const dismiss = () => alive.current && close();
  return html`
    <dialog
      ref=${element}
      class=${wide ? "wide" : ""}
      aria-label=${title}
      onClose=${dismiss}
      onCancel=${dismiss}
      onInput=${noteInput}
      onChange=${noteInput}
      onDrop=${noteInput}
      onMouseDown=${press}
    >
      <div class="dialog">
        <header>
          <h2>${title}</h2>
          <button type="button" class="icon" aria-label="Close" onClick=${close}><${Icon} name="close" /></button>
        </header>
        ${children}
      </div>
    </dialog>
  `;
}

const DELETES = "This cannot be undone. It deletes:";

/**
 * Asks before a deletion. `items` lists what is deleted; `word` must be typed if it is given. `run` returns false if it has
 * replaced this dialog by another one.
 */
export function ConfirmDelete({ title, lead = DELETES, items, kept, word, run, close, verb = "Delete" }) {
  const [typed, setTyped] = useState("");
  const [error, setError] = useState(null);
  const act = async () => {
    if ((await run()) !== false) close();
  };
  return html`
    <${Dialog} title=${title} close=${close}>
      <div class="body">
        <p>${lead}</p>
        <ul class="doomed">
          ${items.map(
            (item) => html`
              <li>${item}</li>
            `,
          )}
        </ul>
        ${
          kept
            ? html`
                <p class="hint">${kept}</p>
              `
            : null
        }
        ${
          word
            ? html`
                <${Field} label=${`Type ${word} to confirm`}>
                  <input value=${typed} autocomplete="off" autofocus onInput=${(e) => setTyped(e.target.value)} />
                <//>
              `
            : null
        }
        <${Failure} error=${error} />
      </div>
      <footer>
        <button type="button" onClick=${close}>Cancel</button>
        <${Action} class="danger" disabled=${Boolean(word) && typed !== word} run=${act} onError=${setError}>${verb}<//>
      </footer>
    <//>
  `;
}

/** A bar of a used part. */
export function Meter({ label, used, total, text }) {
  const share = total > 0 ? Math.min(1, Math.max(0, used / total)) : 0;
  return html`
    <div
      class=${`meter ${share > 0.9 ? "full" : share > 0.75 ? "high" : ""}`}
      role="meter"
      aria-label=${label}
      aria-valuemin="0"
      aria-valuemax="100"
      aria-valuenow=${Math.round(share * 100)}
      aria-valuetext=${text}
    >
      <span class="bar"><span style=${{ width: `${share * 100}%` }}></span></span>
      <span class="text">${text}</span>
    </div>
  `;
}

export function Progress({ label, done, total }) {
  return html`
    <progress aria-label=${label} max=${total || undefined} value=${total ? done : undefined}></progress>
  `;
}

const toasts = [];
let showToasts = () => {};

export function toast(text, kind = "") {
  const entry = { text, kind, key: Math.random() };
  toasts.push(entry);
  showToasts();
  setTimeout(
    () => {
      toasts.splice(toasts.indexOf(entry), 1);
      showToasts();
    },
    kind === "bad" ? 9000 : 4000,
  );
}

export const toastError = (error) =>
  toast(`${error.message}${error.requestId ? ` (request ${error.requestId})` : ""}`, "bad");

export function Toasts() {
  const [, update] = useState(0);
  useEffect(() => {
    showToasts = () => update((n) => n + 1);
    return () => {
      showToasts = () => {};
    };
  }, []);
  return html`
    <div class="toasts" role="status" aria-live="polite">
      ${toasts.map(
        (entry) => html`
          <div key=${entry.key} class=${`toast ${entry.kind}`}>${entry.text}</div>
        `,
      )}
    </div>
  `;
}

export function Tabs({ tabs, current, select }) {
  return html`
    <nav class="tabs" aria-label="Sections">
      ${tabs.map(
        ([id, title]) => html`
          <button
            type="button"
            key=${id}
            aria-current=${current === id ? "page" : undefined}
            onClick=${() => select(id)}
          >
            ${title}
          </button>
        `,
      )}
    </nav>
  `;
}
