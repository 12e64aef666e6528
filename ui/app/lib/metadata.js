// User-defined metadata of an object: JSON values by key.
import { html, useState } from "./view.js";
import { del, put, seg } from "./api.js";
import { Action, ConfirmDelete, Dialog, Empty, Failure, Field, Panel, Icon } from "./parts.js";

const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value));

/** Reads a JSON value; other text is a string. */
function asValue(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

function Edit({ path, entry, close, reload }) {
  const [key, setKey] = useState(entry?.[0] ?? "");
  const [text, setText] = useState(entry ? asText(entry[1]) : "");
  const [error, setError] = useState(null);
  const save = async () => {
    await put(`${path}/metadata/${seg(key)}`, { value: asValue(text) });
    close();
    reload();
  };
  return html`
    <${Dialog} title=${entry ? `Change ${entry[0]}` : "Add metadata"} close=${close}>
      <div class="body">
        <${Field} label="Key" name="key" error=${error}>
          <input value=${key} disabled=${Boolean(entry)} onInput=${(event) => setKey(event.target.value)} />
        <//>
        <${Field} label="Value" name="value" error=${error} hint="Text, or any JSON value">
          <textarea value=${text} onInput=${(event) => setText(event.target.value)}></textarea>
        <//>
        <${Failure} error=${error} />
      </div>
      <footer>
        <button type="button" onClick=${close}>Cancel</button>
        <${Action} class="primary" disabled=${!key} run=${save} onError=${setError}>Save<//>
      </footer>
    <//>
  `;
}

export function Metadata({ path, values, reload }) {
  const [editing, setEditing] = useState(null);
  const [deleting, setDeleting] = useState(null);
  const entries = Object.entries(values ?? {});
  return html`
    <${Panel}
      title="Metadata"
      actions=${html`
        <button type="button" onClick=${() => setEditing({})}>Add</button>
      `}
    >
      ${
        entries.length === 0
          ? html`
              <${Empty}>No metadata.<//>
            `
          : html`
              <table>
                <tbody>
                  ${entries.map(
                    (entry) => html`
                      <tr key=${entry[0]}>
                        <th scope="row">${entry[0]}</th>
                        <td><code>${asText(entry[1])}</code></td>
                        <td class="end">
                          <button
                            type="button"
                            class="icon"
                            aria-label=${`Change ${entry[0]}`}
                            onClick=${() => setEditing({ entry })}
                          >
                            <${Icon} name="edit" />
                          </button>
                          <button
                            type="button"
                            class="icon"
                            aria-label=${`Delete ${entry[0]}`}
                            onClick=${() => setDeleting(entry[0])}
                          >
                            <${Icon} name="close" />
                          </button>
                        </td>
                      </tr>
                    `,
                  )}
                </tbody>
              </table>
            `
      }
      ${
        editing
          ? html`
              <${Edit} path=${path} entry=${editing.entry} close=${() => setEditing(null)} reload=${reload} />
            `
          : null
      }
      ${
        deleting !== null
          ? html`
              <${ConfirmDelete}
                title="Delete metadata?"
                items=${[`the key ${deleting} and its value`]}
                close=${() => setDeleting(null)}
                run=${async () => {
                  await del(`${path}/metadata/${seg(deleting)}`);
                  reload();
                }}
              />
            `
          : null
      }
    <//>
  `;
}
