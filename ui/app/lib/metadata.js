// User-defined metadata of an object: JSON values by key.
import { html, useState } from "./view.js";
import { del, put, seg } from "./api.js";
import { ConfirmDelete, Empty, Field, IconButton, Panel } from "./parts.js";
import { FormDialog, useForm } from "./forms.js";

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
  const form = useForm({ key: entry?.[0] ?? "", value: entry ? asText(entry[1]) : "" });
  const save = async ({ key, value }) => {
    await put(`${path}/metadata/${seg(key)}`, { value: asValue(value) });
    close();
    reload();
  };
  return html`
    <${FormDialog}
      title=${entry ? `Change ${entry[0]}` : "Add metadata"}
      form=${form}
      verb="Save"
      ready=${form.values.key}
      run=${save}
      close=${close}
    >
      <${Field} label="Key" ...${form.field("key")}>
        <input ...${form.input("key")} disabled=${Boolean(entry)} autofocus=${!entry} />
      <//>
      <${Field} label="Value" ...${form.field("value")} hint="Text, or any JSON value">
        <textarea ...${form.input("value")}></textarea>
      <//>
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
                          <${IconButton} label=${`Change ${entry[0]}`} icon="edit" run=${() => setEditing({ entry })} />
                          <${IconButton}
                            label=${`Delete ${entry[0]}`}
                            icon="close"
                            run=${() => setDeleting(entry[0])}
                          />
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
