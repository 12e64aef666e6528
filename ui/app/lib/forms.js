// Forms in dialogs: the values of the fields, and the errors of the API at the fields that they name.
import { html, useState } from "./view.js";
import { withField } from "./api.js";
import { CopyId, Dialog, Failure, RequestId } from "./parts.js";

/** Returns the integer in a text; nothing for an empty text. Other text is left to the API, which names the field. */
export const integer = (text) => (text === "" ? undefined : /^-?\d+$/.test(String(text)) ? Number(text) : text);

/** Returns the lines of a text that are not empty. */
export const lines = (text) =>
  text
    .split("\n")
    .map((line) => line.trim())
    .filter(Boolean);

/**
 * The values of a form by the names of the API's fields. `field` returns the properties of a `Field`, `input` and `check`
 * those of its control.
 */
export function useForm(initial) {
  const [values, setValues] = useState(initial);
  const [error, setError] = useState(null);
  const names = Object.keys(initial);
  const set = (changes) => setValues((old) => ({ ...old, ...changes }));
  return {
    values,
    error,
    set,
    fail: (failure) => setError(failure && withField(failure, names)),
    field: (name) => ({ name, error }),
    input: (name) => ({
      name,
      value: values[name],
      autocomplete: "off",
      spellcheck: "false",
      onInput: (event) => set({ [name]: event.target.value }),
    }),
    check: (name) => ({ name, checked: values[name], onChange: (event) => set({ [name]: event.target.checked }) }),
    /** Whether the error is shown at its field. */
    isShown: names.includes(error?.field),
  };
}

/** The error of a form, unless it is shown at its field; then only the id of the request. */
export const FormFailure = ({ form }) =>
  form.isShown
    ? html`
        <${RequestId} error=${form.error} />
      `
    : html`
        <${Failure} error=${form.error} />
      `;

/** A dialog with a form. `run` sends the values; it throws the error of the API. */
export function FormDialog({ title, form, verb, run, ready = true, close, wide, extra, children }) {
  const [busy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    if (busy || !ready) return;
    setBusy(true);
    form.fail(null);
    try {
      await run(form.values);
    } catch (failure) {
      form.fail(failure);
    }
    setBusy(false);
  };
  return html`
    <${Dialog} title=${title} close=${close} wide=${wide}>
      <form onSubmit=${submit} novalidate>
        <div class="body">
          ${children}
          <${FormFailure} form=${form} />
        </div>
        <footer>
          ${extra}
          <button type="button" onClick=${close}>Cancel</button>
          <button class="primary" disabled=${busy || !ready} aria-busy=${busy}>${verb}</button>
        </footer>
      </form>
    <//>
  `;
}

/** A group of check boxes whose field is a list of the chosen options. */
export function Choices({ label, name, form, options, hint }) {
  const chosen = form.values[name];
  const failed = form.error?.field === name;
  const toggle = (option) =>
    form.set({ [name]: chosen.includes(option) ? chosen.filter((other) => other !== option) : [...chosen, option] });
  return html`
    <fieldset class=${`choices ${failed ? "failed" : ""}`}>
      <legend>${label}</legend>
      ${options.map(
        (option) => html`
          <label class="check" key=${option}>
            <input type="checkbox" checked=${chosen.includes(option)} onChange=${() => toggle(option)} />
            ${option}
          </label>
        `,
      )}
      ${
        failed
          ? html`
              <span class="error" role="alert">${form.error.text}</span>
            `
          : html`
              <span class="hint">${hint}</span>
            `
      }
    </fieldset>
  `;
}

/** Shows a secret once. */
export const SecretDialog = ({ title, value, close }) => html`
  <${Dialog} title=${title} close=${close}>
    <div class="body">
      <p>Copy the secret now. It cannot be shown again.</p>
      <${CopyId} value=${value} label="Copy secret" />
    </div>
    <footer><button type="button" class="primary" onClick=${close}>Done</button></footer>
  <//>
`;
