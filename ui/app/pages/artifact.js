// One artifact: versions, sharing, metadata, events.
import { html, useState } from "../lib/view.js";
import { del, get, post, seg } from "../lib/api.js";
import { useLive } from "../lib/live.js";
import { go, link, useQueryState } from "../lib/router.js";
import {
  Action,
  ConfirmDelete,
  CopyId,
  Facts,
  Failure,
  Heading,
  IconButton,
  Panel,
  State,
  Tabs,
  toast,
  Unloaded,
} from "../lib/parts.js";
import { ShortTable } from "../lib/table.js";
import { Metadata } from "../lib/metadata.js";
import { Timeline } from "../lib/events.js";
import { OperationTable } from "../lib/operation-table.js";
import { InProgress } from "../lib/operations.js";
import { bytes } from "../lib/format.js";

const TABS = [
  ["summary", "Summary"],
  ["events", "Events"],
  ["operations", "Operations"],
];

export default function Artifact({ route, admin }) {
  const id = route.parts[1];
  const path = `/artifacts/${seg(id)}`;
  const [tab, select] = useQueryState(route, "tab", "summary");
  const [deleting, setDeleting] = useState(null);
  const { value: artifact, error, reload } = useLive(() => get(path), [`artifact/${id}`], [path]);
  if (!artifact)
    return html`
      <${Unloaded} title="Artifact" up=${["Artifacts", "#/artifacts"]} error=${error} retry=${reload} />
    `;
  const versions = Object.entries(artifact.blobs ?? {});
  const share = async () => {
    await post(`${path}/${artifact.shared ? "unshare" : "share"}`);
    reload();
  };
  const removeVersion = (index, blob) =>
    setDeleting({
      title: `Delete version ${index}?`,
      items: [`version ${index} of ${artifact.name}, ${bytes(blob.size)}`],
      run: async () => {
        await del(`${path}/versions/${index}`);
        reload();
      },
    });
  const row = ([index, blob]) => html`
    <tr key=${index}>
      <td>${index}</td>
      <td>${bytes(blob.size)}</td>
      <td class="wide"><a href=${link("blobs", blob.uuid)}><code>${blob.uuid}</code></a></td>
      <td>${blob.reference_count}</td>
      <td class="end">
        <${IconButton} label=${`Delete version ${index}`} icon="close" run=${() => removeVersion(index, blob)} />
      </td>
    </tr>
  `;
  const removeAll = async () => {
    await del(path);
    toast(`Deleted ${artifact.name}.`);
    go("/artifacts");
  };
  return html`
    <${Heading}
      title=${artifact.name}
      up=${["Artifacts", "#/artifacts"]}
      status=${html`
        <${State} value=${artifact.state} />
      `}
    >
      ${
        admin
          ? html`
              <${Action} run=${share}>${artifact.shared ? "Stop sharing" : "Share with all namespaces"}<//>
            `
          : null
      }
      <button
        type="button"
        class="danger"
        onClick=${() => setDeleting({ title: `Delete ${artifact.name}?`, items: [`the artifact ${artifact.name}`, ...versions.map(([index, blob]) => `version ${index}, ${bytes(blob.size)}`)], run: removeAll })}
      >
        Delete
      </button>
    <//>
    ${
      artifact.error_message
        ? html`
            <div class="failure" role="alert"><p>${artifact.error_message}</p></div>
          `
        : null
    }
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
                      ["Type", artifact.artifact_type],
                      ["Namespace", artifact.namespace],
                      ["Shared", artifact.shared ? "with all namespaces" : "no"],
                      ["Versions kept", artifact.max_versions],
                      [
                        "Source",
                        html`
                          <code>${artifact.source_url}</code>
                        `,
                      ],
                      [
                        "UUID",
                        html`
                          <${CopyId} value=${artifact.uuid} />
                        `,
                      ],
                    ]}
                  />
                <//>
                <${Panel} title="Versions">
                  <${ShortTable}
                    columns=${["Version", "Size", ["Blob", "wide"], "References", ""]}
                    records=${versions}
                    row=${row}
                    empty="No versions yet."
                  />
                <//>
              </div>
              <div class="stack third">
                <${InProgress} handle=${artifact.last_cluster_operation} object=${`artifact/${artifact.uuid}`} />
                <${Metadata} path=${path} values=${artifact.metadata} reload=${reload} />
              </div>
            </div>
          `
        : null
    }
    ${
      tab === "events"
        ? html`
            <${Timeline} path=${`${path}/events`} type="artifact" uuid=${id} />
          `
        : null
    }
    ${
      tab === "operations"
        ? html`
            <${OperationTable} path=${`${path}/clusteroperations?all=true`} objects=${[`artifact/${id}`]} />
          `
        : null
    }
    ${
      deleting
        ? html`
            <${ConfirmDelete}
              ...${deleting}
              kept="Data that other artifacts or instances use is kept."
              close=${() => setDeleting(null)}
            />
          `
        : null
    }
  `;
}
