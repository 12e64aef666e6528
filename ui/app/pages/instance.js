// One instance: state, why, power, disks, interfaces, metadata, events, agent.
import { html, useState } from "../lib/view.js";
import { del, get, getBlob, post, seg } from "../lib/api.js";
import { networks, useCollection, useLive } from "../lib/live.js";
import { go, link, useQueryState } from "../lib/router.js";
import {
  Action,
  ConfirmDelete,
  CopyId,
  Facts,
  Failure,
  Heading,
  InstanceState,
  Panel,
  State,
  Tabs,
  Time,
  toast,
  Unloaded,
} from "../lib/parts.js";
import { Metadata } from "../lib/metadata.js";
import { Timeline } from "../lib/events.js";
import { Why } from "../lib/why.js";
import { Usage } from "../lib/usage.js";
import { Agent } from "../lib/agent.js";
import { InProgress } from "../lib/operations.js";
import { Migrate } from "../lib/migrate.js";
import { ShortTable } from "../lib/table.js";
import { OperationTable } from "../lib/operation-table.js";
import { AddInterface } from "../lib/add-interface.js";
import { bytes, duration, megabytes } from "../lib/format.js";

const TABS = [
  ["summary", "Summary"],
  ["agent", "Agent"],
  ["events", "Events"],
  ["operations", "Operations"],
];

function Power({ instance, path }) {
  const created = instance.state === "created";
  const power = instance.power_state;
  const action = (title, verb, when, kind = "") =>
    created && when
      ? html`
          <${Action} key=${verb} class=${kind} run=${() => post(`${path}/${verb}`)}>${title}<//>
        `
      : null;
  return html`
    ${action("Power on", "poweron", power === "off" || power === "crashed", "primary")}
    ${action("Reboot", "rebootsoft", power === "on")} ${action("Pause", "pause", power === "on")}
    ${action("Resume", "unpause", power === "paused", "primary")}
    ${action("Reset", "reboothard", power === "on" || power === "paused")}
    ${action("Power off", "poweroff", power === "on" || power === "paused")}
  `;
}

function Screenshot({ instance, path }) {
  const [shot, setShot] = useState(null);
  const [error, setError] = useState(null);
  const take = async () => {
    setError(null);
    const blob = await getBlob(`/blobs/${seg(await get(`${path}/screenshot`))}/data`);
    if (shot) URL.revokeObjectURL(shot);
    setShot(URL.createObjectURL(blob));
  };
  if (instance.power_state !== "on") return null;
  return html`
    <${Panel}
      title="Screen"
      actions=${html`
        <${Action} run=${take} onError=${setError}>${shot ? "Refresh" : "Take screenshot"}<//>
      `}
    >
      <div class="body shot">
        <${Failure} error=${error} />
        ${
          shot
            ? html`
                <img src=${shot} alt=${`Screen of ${instance.name}`} />
              `
            : html`
                <p class="hint">A screenshot shows the screen without opening the console.</p>
              `
        }
      </div>
    <//>
  `;
}

function Disks({ instance, path }) {
  const snapshot = async () => {
    await post(`${path}/snapshot`, { all: true });
    toast("Snapshot started.");
  };
  const rows = instance.disks.length ? instance.disks : instance.disk_spec;
  return html`
    <${Panel}
      title="Disks"
      actions=${
        instance.state === "created"
          ? html`
              <${Action} run=${snapshot}>Snapshot<//>
            `
          : null
      }
    >
      <${ShortTable}
        columns=${["Device", "Bus", "Size", "Image"]}
        records=${rows.map((disk, index) => ({ ...disk, index }))}
        row=${({ index, device, bus, size }) => html`
          <tr key=${index}>
            <td><code>${device ?? "–"}</code></td>
            <td>${bus}</td>
            <td>${size ? bytes(size * 1024 ** 3) : "–"}</td>
            <td>
              ${
                instance.disk_spec[index]?.base ??
                html`
                  <span class="muted">${index < instance.disk_spec.length ? "empty" : "config drive"}</span>
                `
              }
            </td>
          </tr>
        `}
        empty="No disks."
      />
    <//>
  `;
}

function Interfaces({ instance, path }) {
  const nets = useCollection(networks).records;
  const [adding, setAdding] = useState(false);
  const name = (uuid) => nets.find((net) => net.uuid === uuid)?.name ?? uuid;
  const float = (nic) =>
    nic.floating
      ? html`
          <${Action} run=${() => post(`/interfaces/${nic.uuid}/defloat`)}>Remove floating address<//>
        `
      : html`
          <${Action} run=${() => post(`/interfaces/${nic.uuid}/float`)}>Float<//>
        `;
  return html`
    <${Panel}
      title="Interfaces"
      actions=${
        instance.state === "created"
          ? html`
              <button type="button" onClick=${() => setAdding(true)}>Add</button>
            `
          : null
      }
    >
      <${ShortTable}
        columns=${["Network", "Address", "Floating", ["MAC", "wide"], ""]}
        records=${instance.interfaces}
        row=${(nic) => html`
          <tr key=${nic.uuid}>
            <td><a href=${link("networks", nic.network_uuid)}>${name(nic.network_uuid)}</a></td>
            <td><code>${nic.ipv4 ?? "–"}</code></td>
            <td><code>${nic.floating ?? "–"}</code></td>
            <td class="wide"><code>${nic.macaddr}</code></td>
            <td class="end"><span class="actions">${nic.ipv4 ? float(nic) : null}</span></td>
          </tr>
        `}
        empty="No interfaces."
      />
      ${
        adding
          ? html`
              <${AddInterface} path=${path} close=${() => setAdding(false)} />
            `
          : null
      }
    <//>
  `;
}

/** The replica of the disks of an instance, as text. */
function replicaText({ replicas, replica }) {
  if (!replica) return replicas ? "none yet" : null;
  const behind = replica.seconds_behind == null ? "no complete copy yet" : `${duration(replica.seconds_behind)} behind`;
  return [replica.state, replica.node && `on ${replica.node}`, behind].filter(Boolean).join(", ");
}

export default function Instance({ route, admin }) {
  const id = route.parts[1];
  const path = `/instances/${seg(id)}`;
  const [tab, select] = useQueryState(route, "tab", "summary");
  const [deleting, setDeleting] = useState(false);
  const [migrating, setMigrating] = useState(false);
  const { value: instance, error, reload } = useLive(() => get(path), [`instance/${id}`], [path]);
  if (!instance)
    return html`
      <${Unloaded} title="Instance" up=${["Instances", "#/instances"]} error=${error} retry=${reload} />
    `;
  const running = instance.state === "created" && ["on", "paused"].includes(instance.power_state);
  const gone = instance.state === "deleted" || instance.state === "delete-wait";
  const remove = async () => {
    await del(`${path}`);
    toast(`Deleting ${instance.name}.`);
    go("/instances");
  };
  const doomed = [
    `the instance ${instance.name} of the namespace ${instance.namespace}`,
    ...instance.disk_spec.map(
      (disk, index) =>
        `disk ${instance.disks[index]?.device ?? index + 1}${disk.size ? `, ${disk.size} GB` : ""}${disk.base ? `, from ${disk.base}` : ""}`,
    ),
    ...instance.interfaces.map(
      (nic) =>
        `interface ${nic.macaddr}${nic.ipv4 ? ` with address ${nic.ipv4}` : ""}${nic.floating ? ` and floating address ${nic.floating}` : ""}`,
    ),
  ];
  return html`
    <${Heading}
      title=${instance.name}
      up=${["Instances", "#/instances"]}
      status=${html`
        <${InstanceState} instance=${instance} />
      `}
    >
      ${
        running
          ? html`
              <a class="button" href=${`${link("instances", id, "console")}?kind=serial`}>Serial console</a>
              <a class="button" href=${`${link("instances", id, "console")}?kind=vga`}>Screen</a>
            `
          : null
      }
      <${Power} instance=${instance} path=${path} />
      ${
        instance.state === "created" &&
        html`
          <button type="button" onClick=${() => setMigrating(true)}>Migrate</button>
        `
      }
      ${
        gone
          ? null
          : html`
              <button type="button" class="danger" onClick=${() => setDeleting(true)}>Delete</button>
            `
      }
    <//>
    <${Failure} error=${error} retry=${reload} />
    ${
      instance.error_message
        ? html`
            <div class="failure" role="alert"><p>${instance.error_message}</p></div>
          `
        : null
    }
    <${Tabs} tabs=${TABS} current=${tab} select=${select} />
    ${
      tab === "summary"
        ? html`
            <div class="grid">
              <div class="stack two-thirds">
                <${Panel} title="Summary">
                  <${Facts}
                    rows=${[
                      ["CPUs", instance.cpus],
                      ["Memory", megabytes(instance.memory)],
                      [
                        "Node",
                        instance.node
                          ? html`
                              <a href=${link("nodes", instance.node)}>${instance.node}</a>
                            `
                          : "–",
                      ],
                      [
                        "Namespace",
                        html`
                          <a href=${link("namespaces", instance.namespace)}>${instance.namespace}</a>
                        `,
                      ],
                      [
                        "Power since",
                        instance.power_state_since
                          ? html`
                              <${Time} value=${instance.power_state_since} />
                            `
                          : null,
                      ],
                      [
                        "Agent",
                        instance.agent_state
                          ? html`
                              <${State}
                                value=${instance.agent_state}
                                tone=${instance.agent_state === "ready" ? "good" : "idle"}
                              />
                            `
                          : null,
                      ],
                      [
                        "Machine",
                        `${instance.machine_type}${instance.uefi ? ", UEFI" : ""}${instance.secure_boot ? ", secure boot" : ""}`,
                      ],
                      ["Display", `${instance.video.model}, ${instance.video.vdi}`],
                      ["Restart", instance.restart],
                      ["Storage", instance.storage],
                      ["Replica", replicaText(instance)],
                      ["Last copy failed", instance.replica?.error],
                      [
                        "UUID",
                        html`
                          <${CopyId} value=${instance.uuid} />
                        `,
                      ],
                    ]}
                  />
                <//>
                <${Disks} instance=${instance} path=${path} />
                <${Interfaces} instance=${instance} path=${path} />
              </div>
              <div class="stack third">
                <${InProgress} handle=${instance.last_cluster_operation} object=${`instance/${instance.uuid}`} />
                <${Why} path=${path} object=${`instance/${instance.uuid}`} history />
                <${Usage} path=${path} uuid=${instance.uuid} />
                <${Screenshot} instance=${instance} path=${path} />
                <${Metadata} path=${path} values=${instance.metadata} reload=${reload} />
              </div>
            </div>
          `
        : null
    }
    ${
      tab === "agent"
        ? html`
            <${Agent} instance=${instance} path=${path} />
          `
        : null
    }
    ${
      tab === "events"
        ? html`
            <${Timeline} path=${`${path}/events`} type="instance" uuid=${instance.uuid} />
          `
        : null
    }
    ${
      tab === "operations"
        ? html`
            <${OperationTable} path=${`${path}/clusteroperations?all=true`} objects=${[`instance/${id}`]} />
          `
        : null
    }
    ${
      migrating &&
      html`
        <${Migrate}
          instance=${instance}
          path=${path}
          admin=${admin}
          close=${() => setMigrating(false)}
          done=${reload}
        />
      `
    }
    ${
      deleting
        ? html`
            <${ConfirmDelete}
              title=${`Delete ${instance.name}?`}
              items=${doomed}
              kept="Snapshots are artifacts and are kept."
              word=${instance.name}
              run=${remove}
              close=${() => setDeleting(false)}
            />
          `
        : null
    }
  `;
}
