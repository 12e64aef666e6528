// The list of artifacts; upload and fetch.
import { html, useMemo, useRef, useState } from "../lib/view.js";
import { post } from "../lib/api.js";
import { artifacts, useCollection } from "../lib/live.js";
import { go, link, setQuery } from "../lib/router.js";
import { Action, Check, Dialog, Failure, Field, Heading, Loading, Progress, State, toast } from "../lib/parts.js";
import { DropZone } from "../lib/drop-zone.js";
import { Table } from "../lib/table.js";
import { uploadFile } from "../lib/upload.js";
import { bytes, plural } from "../lib/format.js";

const versions = (artifact) => Object.values(artifact.blobs ?? {});
const newest = (artifact) => versions(artifact).at(-1);

const COLUMNS = [
  { id: "name", title: "Name", value: (image) => image.name, width: "minmax(0, 1.6fr)", phone: "minmax(0, 1.5fr)" },
  {
    id: "state",
    title: "State",
    value: (image) => image.state,
    cell: (image) => html`
      <${State} value=${image.state} />
    `,
    width: "minmax(90px, .8fr)",
    phone: "90px",
  },
  { id: "type", title: "Type", value: (image) => image.artifact_type, kind: "wide" },
  {
    id: "namespace",
    title: "Namespace",
    value: (image) => image.namespace,
    cell: (image) => html`
      ${image.namespace}${
        image.shared
          ? html`
              <span class="tag aside">shared</span>
            `
          : null
      }
    `,
    kind: "wide",
  },
  { id: "versions", title: "Versions", value: (image) => versions(image).length, kind: "wide end", width: "76px" },
  {
    id: "size",
    title: "Size",
    value: (image) => newest(image)?.size ?? 0,
    cell: (image) => (newest(image) ? bytes(newest(image).size) : "–"),
    kind: "end",
    width: "90px",
    phone: "80px",
  },
];

/** One upload; it can be paused, and continues where it stopped. */
function Upload({ file, admin }) {
  const [name, setName] = useState(file.name.replace(/\.(qcow2|img|raw|iso|vmdk)$/i, ""));
  const [shared, setShared] = useState(false);
  const [done, setDone] = useState(null);
  const [error, setError] = useState(null);
  const [artifact, setArtifact] = useState(null);
  const control = useRef(null);
  const [busy, setBusy] = useState(false);
  const start = async () => {
    control.current = new AbortController();
    setBusy(true);
    setError(null);
    try {
      const created = await uploadFile(file, name, {
        signal: control.current.signal,
        report: setDone,
        values: shared ? { shared } : {},
      });
      setArtifact(created);
      artifacts.touch(created.uuid);
      toast(`Uploaded ${name}.`);
    } catch (failure) {
      if (failure.name !== "AbortError") setError(failure);
    }
    setBusy(false);
  };
  if (artifact)
    return html`
      <li>
        <span class="line-one">
          <a href=${link("artifacts", artifact.uuid)}>${artifact.name}</a>
          <${State} value=${artifact.state} />
        </span>
      </li>
    `;
  return html`
    <li class="stack">
      <${Field} label="Name" name="name" error=${error}>
        <input value=${name} disabled=${busy || done !== null} onInput=${(event) => setName(event.target.value)} />
      <//>
      ${
        admin
          ? html`
              <${Check}
                label="Share with all namespaces"
                checked=${shared}
                disabled=${busy}
                onChange=${(event) => setShared(event.target.checked)}
              />
            `
          : null
      }
      ${
        done !== null
          ? html`
              <${Progress} label=${`Upload of ${file.name}`} done=${done} total=${file.size} />
            `
          : null
      }
      <span class="line-one">
        <span class="muted" role="status">
          ${done === null ? bytes(file.size) : `${bytes(done)} of ${bytes(file.size)}`}
        </span>
        ${
          busy
            ? html`
                <button type="button" onClick=${() => control.current.abort()}>Pause</button>
              `
            : html`
                <button type="button" class="primary" onClick=${start}>${done === null ? "Upload" : "Resume"}</button>
              `
        }
      </span>
      <${Failure} error=${error} />
    </li>
  `;
}

function Add({ close, admin }) {
  const [files, setFiles] = useState([]);
  const [address, setAddress] = useState("");
  const [shared, setShared] = useState(false);
  const [error, setError] = useState(null);
  const fetchImage = async () => {
    const artifact = await post("/artifacts", { url: address, shared: shared || undefined });
    artifacts.touch(artifact.uuid);
    close();
    go(link("artifacts", artifact.uuid));
  };
  return html`
    <${Dialog} title="Add artifact" close=${close} wide>
      <div class="body">
        <${DropZone} label="Files to upload" add=${(list) => setFiles((old) => [...old, ...list])}>
          Drop disk images here, or choose files. An interrupted upload continues when the same file is added again.
        <//>
        ${
          files.length
            ? html`
                <ul class="problems uploads">
                  ${files.map(
                    (file) => html`
                      <${Upload} key=${file.name + file.size} file=${file} admin=${admin} />
                    `,
                  )}
                </ul>
              `
            : null
        }
        <fieldset>
          <legend>Fetch by URL</legend>
          <${Field} label="URL or name" name="url" error=${error} hint="https://…, or a name such as debian:12">
            <input
              value=${address}
              placeholder="debian:12"
              spellcheck="false"
              onInput=${(event) => setAddress(event.target.value)}
            />
          <//>
          ${
            admin
              ? html`
                  <${Check}
                    label="Share with all namespaces"
                    checked=${shared}
                    onChange=${(event) => setShared(event.target.checked)}
                  />
                `
              : null
          }
          ${
            error && error.field !== "url"
              ? html`
                  <${Failure} error=${error} />
                `
              : null
          }
          <div class="form-footer">
            <${Action} class="primary" disabled=${!address} run=${fetchImage} onError=${setError}>Fetch<//>
          </div>
        </fieldset>
      </div>
    <//>
  `;
}

export default function Artifacts({ route, admin }) {
  const { records, loaded, error } = useCollection(artifacts);
  const [adding, setAdding] = useState(route.query.has("add"));
  const [filter, setFilter] = useState("");
  const shown = useMemo(
    () =>
      records.filter((image) =>
        `${image.name} ${image.artifact_type} ${image.namespace} ${image.source_url} ${image.state}`
          .toLowerCase()
          .includes(filter.toLowerCase()),
      ),
    [records, filter],
  );
  return html`
    <${Heading} title="Artifacts">
      ${
        admin
          ? html`
              <a class="button" href="#/blobs">Blobs</a>
            `
          : null
      }
      <button type="button" class="primary" onClick=${() => setAdding(true)}>Add artifact</button>
    <//>
    <div class="toolbar">
      <input
        type="search"
        aria-label="Filter artifacts"
        placeholder="Filter"
        value=${filter}
        onInput=${(event) => setFilter(event.target.value)}
      />
      <span class="count" role="status">${plural(shown.length, "artifact")}</span>
    </div>
    <${Failure} error=${error} retry=${() => artifacts.load()} />
    ${
      loaded || records.length
        ? html`
            <${Table}
              label="Artifacts"
              records=${shown}
              columns=${COLUMNS}
              keyOf=${(image) => image.uuid}
              href=${(image) => link("artifacts", image.uuid)}
              empty="There are no artifacts. Upload an image, or fetch one by URL."
            />
          `
        : error
          ? null
          : html`
              <${Loading} />
            `
    }
    ${
      adding
        ? html`
            <${Add}
              admin=${admin}
              close=${() => {
                setAdding(false);
                setQuery({ add: "" });
              }}
            />
          `
        : null
    }
  `;
}
