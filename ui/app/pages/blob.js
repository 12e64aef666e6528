// One blob: its content, copies and references, and the labels that point at it.
import { html, useState } from "../lib/view.js";
import { del, get, post, seg, url } from "../lib/api.js";
import { artifacts, useLive } from "../lib/live.js";
import { go, link, useQueryState } from "../lib/router.js";
import {
  ConfirmDelete,
  CopyId,
  Facts,
  Failure,
  Field,
  Heading,
  Panel,
  State,
  Tabs,
  toast,
  Unloaded,
} from "../lib/parts.js";
import { FormDialog, useForm } from "../lib/forms.js";
import { Metadata } from "../lib/metadata.js";
import { ObjectLink, Timeline } from "../lib/events.js";
import { ShortTable } from "../lib/table.js";
import { bytes, fullTime, shortId } from "../lib/format.js";

const TABS = [
  ["summary", "Summary"],
  ["events", "Events"],
];

/** Points a label at a blob. */
function LabelForm({ uuid, close }) {
  const form = useForm({ label: "" });
  const save = async ({ label }) => {
    // A label may be in a namespace: `ci/nightly`.
    const artifact = await post(`/label/${label.split("/").map(seg).join("/")}`, { blob_uuid: uuid });
    artifacts.touch(artifact.uuid);
    close();
    go(link("artifacts", artifact.uuid));
  };
  return html`
    <${FormDialog} title="Label blob" form=${form} verb="Label" run=${save} ready=${form.values.label.trim() !== ""} close=${close}>
      <${Field} label="Label" hint="An existing label gets this blob as its next version." ...${form.field("label")}>
        <input ...${form.input("label")} autofocus />
      <//>
    <//>
  `;
}

/** Returns the references to an object, whatever their relationship. */
const allReferences = (references) => Object.values(references ?? {}).flat();

export default function Blob({ route, admin }) {
  // Only administrators may list all blobs.
  const up = admin ? ["Blobs", "#/blobs"] : ["Artifacts", "#/artifacts"];
  const id = route.parts[1];
  const path = `/blobs/${seg(id)}`;
  const [tab, select] = useQueryState(route, "tab", "summary");
  const [dialog, setDialog] = useState(null);
  const { value: blob, error, reload } = useLive(() => get(path), [`blob/${id}`], [path]);
  if (!blob)
    return html`
      <${Unloaded} title="Blob" up=${up} error=${error} retry=${reload} />
    `;
  const close = () => setDialog(null);
  const remove = async () => {
    await del(path);
    toast("The blob is deleted as soon as nothing uses it.");
    go(up[1]);
  };
  const used = allReferences(blob.references_to);
  const row = ({ relationship, source_object_type: type, source_uuid: uuid, relationship_value: value }) => html`
    <tr key=${`${relationship} ${uuid} ${value}`}>
      <td>${relationship.replaceAll("_", " ")}</td>
      <td><${ObjectLink} type=${type} uuid=${uuid} /></td>
    </tr>
  `;
  const checksums = Object.entries({ sha512: blob.sha512, ...blob.checksums }).filter(([, value]) => value);
  return html`
    <${Heading}
      title=${`Blob ${shortId(blob.uuid)}`}
      up=${up}
      status=${html`
        <${State} value=${blob.state} />
      `}
    >
      <a class="button" href=${url(`${path}/data`)} download=${`${blob.uuid}`}>Download</a>
      <button type="button" onClick=${() => setDialog("label")}>Label</button>
      <button type="button" class="danger" onClick=${() => setDialog("delete")}>Delete</button>
    <//>
    <${Failure} error=${error} retry=${reload} />
    <${Tabs} tabs=${TABS} current=${tab} select=${select} />
    ${
      tab === "summary"
        ? html`
            <div class="grid">
              <div class="stack two-thirds">
                <${Panel} title="Summary">
                  <${Facts}
                    rows=${[
                      ["Size", bytes(blob.size)],
                      ["Format", blob["file format"]],
                      ["Virtual size", blob["virtual size"] && bytes(blob["virtual size"])],
                      ["Received", blob.fetched_at ? fullTime(blob.fetched_at) : null],
                      ["Last used", blob.last_used ? fullTime(blob.last_used) : null],
                      ["Copies", blob.locations.join(", ")],
                      ["References", String(blob.reference_count)],
                      [
                        "Base",
                        blob.depends_on &&
                          html`
                            <${ObjectLink} type="blob" uuid=${blob.depends_on} />
                          `,
                      ],
                      [
                        "UUID",
                        html`
                          <${CopyId} value=${blob.uuid} />
                        `,
                      ],
                      ...checksums.map(([algorithm, value]) => [
                        algorithm.toUpperCase(),
                        html`
                          <${CopyId} value=${value} label=${`Copy ${algorithm}`} />
                        `,
                      ]),
                    ]}
                  />
                <//>
                <${Panel} title="Used by">
                  <${ShortTable}
                    columns=${["Relationship", "Object"]}
                    records=${used}
                    row=${row}
                    empty="No object that you may see uses it."
                  />
                <//>
              </div>
              <div class="stack third">
                <${Metadata} path=${path} values=${blob.metadata} reload=${reload} />
              </div>
            </div>
          `
        : html`
            <${Timeline} path=${`${path}/events`} type="blob" uuid=${id} />
          `
    }
    ${
      dialog === "label"
        ? html`
            <${LabelForm} uuid=${blob.uuid} close=${close} />
          `
        : null
    }
    ${
      dialog === "delete"
        ? html`
            <${ConfirmDelete}
              title="Delete the blob?"
              items=${[`the blob ${blob.uuid}, ${bytes(blob.size)}`, `its copies on ${blob.locations.join(", ") || "no node"}`]}
              kept="A blob that artifacts or instances use is kept."
              run=${remove}
              close=${close}
            />
          `
        : null
    }
  `;
}
