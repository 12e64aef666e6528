// Copies files to a guest and from it, through its agent.
import { html, useRef, useState } from "./view.js";
import { del, get, post, seg } from "./api.js";
import { Action, Failure, Field, Panel, Progress } from "./parts.js";
import { DropZone } from "./drop-zone.js";
import { FormFailure, useForm } from "./forms.js";
import { uploadFile } from "./upload.js";
import { bytes } from "./format.js";

/** The name of a file in the guest: a directory, which ends with a slash, gets the name of the local file. */
const guestPath = (directory, file) => (directory.endsWith("/") ? directory + file.name : directory);

/** Sends a file to the cluster, and starts the operation that writes it in the guest. */
async function copyToGuest(path, file, target, options) {
  // An upload becomes readable as a version of an artifact, which is only needed until the operation refers to its content.
  const name = `cp-${Date.now()}-${Math.floor(Math.random() * 1e9)}`;
  const artifact = await uploadFile(file, name, { ...options, values: { artifact_type: "other" } });
  try {
    const versions = await get(`/artifacts/${seg(artifact.uuid)}/versions`);
    return await post(`${path}/agent/put`, { path: target, blob_uuid: versions.at(-1).uuid });
  } finally {
    await del(`/artifacts/${seg(artifact.uuid)}`);
  }
}

/** One file that is sent. */
function Sending({ entry, cancel }) {
  return html`
    <li>
      <span class="line-one">
        <span>${entry.file.name}</span>
        <button type="button" aria-label=${`Cancel ${entry.file.name}`} onClick=${cancel}>
          ${entry.error ? "Remove" : "Cancel"}
        </button>
      </span>
      ${
        entry.error
          ? html`
              <${Failure} error=${entry.error} />
            `
          : html`
              <${Progress} label=${`Copy of ${entry.file.name}`} done=${entry.done} total=${entry.file.size} />
              <span class="muted" role="status">${bytes(entry.done)} of ${bytes(entry.file.size)}</span>
            `
      }
    </li>
  `;
}

/** Files to and from the guest. `started` gets each agent operation. */
export function GuestFiles({ path, started }) {
  const form = useForm({ directory: "/root/", path: "" });
  const [sending, setSending] = useState([]);
  const next = useRef(0);
  const change = (key, values) =>
    setSending((old) => old.map((entry) => (entry.key === key ? { ...entry, ...values } : entry)));
  const remove = (key) => setSending((old) => old.filter((entry) => entry.key !== key));
  const send = async (file) => {
    const entry = { key: next.current++, file, done: 0, control: new AbortController() };
    setSending((old) => [...old, entry]);
    try {
      const options = { signal: entry.control.signal, report: (done) => change(entry.key, { done }) };
      started(await copyToGuest(path, file, guestPath(form.values.directory, file), options));
      remove(entry.key);
    } catch (error) {
      if (error.name === "AbortError") remove(entry.key);
      else change(entry.key, { error });
    }
  };
  const fetchFile = async () => {
    form.fail(null);
    started(await post(`${path}/agent/get`, { path: form.values.path }));
  };
  return html`
    <${Panel} title="Files">
      <div class="body stack">
        <${Field}
          label="Copy to"
          ...${form.field("directory")}
          hint="A directory that exists in the guest, with a slash at its end, or the path of one file"
        >
          <input class="mono" ...${form.input("directory")} />
        <//>
        <${DropZone} label="Files to copy to the guest" add=${(files) => files.forEach(send)}>
          Drop files here to copy them to the guest, or choose them.
        <//>
        ${
          sending.length > 0 &&
          html`
            <ul class="problems">
              ${sending.map(
                (entry) => html`
                  <${Sending}
                    key=${entry.key}
                    entry=${entry}
                    cancel=${() => {
                      entry.control.abort();
                      remove(entry.key);
                    }}
                  />
                `,
              )}
            </ul>
          `
        }
        <div class="command">
          <${Field} label="File in the guest" ...${form.field("path")}>
            <input class="mono" placeholder="/var/log/messages" ...${form.input("path")} />
          <//>
          <${Action} disabled=${!form.values.path} run=${fetchFile} onError=${form.fail}>Read<//>
        </div>
        <${FormFailure} form=${form} />
      </div>
    <//>
  `;
}
